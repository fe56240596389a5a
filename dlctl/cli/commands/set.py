"""`dlctl set`: change settings of live daemons, and return once they have acknowledged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dlctl import inner, settings
from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, timeout_option
from dlctl.cli.ui import console
from dlctl.control import client
from dlctl.errors import Partial, UsageError
from dlctl.ops import changes, control
from dlctl.runs import select
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import values

LIVE: console.Columns[tuple[str, settings.Setting, Sequence[str]]] = {
    "KEY": lambda row: row[0],
    "DAEMONS": lambda row: ", ".join(row[1].roles),
    "OF": lambda row: ", ".join(row[2]) or "every job",
    "MEANING": lambda row: row[1].help,
}
CHANGES: console.Columns[Mapping[str, Any]] = {
    "NAME": lambda change: str(change.get("name")),
    "KEY": lambda change: str(change.get("key")),
    "CHANGE": lambda change: f"{change.get('old')} -> {change.get('new')}",
    "APPLIED IN": lambda change: f"{values.decimal(change.get('ms'), 2)} ms",
}


@make_command(
    examples=[
        ("dlctl set 'worker-*' push=5MB/s", "limit what every worker pushes"),
        ("dlctl set worker-1 fetch=off push_every_steps=16", "several settings of one worker"),
        ("dlctl set push_every_steps=auto", "as often as the links permit"),
        ("dlctl set lr=0.01", "all daemons that have it, here the servers"),
        ("dlctl set --list", "which settings are live"),
    ],
    see_also=["get", "status"],
)
@click.argument("arguments", nargs=-1, metavar="[NAME]... KEY=VALUE...")
@click.option("--list", "show_list", is_flag=True, help="List the live settings.")
@timeout_option("How long to wait for them (15s).", "15s")
@job_option
def command(arguments: tuple[str, ...], show_list: bool, limit_s: float, job: str | None) -> None:
    """NAME is a daemon or a glob; without one, every daemon that has the setting. The command
    returns when the daemons have applied it, with exit code 8 if some of them did not answer. A
    change survives a stop, unless that key has changed in the job file when the run is started
    again. The job file itself does not change, and workers that "dlctl scale" adds later start with
    its values.
    """
    if show_list:
        console.out(console.table(LIVE, settings.every()))
        return
    patterns = [text for text in arguments if "=" not in text]
    wanted = _assignments([text for text in arguments if "=" in text])
    snapshot = select.look(job)
    control.require_live(snapshot, "changed")
    result = _ask(snapshot, patterns, wanted, limit_s)
    if changed := result.get("changes"):
        console.out(console.table(CHANGES, changed))
    if "lr" in wanted and read_job(snapshot.directory)["inner"]["name"] != inner.NONE:
        console.note("lr is the servers' rate; that of the workers' own steps is inner_lr")
    control.warn_unwritten(result)
    missing = sorted(str(name) for name in result.get("missing", []))
    if missing:
        raise Partial(
            f"no answer from {', '.join(missing)}; they apply it when they are back",
            hint=f"dlctl status -j {snapshot.run_id}",
        )


def _assignments(texts: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE texts; the coordinator validates keys and values."""
    if not texts:
        raise UsageError("nothing to set: give KEY=VALUE", hint="dlctl set --list")
    wanted: dict[str, str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key in wanted:
            raise UsageError(f"{key} is given twice")
        wanted[key] = value.strip()
    return wanted


def _ask(
    snapshot: Snapshot, patterns: Sequence[str], wanted: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """One atomic request: all settings are applied, or none."""
    arguments = {"names": list(patterns), "settings": dict(wanted)}
    try:
        return client.ask(snapshot.directory, "set", arguments, timeout_s)
    except UsageError as error:
        error.hint = error.hint or _other_way(snapshot, wanted)
        raise


def _other_way(snapshot: Snapshot, wanted: Mapping[str, str]) -> str | None:
    """How to change a key that does not change live, if one was requested."""
    job = read_job(snapshot.directory)
    for key, value in wanted.items():
        found = changes.not_live(job, key)
        if changes.WORKERS in found:
            return f"dlctl scale worker={value}"
        if found:
            file = shlex.quote(values.path(str(snapshot.run.get("job_file"))))
            stop = f"dlctl stop -j {snapshot.run_id} && "
            return f"write it into {file}, then {stop}dlctl start {file}, which resumes with it"
    return None
