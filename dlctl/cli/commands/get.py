"""`dlctl get`: the live settings, as the daemons last reported them."""

from __future__ import annotations

import re
from typing import Any

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.ui import console
from dlctl.job import settings
from dlctl.runs import facts, select

KEY = re.compile("[a-z_]+")
"""A key of a setting. Of daemons' names only the coordinator's matches this too."""


@make_command(
    "dlctl get  # all live settings of all daemons",
    "dlctl get 'worker-*' push fetch  # two settings of all workers",
    "dlctl get server-0 lr -q  # only the value, for scripts",
)
@click.argument(
    "arguments", nargs=-1, metavar="[NAME]... [KEY]...", shell_complete=daemon_names.complete
)
@job_option
@json_option
def command(arguments: tuple[str, ...], job: str | None) -> None:
    """ "dlctl set" accepts the printed values."""
    snapshot = select.look(job)
    roles = snapshot.roles()
    names = [text for text in arguments if text in roles or not KEY.fullmatch(text)]
    keys = [text for text in arguments if text not in names]
    found: dict[str, dict[str, Any]] = {}
    for name in daemon_names.match(names, roles):
        # The daemon's last report, and what the coordinator has accepted since.
        own = {**facts.settings(snapshot.daemon(name))}
        own |= (snapshot.run.get("settings") or {}).get(name, {})
        if chosen := {key: own[key] for key in own if not keys or key in keys}:
            found[name] = chosen
    rows = [
        {"NAME": name, "KEY": key, "VALUE": settings.EVERY_RUN.format(key, value)}
        for name, own in found.items()
        for key, value in own.items()
    ]
    data, values = {"run_id": snapshot.run_id, "settings": found}, [row["VALUE"] for row in rows]
    console.show("dlctl.job.settings/1", data, console.table(rows), values)
    if not rows:
        console.note("no daemon has reported such a setting yet")
