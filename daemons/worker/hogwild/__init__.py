"""One model that several processes step in without locks.

`memory.py` is that model. Two kinds of processes have it: the workers of a host (`workers.py`,
the method `hogwild`), each a replica of its own, which find it by a file; and the processes of one
replica (`ranks.py`, `[replica] hogwild`), which inherit it from rank 0.
"""
