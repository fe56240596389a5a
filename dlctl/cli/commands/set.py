"""`dlctl set`: change settings of live daemons, and return once they have acknowledged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, timeout_option
from dlctl.cli.ui import console, report
from dlctl.control import client
from dlctl.errors import Partial, UsageError
from dlctl.job import inner, settings
from dlctl.ops import changes, control, next_step
from dlctl.runs import select
from dlctl.runs.snapshot import Snapshot, read_job
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
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise UsageError(f"{key} is given twice")
    snapshot = select.look(job)
    control.require_live(snapshot, "changed")
    _refuse_what_is_not_live(snapshot, wanted)
    # One atomic request: all settings are applied, or none.
    arguments = {"names": patterns, "settings": wanted}
    result = client.ask(snapshot.directory, "set", arguments, limit_s)
    rows = []
    for change in result["changes"]:
        row = {"NAME": change["name"], "KEY": change["key"]}
        row["CHANGE"] = f"{change['old']} -> {change['new']}"
        rows.append(row | {"APPLIED IN": f"{values.decimal(change['ms'], 2)} ms"})
    if rows:
        console.out(console.table(rows))
    if "lr" in wanted and read_job(snapshot.directory)["inner"]["name"] not in (
        inner.NONE,
        inner.OF_SCRIPT,
    ):
        console.note("lr is the servers' rate; that of the workers' own steps is inner_lr")
    for key, text in report.uneven(result.get("uneven")):
        if key in wanted:
            console.warn(f"{key}: {text}")
    control.warn_unwritten(result)
    if missing := result["missing"]:
        raise Partial(
            f"no answer from {', '.join(missing)}; they apply it when they are back",
            hint=f"dlctl status -j {snapshot.run_id}",
        )


def _refuse_what_is_not_live(snapshot: Snapshot, wanted: Mapping[str, str]) -> None:
    """Raises UsageError if it is a key of the job file that `set` cannot change."""
    job, file = read_job(snapshot.directory), next_step.job_file(snapshot)
    live = settings.of_job(job).by_key
    for key, value in wanted.items():
        found = changes.not_live(job, key)
        if key in live or not found:
            continue
        are = "is" if len(found) == 1 else "are"
        stop = f"dlctl stop -j {snapshot.run_id} && "
        way = f"write it into {file}, then {stop}dlctl start {file}, which resumes with it"
        raise UsageError(
            f"{key} cannot change while a run is active: {' and '.join(found)} {are} in the "
            "job file",
            hint=f"dlctl scale worker={value}" if changes.WORKERS in found else way,
        )
