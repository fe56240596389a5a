"""`dlctl explain`: the meaning, cause and remedy of a problem code."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, cast

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console
from dlctl.errors import NotFound

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SCHEMA = "dlctl.explain/1"


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from dlctl.ops.codes import CODES

    return [CompletionItem(code) for code in CODES if code.startswith(incomplete)]


@make_command(
    "explain",
    examples=[
        ("dlctl explain", "all codes"),
        ("dlctl explain worker-stuck", "its cause and remedy"),
    ],
    see_also=["status", "why", "man"],
)
@click.argument("code", required=False, metavar="[CODE]", shell_complete=_complete)
@json_option
def command(code: str | None, as_json: bool) -> None:
    """Explain the code of a problem.

    "dlctl why" and "dlctl status" show the codes of a run's current problems, and the command that
    helps.
    """
    from dlctl.ops.codes import CODES, Entry

    known = cast(dict[str, Entry], CODES)
    if code is not None and code not in known:
        close = difflib.get_close_matches(code, known, n=1)
        meant = f'; did you mean "{close[0]}"?' if close else ""
        raise NotFound(f'there is no problem with the code "{code}"{meant}', hint="dlctl explain")
    if as_json:
        chosen = known if code is None else {code: known[code]}
        console.out_json(SCHEMA, {"codes": {name: e._asdict() for name, e in chosen.items()}})
    elif code is None:
        console.out(console.table(("CODE", "MEANING"), [[n, e.what] for n, e in known.items()]))
    else:
        entry = known[code]
        console.out(f"{code}: {entry.what}\n  cause   {entry.cause}\n  remedy  {entry.remedy}")
