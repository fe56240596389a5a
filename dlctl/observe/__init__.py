"""What a run looked like over time, and ways to see it: a live view, a page, a picture.

`history.py` reads what the coordinator has recorded; the other modules draw that and read nothing.
The libraries that they need are imported when they are used: most commands need none of them.
"""
