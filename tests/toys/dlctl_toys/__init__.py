"""Small methods as somebody else would write them: each is a file and a line in entry_points.txt.

They are no good for training; each needs something of the interface that no other method needs.
"""
