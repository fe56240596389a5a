"""Names with a special meaning."""

COORDINATOR = "coordinator"
HOME_AGENT = "agent-0"
"""The agent on the coordinator's machine. It always exists: it restarts the coordinator."""
WAITS_FOR_SPACE = "waiting for room"
"""Phase of a server that cannot write its shard, because the disk is full."""
WAITS_FOR_DISK = "waiting for its disk"
"""Phase of a server whose commits are under way for long."""
MEASURED = ("metrics", "task", "evaluation", "method")
"""Tables whose keys tasks and methods choose: no key in them means anything to dlctl."""
LINKS = "links"
"""In a worker's report: peer -> [bytes sent to it, bytes received from it]. In the run's status:
agent -> the bytes over the link of its host."""
FLIGHTS = "flights"
"""In a worker's report: the number of its newest write, and server -> [bytes, seconds] of that."""
AVERAGE = "average"
"""The slot with the moving average of the parameters (`optim/averaged.py`)."""
