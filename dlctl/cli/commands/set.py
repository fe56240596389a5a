"""`dlctl set`: change settings of live daemons, and return once they have acknowledged."""

from __future__ import annotations

import click

from dlctl import settings
from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, timeout_option
from dlctl.cli.ui import console
from dlctl.errors import Partial, UsageError
from dlctl.ops import control
from dlctl.runs import select
from dlctl.util import values


@make_command(
    "dlctl set 'worker-*' push=5MB/s  # limit what every worker pushes",
    "dlctl set worker-1 fetch=off push_every_steps=16  # several settings of one worker",
    "dlctl set push_every_steps=auto  # as often as the links permit",
    "dlctl set lr=0.01  # all daemons that have it, here the servers",
    "dlctl set --list  # which settings are live",
)
@click.argument("words", nargs=-1, metavar="[NAME]... KEY=VALUE...")
@click.option("--list", "show_list", is_flag=True, help="List the live settings.")
@timeout_option("How long to wait for them (15s).", "15s")
@job_option
def command(words: tuple[str, ...], show_list: bool, limit_s: float, job: str | None) -> None:
    """NAME is a daemon or a glob; without one, every daemon that has the setting. The command
    returns when the daemons have applied it, with exit code 8 if some of them did not answer. A
    change survives a stop, unless that key has changed in the job file when the run is started
    again. The job file itself does not change, and workers that "dlctl scale" adds later start with
    its values.
    """
    if show_list:
        rows = []
        for key, setting, owners in settings.every():
            row = {"KEY": key, "DAEMONS": ", ".join(setting.roles)}
            rows.append(row | {"OF": ", ".join(owners) or "every job", "MEANING": setting.help})
        console.out(console.table(rows))
        return
    patterns = [text for text in words if "=" not in text]
    pairs = [text.split("=", 1) for text in words if "=" in text]
    wanted = {key: value.strip() for key, value in pairs}  # The coordinator validates them.
    if not wanted:
        raise UsageError("nothing to set: give KEY=VALUE", hint="dlctl set --list")
    if len(wanted) < len(pairs):
        raise UsageError("a key is given twice")
    snapshot = select.look(job)
    control.require_live(snapshot, "changed")
    # One atomic request: all settings are applied, or none.
    result = control.ask(snapshot, "set", {"names": patterns, "settings": wanted}, limit_s)
    rows = []
    for change in result["changes"]:
        row = {"NAME": change["name"], "KEY": change["key"]}
        row["CHANGE"] = f"{change['old']} -> {change['new']}"
        rows.append(row | {"APPLIED IN": f"{values.decimal(change['ms'], 2)} ms"})
    if rows:
        console.out(console.table(rows))
    if missing := result["missing"]:
        raise Partial(
            f"no answer from {', '.join(missing)}; they apply it when they are back",
            hint=f"dlctl status -j {snapshot.run_id}",
        )
