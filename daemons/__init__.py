"""The processes of a run, and the only package with sockets, clocks, threads and torch.

Each is started as `python -m daemons.<role>` and never imported from elsewhere. They run the state
machines of `dlctl/roles` and perform their effects.
"""
