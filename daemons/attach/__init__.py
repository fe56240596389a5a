"""A user's own training loop as a worker: the process that calls `dlctl.attach`."""
