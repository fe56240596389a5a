"""`dlctl top`: a full-screen live view of a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from dlctl.cli.group import make_command
from dlctl.cli.options import run_argument
from dlctl.cli.ui import attention, console
from dlctl.errors import DlctlError, NotFound
from dlctl.runs import select
from dlctl.runs.snapshot import load
from dlctl.util import hints


@make_command("dlctl top  # the running job, or the newest one")
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
            hint=hints.command("dlctl status --watch", "prints the same figures periodically"),
        )
    directory = select.look(job).directory
    from dlctl.observe import history, top

    def look() -> top.TopView:
        snapshot = load(directory)
        found, trouble = None, ""
        try:
            found = history.read(directory, whole=False)
        except NotFound:
            pass
        except DlctlError as error:
            trouble = error.message
        rows = [row for row in snapshot.daemons if row.get("role") in ("server", "worker")]
        state, reason = snapshot.state, snapshot.reason
        problems = attention.errors(snapshot)
        return top.TopView(
            snapshot.run_id, state, reason, snapshot.run, rows, found, trouble, problems
        )

    with suppress(KeyboardInterrupt):
        top.watch(look, color=console.shows_color())
