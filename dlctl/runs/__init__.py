"""The files of a run: their locations, formats, and readers."""
