"""The wall clock jumps."""

from __future__ import annotations

import struct
import subprocess
import tempfile
import time
from pathlib import Path

from .job import WORKERS, Job, Options, pause
from .on_workers import GAP_S_MAX, replaced
from .rows import Incident, Trial, row, tool

JUMPS_S = (3600, -3600, 86400, -86400)
WATCHED_S = 1.5
FAR_S = 1000.0


@row("clock-jump", "jumps of an hour and a day: no effect", needs=(tool("cc"),))
def clock_jump(trial: Trial) -> None:
    with tempfile.TemporaryDirectory(prefix="dlctl-clock-") as name:
        clock, library = Path(name) / "offset", Path(name) / "false_clock.so"
        set_clock(clock, 0)
        source = Path(__file__).with_name("false_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        env = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(clock)}
        trial.run(lambda trial, job: jump(trial, job, clock), Options(daemon_env=env))


def set_clock(file: Path, offset_s: int) -> None:
    """In place, as processes have it mapped."""
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(struct.pack("=q", offset_s))


def jump(trial: Trial, job: Job, clock: Path) -> Incident:
    """There and back: two jumps."""
    before, last = job.incarnations(), job.last_event()
    began = time.monotonic()
    set_clock(clock, trial.rng.choice(JUMPS_S))
    pause(WATCHED_S)
    ahead_s = abs((job.run()["updated_at"] or 0.0) - time.time())
    set_clock(clock, 0)
    pause(WATCHED_S)
    incident = Incident(
        others_gap_s=job.watch.longest_gap_s(range(WORKERS), began, time.monotonic()),
        false_failovers=replaced(job, before),
    )
    assert incident.others_gap_s is not None
    incident.require(ahead_s > FAR_S, "the daemons' clock did not jump: this shows nothing")
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"a worker paused {incident.others_gap_s:.2f} s"
    )
    events = [e["text"] for e in job.events(last) if e["kind"] in ("exit", "silent", "lost")]
    incident.require(not events, f"something happened: {events[:2]}")
    return incident
