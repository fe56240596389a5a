"""Selecting daemons of a run by names and patterns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import click

from dlctl.errors import DlctlError, NotFound
from dlctl.runs import select
from dlctl.util.did_you_mean import meant

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Daemon names for shell completion, from local files only."""
    from click.shell_completion import CompletionItem

    try:
        names = select.load_any(select.directory(ctx.params.get("job"), quiet=True)).roles()
    except DlctlError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def match(
    patterns: Sequence[str], known: Mapping[str, str], roles: Collection[str] = ()
) -> list[str]:
    """Names of `known` (name -> role) that match one of the patterns (all if there are none).

    A pattern is a name or a glob such as "worker-*"; `roles` narrows the choice. Raises NotFound,
    with a suggestion, for a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            what = f'no daemon is called "{pattern}"{meant(pattern, known)}'
            raise NotFound(what, hint="dlctl status")
    chosen = [n for n in known if not patterns or any(fnmatchcase(n, p) for p in patterns)]
    chosen = [name for name in chosen if not roles or known[name] in roles]
    if not chosen:
        raise NotFound(f"no such daemon has the role {' or '.join(sorted(roles))}")
    return chosen
