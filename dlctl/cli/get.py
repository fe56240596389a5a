"""`dlctl get`: the live settings, as the daemons last reported them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from dlctl import settings
from dlctl.cli import chosendaemons, console, pick, report
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.snapshot import Snapshot, read_job


@make_command(
    "get",
    examples=[
        ("dlctl get", "all live settings of all daemons"),
        ("dlctl get 'worker-*' push fetch", "two settings of all workers"),
        ("dlctl get server-0 lr -q", "only the value, for scripts"),
    ],
    see_also=["set", "status"],
)
@click.argument(
    "arguments", nargs=-1, metavar="[NAME]... [KEY]...", shell_complete=chosendaemons.complete
)
@job_option
@json_option
def command(arguments: tuple[str, ...], job: str | None, as_json: bool) -> None:
    """Show live settings.

    What is printed can be given to "dlctl set" again.
    """
    snapshot = pick.pick(job)
    known = settings.of_job(read_job(snapshot.directory))
    keys = [text for text in arguments if text in known.by_key]
    names = [text for text in arguments if text not in known.by_key]
    chosen = chosendaemons.match(names, snapshot.roles())
    found = {name: _chosen(live(snapshot, name), keys) for name in chosen}
    if as_json:
        shown = {name: own for name, own in found.items() if own}
        console.out_json("dlctl.settings/1", {"run_id": snapshot.run_id, "settings": shown})
        return
    rows = [
        [name, console.escape(key), console.escape(known.format(key, value))]
        for name, own in found.items()
        for key, value in own.items()
    ]
    if console.is_quiet():
        for row in rows:
            console.out(row[2])
    elif rows:
        console.out(console.table(("NAME", "KEY", "VALUE"), rows))
    else:
        console.note("no daemon has reported such a setting yet")


def live(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """The settings of one daemon: what the coordinator knows, else the daemon's last report."""
    known = snapshot.run.get("settings")
    own = known.get(name) if isinstance(known, dict) else None
    reported = dict(report.settings(snapshot.daemon(name)))
    return {**reported, **own} if isinstance(own, dict) else reported


def _chosen(found: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if not keys or key in keys}
