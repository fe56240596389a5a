"""`python -m daemons.worker`: see `daemons.worker.main`."""

from daemons.imports import without_collections

with without_collections():
    from daemons.worker.main import Main

Main().run()
