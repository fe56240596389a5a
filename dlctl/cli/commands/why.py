"""`dlctl why`: who waits for whom, since when, and what all of it comes down to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from dlctl.cli import daemon_names
from dlctl.cli.group import command as make_command
from dlctl.cli.options import job_option, json_option
from dlctl.cli.ui import console, report
from dlctl.ops import next_step, wait_graph
from dlctl.ops.wait_graph import Wait
from dlctl.runs import facts, select
from dlctl.runs.snapshot import GONE, Snapshot
from dlctl.util import hints, values
from dlctl.util.names import COORDINATOR


@make_command(
    "why",
    examples=[
        ("dlctl why", "what holds the job up, the root cause first"),
        ("dlctl why worker-3", "only what this worker has to do with"),
        ("dlctl why --json", "for programs"),
    ],
    see_also=["status", "logs", "set", "restart"],
)
@click.argument("name", required=False, metavar="[NAME]", shell_complete=daemon_names.complete)
@job_option
@json_option
def command(name: str | None, job: str | None, as_json: bool) -> None:
    """Show who waits for whom, and what they all wait for.

    Causes are daemons that are slow, silent, dead or starting, the slowest worker of a barrier,
    and limits that somebody has set. Each comes with those who wait for it below, and with the
    command that helps. The exit code is 0 whatever the answer.
    """
    snapshot = select.look(job)
    chosen = daemon_names.match([name], snapshot.roles()) if name is not None else []
    found = wait_graph.causes(snapshot) if snapshot.is_live or snapshot.is_gone else []
    if chosen and not _waits_for_coordinator(found):
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
    if _waits_for_coordinator(found):
        text = console.escape(f"{found[0].name} {found[0].what}") + report.code(found[0].code)
        step = next_step.of(snapshot) if snapshot.is_gone else None
        hint = found[0].next if step is None else step.text()
        return [text, *_meanwhile(snapshot, found[0]), *_next(hint)]
    if not snapshot.is_live:
        return _ended(snapshot)
    lines: list[str] = []
    if snapshot.stale_s is not None:
        lines.append(f"what is known of {run_id} is {values.duration(snapshot.stale_s)} old")
    if not found:
        lines += _nobody(snapshot, chosen)
        lines += [f"  it {told}"] if (told := report.went_back(snapshot)) else []
    for wait, after in zip(found, [*found, None][1:], strict=True):
        is_said_below = after is not None and after.next == wait.next
        lines += _tree(snapshot, replace(wait, next="") if is_said_below else wait, 0)
    return lines


def _nobody(snapshot: Snapshot, chosen: list[str]) -> list[str]:
    """That nobody waits; or, if somebody is in a batch for long, that they wait for the task."""
    state = console.escape(f"{snapshot.run_id} {facts.became(snapshot.state)}")
    late = [str(row["name"]) for row in next_step.in_long_batches(snapshot)]
    if late and not chosen:
        text = f"batches take longer than usual: {state}"
        return [text, *(f"  {_at(snapshot, name)}" for name in late)]
    who = console.escape(", ".join(chosen)) if chosen else "nobody"
    verb = ("waits for nobody" if len(chosen) == 1 else "wait for nobody") if chosen else "waits"
    return [f"{who} {verb}: {state}", *(f"  {_at(snapshot, name)}" for name in chosen)]


def _ended(snapshot: Snapshot) -> list[str]:
    why = f": {snapshot.reason}" if snapshot.reason else ""
    who = "nobody waits" if snapshot.original is None else "nobody knows from here who waits"
    text = f"{who}: {snapshot.run_id} {facts.became(snapshot.state)}{why}"
    step = next_step.of(snapshot)
    return [console.escape(text), *(_next(step.text()) if step is not None else [])]


def _meanwhile(snapshot: Snapshot, coordinator: Wait) -> list[str]:
    """What becomes of the others without it; nothing while it works and only cannot write."""
    if snapshot.unwritten_s is not None:
        return []
    if coordinator.waiting:
        others = "what has been handed out goes on without it; all that is new waits for it"
        return [f"   {others}"]
    gone = [str(row["name"]) for row in snapshot.daemons if row.get("state") == GONE]
    return [console.escape(f"   gone, too: {', '.join(gone)}")] if gone else []


def _waits_for_coordinator(found: list[Wait]) -> bool:
    """Then there is nothing else to say: nobody looks after the others."""
    return bool(found) and found[0].name == COORDINATOR and found[0].is_sentence


def _next(hint: str) -> list[str]:
    return [console.next_lines(hint, "   ")] if hint else []


def _at(snapshot: Snapshot, name: str) -> str:
    row = snapshot.daemon(name)
    if not row:
        return f"{name}: nothing is known yet"
    long_s = next_step.long_s(row)
    late = "" if long_s is None else f", in one batch for {values.duration(long_s)}"
    return f"{name}: {facts.doing(row, snapshot.now)}{late}"


def _tree(snapshot: Snapshot, wait: Wait, depth: int) -> list[str]:
    name, what = console.escape(wait.name), console.escape(wait.what)
    age = "" if wait.since is None else f", for {values.duration(snapshot.now - wait.since)}"
    stale = "" if wait.stale_s is None else f" (last heard {values.duration(wait.stale_s)} ago)"
    code = report.code(wait.code)
    if depth:
        lines = [f"{'   ' * (depth - 1)}└─ {name} waits for it{age}: {what}{stale}"]
    elif wait.is_sentence:
        lines = [f"{console.style(name, bold=True)} {what}{code}", *_next(wait.next)]
    else:
        lines = [f"{console.style(name, bold=True)}: {what}{age}{stale}{code}", *_next(wait.next)]
    for other in wait.waiting:
        lines += _tree(snapshot, other, depth + 1)
    return lines


def _as_data(wait: Wait) -> dict[str, Any]:
    return {
        "code": wait.code,
        "name": wait.name,
        "what": wait.what,
        "since": wait.since,
        "stale_s": wait.stale_s,
        **hints.as_data(wait.next),
        "waiting": [_as_data(other) for other in wait.waiting],
    }
