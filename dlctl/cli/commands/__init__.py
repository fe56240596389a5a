"""One file per command: parse, find the run, one call of an operation, show."""
