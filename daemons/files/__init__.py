"""Writes and loads files of a run, and transfers them between hosts."""
