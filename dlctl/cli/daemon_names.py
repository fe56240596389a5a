"""Selecting daemons of a run by names and patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import click

from dlctl.cli.options import completing
from dlctl.errors import DlctlError, NotFound
from dlctl.runs import select
from dlctl.util.did_you_mean import meant


def _of_run(ctx: click.Context) -> Iterable[str]:
    try:
        return select.load_any(select.directory(ctx.params.get("job"), quiet=True)).roles()
    except DlctlError:
        return []


complete = completing(_of_run)


def match(patterns: Sequence[str], known: Iterable[str]) -> list[str]:
    """The known names that match one of the patterns (all if there are none): a name, or a glob
    such as "worker-*". Raises NotFound, with a suggestion, for a pattern that matches nothing.
    """
    known = list(known)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            text = f'no daemon is called "{pattern}"{meant(pattern, known)}'
            raise NotFound(text, hint="dlctl status")
    return [name for name in known if any(fnmatchcase(name, p) for p in patterns or "*")]
