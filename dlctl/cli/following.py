"""Following a run until it ends or the user has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dlctl.cli import console, report
from dlctl.cli.snapshot import Snapshot, load

POLL_S = 0.2
LOOK_S = 1.0
"""How often the run itself is looked at."""


@contextmanager
def leaving(snapshot: Snapshot, again: str) -> Iterator[None]:
    """Within this, Ctrl-C only leaves: the run goes on, and `again` is the command to come back."""
    try:
        yield
    except KeyboardInterrupt:
        run_id = console.escape(snapshot.run_id)
        commands = f"Again: {again} -j {run_id}   Stop: dlctl stop -j {run_id}"
        console.note(f"\nDetached. {run_id} still runs.  {commands}")


def follow(snapshot: Snapshot, poll: Callable[[], None]) -> None:
    """Call `poll` five times a second until the run has ended, and once more after that."""
    while snapshot.is_live:
        look_at = time.monotonic() + LOOK_S
        while time.monotonic() < look_at:
            poll()
            time.sleep(POLL_S)
        snapshot = load(snapshot.directory)
    poll()
    reason = f" ({snapshot.reason})" if snapshot.reason else ""
    console.note(console.escape(f"-- {snapshot.run_id} {report.became(snapshot.state)}{reason} --"))
