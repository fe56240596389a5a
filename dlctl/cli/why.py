"""`dlctl why`: who waits for whom, since when, and what all of it comes down to."""

from __future__ import annotations

from typing import Any

import click

from dlctl.cli import console, pick, report, values, waits
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.snapshot import Snapshot
from dlctl.cli.waits import Wait


@make_command(
    "why",
    examples=[
        ("dlctl why", "what holds the job up, the root cause first"),
        ("dlctl why worker-3", "only what this worker has to do with"),
        ("dlctl why --json", "for programs"),
    ],
    see_also=["status", "logs", "set", "restart"],
)
@click.argument("name", required=False, metavar="[NAME]", shell_complete=pick.complete_daemons)
@job_option
@json_option
def command(name: str | None, job: str | None, as_json: bool) -> None:
    """Show who waits for whom, and what they all wait for.

    Causes are daemons that are slow, silent, dead or starting, the slowest worker of a barrier,
    and limits that somebody has set. Each comes with those who wait for it below, and with the
    command that helps. The exit code is 0 whatever the answer.
    """
    snapshot = pick.pick(job)
    chosen = pick.match_daemons([name], snapshot.roles()) if name is not None else []
    found = waits.causes(snapshot) if snapshot.is_live else []
    if chosen:
        found = [wait for wait in found if set(wait.names()) & set(chosen)]
    if as_json:
        data = {
            "run_id": snapshot.run_id,
            "state": snapshot.state,
            "reason": snapshot.reason,
            "stale_s": snapshot.stale_s,
            "causes": [_as_data(wait) for wait in found],
        }
        console.out_json("dlctl.why/1", values.timed(data))
        return
    console.out("\n".join(_lines(snapshot, found, chosen)))


def _lines(snapshot: Snapshot, found: list[Wait], chosen: list[str]) -> list[str]:
    run_id = console.escape(snapshot.run_id)
    if not snapshot.is_live:
        return _ended(snapshot)
    lines = []
    if snapshot.stale_s is not None:
        lines.append(f"what is known of {run_id} is {values.duration(snapshot.stale_s)} old")
    if not found:
        who = console.escape(", ".join(chosen)) if chosen else "nobody"
        verb = (
            ("waits for nobody" if len(chosen) == 1 else "wait for nobody") if chosen else "waits"
        )
        lines.append(f"{who} {verb}: {run_id} is {console.escape(snapshot.state)}")
        lines += [f"  {_at(snapshot, name)}" for name in chosen]
    for wait in found:
        lines += _tree(snapshot, wait, 0)
    return lines


def _ended(snapshot: Snapshot) -> list[str]:
    run_id, state = console.escape(snapshot.run_id), console.escape(snapshot.state)
    why = f": {console.escape(snapshot.reason)}" if snapshot.reason else ""
    lines = [f"nobody waits: {run_id} is {state}{why}"]
    if snapshot.state == "failed":
        lines.append(f"  next: dlctl recover --dry-run -j {run_id}")
    return lines


def _at(snapshot: Snapshot, name: str) -> str:
    row = snapshot.daemon(name)
    return f"{name}: {report.doing(row, snapshot.now)}" if row else f"{name}: nothing is known yet"


def _tree(snapshot: Snapshot, wait: Wait, depth: int) -> list[str]:
    name, what = console.escape(wait.name), console.escape(wait.what)
    age = "" if wait.since is None else f", for {values.duration(snapshot.now - wait.since)}"
    stale = "" if wait.stale_s is None else f" (last heard {values.duration(wait.stale_s)} ago)"
    if depth:
        lines = [f"{'   ' * (depth - 1)}└─ {name} waits for it{age}: {what}{stale}"]
    else:
        lines = [f"{console.style(name, bold=True)}: {what}{age}{stale}"]
        lines += [f"   next: {console.escape(wait.next)}"] if wait.next else []
    for other in wait.waiting:
        lines += _tree(snapshot, other, depth + 1)
    return lines


def _as_data(wait: Wait) -> dict[str, Any]:
    return {
        "name": wait.name,
        "what": wait.what,
        "since": wait.since,
        "stale_s": wait.stale_s,
        "next": wait.next,
        "waiting": [_as_data(other) for other in wait.waiting],
    }
