"""Request a checkpoint now, and explain what to do if that fails."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

from dlctl.errors import DlctlError
from dlctl.ops import disk
from dlctl.runs import facts
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values


def save(snapshot: Snapshot, limit_s: float, tell: Callable[[Any], None]) -> dict[str, Any]:
    """The row of the complete checkpoint. `tell` is called as `client.ask` does.

    Raises DlctlError with the next command, TimedOut after `limit_s`.
    """
    from dlctl.control import client

    if not snapshot.is_live:
        raise _down(snapshot)
    try:
        row = client.ask(snapshot.directory, "checkpoint", {}, limit_s, tell)
        if row.get("error"):
            raise DlctlError(f"the checkpoint failed: {row['error']}", where=row.get("path"))
        return row | {"at": time.time()}  # The coordinator's own clock is monotonic.
    except DlctlError as error:
        # A failed checkpoint's files are removed, so there may be room again by now.
        if disk.full_disk(snapshot) or os.strerror(errno.ENOSPC) in error.message:
            error.hint = error.hint or disk.free_space(snapshot)
        error.hint = error.hint or f"dlctl logs coordinator -l warning -j {snapshot.run_id}"
        raise


def _down(snapshot: Snapshot) -> DlctlError:
    """No coordinator can save; the last progress of a failed run may still be stored."""
    from dlctl.ops import next_step

    step = values.number(snapshot.run.get("step")) or 0.0
    if snapshot.state != "failed" or step <= (facts.saved_step(snapshot) or 0):
        what = f"{snapshot.run_id} is {snapshot.state}: there is nothing new to save"
        return DlctlError(what, hint=f"dlctl checkpoint ls -j {snapshot.run_id}")
    at = f"{snapshot.state}, at step {values.count(step)}"
    what = f"{snapshot.run_id} is down ({at}): no coordinator is running to save it"
    step_on = next_step.of(snapshot)
    return DlctlError(what, hint=step_on.text() if step_on else next_step.command(snapshot))
