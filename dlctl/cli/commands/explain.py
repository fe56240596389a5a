"""`dlctl explain`: the meaning, cause and remedy of a problem code."""

from __future__ import annotations

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import completing, json_option
from dlctl.cli.ui import console
from dlctl.errors import NotFound
from dlctl.ops.problem_texts import CODES
from dlctl.util.did_you_mean import meant


@make_command(
    "dlctl explain  # all codes",
    "dlctl explain worker-stuck  # its cause and remedy",
)
@click.argument(
    "code", required=False, metavar="[CODE]", shell_complete=completing(lambda ctx: CODES)
)
@json_option
def command(code: str | None) -> None:
    """ "dlctl why" and "dlctl status" show the codes of a run's current problems, and the command
    that helps.
    """
    known = {str(name): entry for name, entry in CODES.items() if code in (None, name)}
    if not known:
        text = f'there is no problem with the code "{code}"{meant(code or "", CODES)}'
        raise NotFound(text, hint="dlctl explain")
    text = console.table({"CODE": name, "MEANING": entry.what} for name, entry in known.items())
    if code is not None:
        what, cause, remedy = known[code].what, known[code].cause, known[code].remedy
        text = f"{code}: {what}\n  cause   {cause}\n  remedy  {remedy}"
    data = {name: entry._asdict() for name, entry in known.items()}
    console.show("dlctl.explain/1", {"codes": data}, text)
