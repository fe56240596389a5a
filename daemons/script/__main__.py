"""`python -m daemons.script`: see `daemons.script.main`."""

from daemons import process
from daemons.script.main import end, run

process.main("worker", run, end)
