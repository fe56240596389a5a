"""`dlctl set`: change settings of living daemons, and return when they have acknowledged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import click

from dlctl import settings
from dlctl.cli import changes, chosendaemons, console, nextstep, onrecord, pick, report, values
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option
from dlctl.cli.snapshot import Snapshot, read_job
from dlctl.errors import DlctlError, Partial, UsageError


@make_command(
    "set",
    examples=[
        ("dlctl set 'worker-*' push=5MB/s", "limit what every worker pushes"),
        ("dlctl set worker-1 fetch=off push_every_steps=16", "several settings of one worker"),
        ("dlctl set push_every_steps=auto", "as rarely as the links need, as often as they can"),
        ("dlctl set lr=0.01", "all daemons that have it, here the servers"),
        ("dlctl set --list", "which settings are live"),
    ],
    see_also=["get", "status"],
)
@click.argument("arguments", nargs=-1, metavar="[NAME]... KEY=VALUE...")
@click.option("--list", "show_list", is_flag=True, help="List the live settings.")
@click.option(
    "--timeout", "timeout_s", default="15s", metavar="TIME", help="How long to wait for them (15s)."
)
@job_option
def command(arguments: tuple[str, ...], show_list: bool, timeout_s: str, job: str | None) -> None:
    """Change fetch/push limits and other live settings.

    NAME is a daemon or a glob; without one, every daemon that has the setting. The command returns
    when the daemons have put it in force, with exit code 8 if some of them did not answer. A change
    lasts until the run ends; the job file stays as it is. Workers that "dlctl scale" adds later
    begin with what the job file says.
    """
    if show_list:
        _list()
        return
    names = [text for text in arguments if "=" not in text]
    wanted = _assignments([text for text in arguments if "=" in text], job)
    snapshot = pick.own(job)
    if not snapshot.is_live:
        raise DlctlError(
            f"{snapshot.run_id} {report.became(snapshot.state)}: nobody is there to change",
            hint=nextstep.command(snapshot),
        )
    limit_s = values.parse_duration(timeout_s, "--timeout")
    rows: list[list[str]] = []
    missing: set[str] = set()
    requests = _requests(snapshot, names, wanted)
    try:
        for daemons, assigned in requests.items():
            _ask(snapshot, list(daemons), assigned, limit_s, rows, missing)
    finally:  # What is set stays so, whatever becomes of the others.
        if rows:
            console.out("\n".join(_aligned(rows)))
    if missing:
        raise Partial(
            f"no answer from {', '.join(sorted(missing))}; it is in force when they come back",
            hint=f"dlctl status -j {snapshot.run_id}",
        )


def _list() -> None:
    rows = [[key, ", ".join(s.roles), s.help] for key, s in settings.SETTINGS.items()]
    console.out(console.table(("KEY", "DAEMONS", "MEANING"), rows))


def _assignments(texts: Sequence[str], job: str | None) -> dict[str, str]:
    """KEY=VALUE texts, every one of them checked before anything is sent."""
    if not texts:
        raise UsageError("nothing to set: give KEY=VALUE", hint="dlctl set --list")
    wanted: dict[str, str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key in wanted:
            raise UsageError(f"{key} is given twice")
        if key not in settings.SETTINGS:
            _refuse_what_is_not_live(key, value, job)
        settings.parse(key, value)
        wanted[key] = value.strip()
    return wanted


def _refuse_what_is_not_live(key: str, value: str, job: str | None) -> None:
    """Raises UsageError with the way to change it, if it is a key of the run's job file."""
    try:
        snapshot = pick.pick(job)
    except DlctlError:
        return
    found = changes.not_live(read_job(snapshot.directory), key)
    if not found:
        return
    hint = f"dlctl scale worker={value}"
    if changes.WORKERS not in found:
        file = nextstep.job_file(snapshot)
        stop = f"dlctl stop -j {snapshot.run_id} && " if snapshot.is_live else ""
        hint = f"write it into {file}, then {stop}dlctl start {file}, which goes on with it"
    are = "is" if len(found) == 1 else "are"
    raise UsageError(
        f"{key} does not change while a run goes on: {' and '.join(found)} {are} in the job file",
        hint=hint,
    )


def _requests(
    snapshot: Snapshot, names: Sequence[str], wanted: Mapping[str, str]
) -> dict[tuple[str, ...], dict[str, str]]:
    """Daemons -> their settings: a glob means those of its daemons that have the setting.

    They are asked one after the other, so what one of them would refuse is refused here: all is
    set or nothing, as far as is known. Raises UsageError.
    """
    roles = snapshot.roles()
    chosen = chosendaemons.match(names, roles)
    optimizer = read_job(snapshot.directory).get("optimizer", {}).get("options", {})
    settings.require_decay({k: settings.parse(k, text) for k, text in wanted.items()}, optimizer)
    requests: dict[tuple[str, ...], dict[str, str]] = {}
    for key, value in wanted.items():
        having = [name for name in chosen if roles[name] in settings.SETTINGS[key].roles]
        for name in names:
            if not any(fnmatchcase(one, name) for one in having):
                owners = " and ".join(f"{role}s" for role in settings.SETTINGS[key].roles)
                raise UsageError(f"{name} has no {key}: it is a setting of {owners}")
        for name in having:
            if roles[name] == "worker":
                reported = report.metrics(snapshot.daemon(name)).get("settings")
                settings.require(name, reported, [key])
        requests.setdefault(tuple(having), {})[key] = value
    return requests


def _ask(
    snapshot: Snapshot,
    names: list[str],
    assigned: dict[str, str],
    timeout_s: float,
    rows: list[list[str]],
    missing: set[str],
) -> None:
    from dlctl.control import client

    arguments = {"names": names, "settings": assigned}
    result = client.ask(snapshot.directory, "set", arguments, timeout_s)
    rows += [_row(change) for change in result.get("changes", [])]
    missing.update(str(name) for name in result.get("missing", []))
    onrecord.warn(result)


def _row(change: Mapping[str, Any]) -> list[str]:
    """Cells, as in "worker-0", "push", "200 MB/s -> 100 MB/s", "applied in 3 ms"."""
    key = str(change.get("key"))
    before, after = (settings.format_value(key, change.get(k)) for k in ("before", "after"))
    took = f"applied in {values.decimal(change.get('ms'), 2)} ms"
    return [str(change.get("name")), key, f"{before} -> {after}", took]


def _aligned(rows: list[list[str]]) -> list[str]:
    escaped = [[console.escape(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in escaped) for i in range(len(escaped[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in escaped]
