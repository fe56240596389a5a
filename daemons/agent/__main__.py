"""`python -m daemons.agent`: see `daemons.agent.serving`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from daemons.agent.template import Template, is_wanted


def main() -> None:
    directory, name, incarnation, *_ = (*sys.argv[1:], "", "", "")
    template = Template(Path(directory), name)
    if incarnation == "1" and is_wanted(template.directory, template.agent):
        template.begin()  # Its imports take longest, so it begins before those of the agent.
    from daemons import process
    from daemons.agent.serving import serve

    process.main("agent", partial(serve, template))


main()
