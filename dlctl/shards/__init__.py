"""Shards: the vectors that a server owns, and how they outlive it.

    base.py       Shard: what a method and the server role see; Storage: what is behind it
    memory.py     "none": plain arrays, gone with the process
    history.py    which elements the newest versions have changed
    summary.py    what workers see of the parameters if they get 16 bits of each
    ahead.py      an update that is made while its push still comes
    image.py      the bytes of a mapped state: header, commits, undo record, two buffers
    mapped.py     "process": the same arrays in a mapped file, every commit atomic under kill -9
    undo.py       what a sparse update has to put back if it is not committed
    records.py    the bytes of a journal: one record per commit
    journaled.py  "disk": plain arrays, and every commit on the disk before it is acknowledged

Nothing here opens a file: storages work on any writable buffer, or on a `Log` that a driver has,
so that the same code runs in a server, in the simulator and in tests.
"""
