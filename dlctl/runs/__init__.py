"""The files of a run: where they are, what is in them, and how they are read."""
