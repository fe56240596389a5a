"""Runs on real daemons, from their start to their end, for comparisons and sweeps."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.ops import launch, stop
from dlctl.ops.cases import Start
from dlctl.runs.snapshot import load
from dlctl.util import notes
from dlctl.util.names import RUN_IN_ADDRESS

LOOK_S = 0.2
GRACE_S = 10.0
TRIES = 3
"""How often a run is started whose processes all die."""


def run(start: Start, name: str) -> Path:
    """Returns the run directory when the run has ended, also if it failed. An interrupt stops it.
    Raises DlctlError if it cannot be started.
    """
    notes.note(f"{name} runs")
    launched = launch.launch_new(_by_itself(start))
    try:
        while load(launched.directory).is_live:
            time.sleep(LOOK_S)
    except BaseException:
        stop.stop(load(launched.directory), checkpoint=False, grace_s=GRACE_S, kill=False)
        raise
    return launched.directory


def run_on(start: Start, name: str, stopped: threading.Event) -> Path:
    """Run a job to its end, from where its newest run of that name has stopped or died, if there is
    one. `stopped`: stop it, with a checkpoint. Returns the run directory. Raises DlctlError.
    """
    start = _by_itself(start)
    for _ in range(TRIES):
        directory = launch.launch_job(start, fresh=False).directory
        while load(directory).is_live:
            if stopped.wait(LOOK_S):
                with suppress(DlctlError):
                    stop.stop(load(directory), checkpoint=True, grace_s=GRACE_S, kill=False)
        if not load(directory).is_gone or stopped.is_set():
            return directory
        notes.note(f"{name}: all of its processes have died; it is taken up again")
    return directory


def _by_itself(start: Start) -> Start:
    """The job of one run among many: without a mirror that all would share."""
    checkpoints = start.job.checkpoints
    if not checkpoints.mirror or RUN_IN_ADDRESS in checkpoints.mirror:
        return start
    job = replace(start.job, checkpoints=replace(checkpoints, mirror=""))
    content = {**start.content, "checkpoints": {**start.content["checkpoints"], "mirror": ""}}
    return start._replace(job=job, content=content)
