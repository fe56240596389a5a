"""What a user would pick instead of dlctl, each as a program of its own that does the same work.

`table.py` lists them. Every program is started once per process that it needs, as in

    python -m benchmarks.peers.ddp '{"rank": 0, "workers": 4, ...}'

with `Settings` (settings.py) as its argument. All of them train the same model on the same data
(work.py) and leave copies of the parameters with their times behind (watch.py); `run.py` starts
them, counts the bytes on the wire, ends them, and finds out when the accuracy was reached.
"""
