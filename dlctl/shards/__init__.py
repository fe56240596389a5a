"""Shards: the vectors that a server owns, and how they outlive it.

    base.py       Shard: what a method and the server role see; Storage: its arrays behind it
    memory.py     "none": plain arrays, lost with the process
    history.py    which elements the newest versions changed
    summary.py    the parameters as workers see them with 16 bits per value
    ahead.py      an update that is computed while its push still arrives
    image.py      the bytes of a mapped state: header, commits, undo record, two buffers
    mapped.py     "process": the same arrays in a mapped file, every commit atomic under kill -9
    undo.py       old values that roll back a sparse update if it is not committed
    journal_format.py the bytes of a journal: one record per commit
    journaled.py  "disk": plain arrays, and every commit on the disk before it is acknowledged

Nothing here opens a file: storages work on any writable buffer, or on a driver's `Log`, so the same
code runs in a server, in the simulator and in tests.
"""
