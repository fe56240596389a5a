"""`python -m daemons.worker`: see `daemons.worker.main`."""

from daemons.worker.main import Main

Main().run()
