"""Compressors: what of a gradient travels now, and what stays behind for the next push."""
