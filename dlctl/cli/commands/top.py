"""`dlctl top`: a full-screen live view of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.cli.group import make_command
from dlctl.cli.options import run_argument
from dlctl.cli.ui import attention, console
from dlctl.errors import DlctlError, NotFound
from dlctl.runs import select
from dlctl.runs.snapshot import load
from dlctl.util import hints

if TYPE_CHECKING:
    from dlctl.observe.top import View

SHOWN = ("server", "worker")


@make_command(
    "dlctl top  # the running job, or the newest one",
)
@run_argument
def command(job: str | None) -> None:
    """Shows the loss over the training time, each server and worker with its rates, and the
    problems, every second until q or Ctrl-C; the job continues. It needs a terminal: scripts and
    pipes use `dlctl status --json`.
    """
    streams = (sys.stdin, sys.stdout)
    is_terminal = all(stream is not None and stream.isatty() for stream in streams)
    if not is_terminal or os.environ.get("TERM", "dumb") in ("dumb", ""):
        raise DlctlError(
            "dlctl top needs a terminal for its full-screen view and key presses",
            hint=hints.told("dlctl status --watch", "prints the same figures periodically"),
        )
    directory = select.look(job).directory
    from dlctl.observe import top

    try:
        top.watch(lambda: _look(directory), color=console.shows_color())
    except KeyboardInterrupt:
        return


def _look(directory: Path) -> View:
    from dlctl.observe import history
    from dlctl.observe.top import View

    snapshot = load(directory)
    trouble = ""
    try:
        found = history.read(directory, whole=False)
    except NotFound:
        found = None
    except DlctlError as error:
        found, trouble = None, error.message
    rows = [row for row in snapshot.daemons if row.get("role") in SHOWN]
    state, reason = snapshot.state, snapshot.reason
    problems = attention.errors(snapshot)
    return View(snapshot.run_id, state, reason, snapshot.run, rows, found, trouble, problems)
