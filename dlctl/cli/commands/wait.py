"""`dlctl wait`: block until a run has reached a goal."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import job_option, json_option, timeout_option
from dlctl.cli.ui import console
from dlctl.cli.ui.live import LOOK_S
from dlctl.errors import NotFound, TimedOut, UsageError
from dlctl.ops import control
from dlctl.runs import facts, select
from dlctl.runs.snapshot import READY, Snapshot, load
from dlctl.util import values

Goal = Callable[[Snapshot, Snapshot], bool]
"""Whether a goal is reached, given the run's state when the wait began, and now."""
GOALS: dict[str, Goal] = {
    "ready": lambda begin, now: now.state in (*READY, "finished"),
    "finished": lambda begin, now: now.state == "finished",
    "stopped": lambda begin, now: not now.is_live,
    "checkpoint": lambda begin, now: _saved(now) > _saved(begin),
}
NAMES = ", ".join([*GOALS, "step=N", "epoch=X"])


@make_command(
    "dlctl wait  # until the job has finished",
    "dlctl wait --for ready --timeout 5m  # until all daemons are ready",
    "dlctl wait --for step=10000  # until the workers have done that many steps",
    "dlctl wait -j mnist --for checkpoint  # until the next checkpoint is complete",
)
@click.option("--for", "goal", default="finished", metavar="GOAL", help=f"One of {NAMES}.")
@timeout_option()
@job_option
@json_option
def command(goal: str, limit_s: float | None, job: str | None) -> None:
    """ "stopped" means any end. With -j, the job need not have been started yet. If the goal can no
    longer be reached, the exit code is 7 if the job failed and 3 if it ended otherwise.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    reached = _goal(goal)
    begin = snapshot = _appear(job, deadline)
    while not reached(begin, snapshot):
        if not snapshot.is_live:
            raise control.not_reached(snapshot, goal)
        is_now = facts.became(snapshot.state)
        if snapshot.silent_s is not None:
            is_now = f"has not answered for {values.duration(snapshot.silent_s)}"
        _sleep(deadline, f"{snapshot.run_id} {is_now}; not yet: {goal}")
        snapshot = load(snapshot.directory)
    step = snapshot.run.get("step")
    console.note(f"{snapshot.run_id}: {goal} ({snapshot.state}, step {values.count(step)})")
    shown = {"run_id": snapshot.run_id, "goal": goal, "state": snapshot.state, "step": step}
    console.show("dlctl.wait/1", shown, "")


def _goal(text: str) -> Goal:
    """The goal that a text names. Raises UsageError."""
    name, equals, number = text.partition("=")
    if equals and name in ("step", "epoch"):
        key = "step" if name == "step" else "data_epoch"
        try:
            least = float(number)
        except ValueError:
            raise UsageError(f'"{text}": "{number}" is not a number') from None
        return lambda begin, now: (values.number(now.run.get(key)) or 0.0) >= least
    if text not in GOALS:
        raise UsageError(f'"{text}" is not a goal to wait for; known: {NAMES}')
    return GOALS[text]


def _saved(snapshot: Snapshot) -> float:
    """The number of the newest checkpoint; -1 if there is none."""
    return values.number((snapshot.run.get("checkpoint") or {"number": -1})["number"]) or 0.0


def _appear(job: str | None, deadline: float | None) -> Snapshot:
    """The run. A named one need not exist yet."""
    is_noted = False
    while True:
        try:
            return select.look(job)
        except NotFound as error:
            if job is None:
                raise
            if not is_noted:
                console.note(f"{error.message}; waiting for it to be started")
            is_noted = True
            _sleep(deadline, error.message)


def _sleep(deadline: float | None, what: str) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise TimedOut(what, hint="dlctl status")
    time.sleep(LOOK_S)
