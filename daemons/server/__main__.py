"""`python -m daemons.server`: see `daemons.server.serving`."""

from daemons import process
from daemons.server.serving import serve

process.main("server", serve)
