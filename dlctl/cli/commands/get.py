"""`dlctl get`: the live settings, as the daemons last reported them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from dlctl import registry, settings
from dlctl.cli import daemon_names
from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.ui import console
from dlctl.runs import facts, select
from dlctl.runs.snapshot import Snapshot, read_job

KEY = re.compile("[a-z_]+")
"""Only the coordinator's name matches this too."""


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
    roles, known = snapshot.roles(), _known(read_job(snapshot.directory))
    names = [text for text in arguments if text in roles or not KEY.fullmatch(text)]
    keys = [text for text in arguments if text not in names]
    chosen = daemon_names.match(names, roles)
    found = {name: _live(snapshot, name, keys) for name in chosen}
    rows = [
        {"NAME": name, "KEY": key, "VALUE": known.format(key, value)}
        for name, own in found.items()
        for key, value in own.items()
    ]
    shown = {name: own for name, own in found.items() if own}
    data = {"run_id": snapshot.run_id, "settings": shown}
    values = [row["VALUE"] for row in rows]
    console.show("dlctl.settings/1", data, console.table(rows), values)
    if not rows:
        console.note("no daemon has reported such a setting yet")


def _known(job: dict[str, Any]) -> settings.LiveSettings:
    """How values are formatted. Built-in components declare plain numbers only, so they are not
    imported: that would dominate the run time of this command.
    """
    chosen = [(kind, job.get(section)) for section, kind in registry.SECTIONS.items()]
    names = [(kind, one.get("name")) for kind, one in chosen if isinstance(one, dict)]
    is_ours = all(name in registry.BUILT_IN[kind] for kind, name in names)
    return settings.EVERY_RUN if is_ours else settings.of_job(job)


def _live(snapshot: Snapshot, name: str, keys: Sequence[str]) -> dict[str, Any]:
    """These settings of one daemon (all if there are no keys): from the coordinator, else from the
    daemon's last report.
    """
    known = snapshot.run.get("settings")
    own = known.get(name) if isinstance(known, dict) else None
    found = dict(facts.settings(snapshot.daemon(name))) | (own if isinstance(own, dict) else {})
    return {key: value for key, value in found.items() if not keys or key in keys}
