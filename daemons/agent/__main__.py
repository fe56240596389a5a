"""`python -m daemons.agent`: see `daemons.agent.serving`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from daemons.agent.template import Template, wanted
from dlctl.launch.base import SERVER, WORKER


def main() -> None:
    directory, name, incarnation, *_ = (*sys.argv[1:], "", "", "")
    # That of the workers first: its imports take longest.
    templates = [Template(Path(directory), name, role) for role in (WORKER, SERVER)]
    if incarnation == "1":
        roles = wanted(Path(directory), name)
        for template in templates:
            if template.role in roles:
                template.begin()  # Before the imports of the agent.
    from daemons import process
    from daemons.agent.serving import serve

    process.main("agent", partial(serve, templates))


main()
