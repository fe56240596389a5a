"""The alternatives to dlctl, each as a program that does the same work.

`table.py` lists them. Every program is started once for each of its processes, as in

    python -m benchmarks.peers.ddp '{"rank": 0, "workers": 4, ...}'

with `Settings` (settings.py) as its argument. All of them train the same model on the same data
(work.py) and write timestamped copies of the parameters (watch.py); `run.py` starts them, counts
the bytes on the wire, terminates them, and determines when the accuracy was reached.
"""
