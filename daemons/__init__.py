"""The processes of a run, and the only place with sockets, clocks, threads and torch.

Each is started as `python -m daemons.<role>` and never imported by name from elsewhere. They drive
the machines of `dlctl/roles` with real effects.
"""
