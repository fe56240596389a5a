"""What people see: the terminal, tables, progress, log lines, the state of a run in text."""
