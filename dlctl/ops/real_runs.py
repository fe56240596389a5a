"""A run on real daemons, from its start to its end, for a comparison."""

from __future__ import annotations

import time
from pathlib import Path

from dlctl.ops import launch, stop
from dlctl.ops.cases import Start
from dlctl.runs.snapshot import load
from dlctl.util import notes

LOOK_S = 0.2
GRACE_S = 10.0


def run(start: Start, name: str) -> Path:
    """Returns the run directory when the run has ended, also if it failed. An interrupt stops it.
    Raises DlctlError if it cannot be started.
    """
    notes.note(f"{name} runs")
    launched = launch.launch_new(start)
    try:
        while load(launched.directory).is_live:
            time.sleep(LOOK_S)
    except BaseException:
        stop.stop(load(launched.directory), checkpoint=False, grace_s=GRACE_S, kill=False)
        raise
    return launched.directory
