"""Names of daemons that mean something."""

COORDINATOR = "coordinator"
HOME_AGENT = "agent-0"
"""The agent on the coordinator's machine. It is always there: it starts the coordinator again."""
NO_ROOM = "waiting for room"
"""What a server does that cannot write what its shard was kept as, because the disk is full."""
AVERAGE = "average"
"""The slot with the moving average of the parameters (`optim/averaged.py`)."""
