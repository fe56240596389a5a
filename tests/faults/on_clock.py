"""The wall clock jumps: for the daemons, and for the commands that look after them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .job import WORKERS, Job, Options, pause
from .on_workers import GAP_S_MAX, replaced
from .rows import Incident, Trial, row, tool

JUMPS_S = (3600, -3600, 86400, -86400)
WATCHED_S = 1.5
FAR_S = 1000.0
LOOK = """
import json, os, psutil, sys, time
print(json.dumps([time.time(), psutil.Process(int(sys.argv[1])).create_time()]))
"""
"""The time of day, and that at which a process began: both move when the clock is set."""


@row("clock-jump", "jumps of an hour and a day: no effect", needs=(tool("cc"),))
def clock_jump(trial: Trial) -> None:
    with tempfile.TemporaryDirectory(prefix="dlctl-clock-") as name:
        clock, library = Path(name) / "offset", Path(name) / "false_clock.so"
        set_clock(clock, 0)
        source = Path(__file__).with_name("false_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        # What a command is started with its daemons have, too.
        enter = ("env", f"LD_PRELOAD={library}", f"FAULTS_CLOCK={clock}")
        trial.run(lambda trial, job: jump(trial, job, clock), Options(enter=enter))


def set_clock(file: Path, offset_s: int) -> None:
    """In place, as processes have it mapped."""
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(struct.pack("=q", offset_s))


def offset_of(file: Path) -> int:
    return int(struct.unpack("=q", file.read_bytes())[0])


def jump(trial: Trial, job: Job, clock: Path) -> Incident:
    """To another time, where it stays: the job ends with a clock that it did not begin with."""
    before, last, present_s = job.incarnations(), job.last_event(), offset_of(clock)
    pid = job.pid("server-0")
    now_at, began_at = look(job, pid)
    began = time.monotonic()
    moved_s = trial.rng.choice([to_s for to_s in JUMPS_S if to_s != present_s]) - present_s
    set_clock(clock, present_s + moved_s)
    pause(WATCHED_S)
    incident = Incident()
    for what, value in zip(("clock", "processes' time of start"), look(job, pid), strict=True):
        by_s = value - (now_at if what == "clock" else began_at)
        incident.require(abs(by_s - moved_s) < 60.0, f"the {what} did not jump: this shows nothing")
    heard_at = job.run()["updated_at"] or 0.0
    incident.require(
        abs(heard_at - time.time() - present_s - moved_s) < FAR_S,
        "the daemons' clock did not jump: this shows nothing",
    )
    ask(job, incident)
    incident.others_gap_s = job.watch.longest_gap_s(range(WORKERS), began, time.monotonic())
    incident.false_failovers = replaced(job, before)
    incident.require(
        incident.others_gap_s <= GAP_S_MAX, f"a worker paused {incident.others_gap_s:.2f} s"
    )
    events = [e["text"] for e in job.events(last) if e["kind"] in ("exit", "silent", "lost")]
    incident.require(not events, f"something happened: {events[:2]}")
    return incident


def look(job: Job, pid: int) -> list[float]:
    """What a command sees: [the time, when the process `pid` began], in seconds since 1970."""
    command = [*job.options.enter, sys.executable, "-c", LOOK, str(pid)]
    ended = subprocess.run(command, capture_output=True, check=True)
    return [float(value) for value in json.loads(ended.stdout)]


def ask(job: Job, incident: Incident) -> None:
    """A run that trains is told to train, and nobody offers to bring it back."""
    status = job.dlctl("status", "--json")
    run = json.loads(status.out) if status.code == 0 else {}
    state = (run.get("state"), run.get("is_live"), run.get("stale_s"))
    incident.require(state == ("running", True, None), f"status: {state} {status.err[-200:]}")
    sick = [row["name"] for row in run.get("daemons", []) if row["state"] != "running"]
    incident.require(not sick, f"status: not running: {', '.join(sick)}")
    recover = job.dlctl("recover")
    is_well = recover.code == 0 and "nothing to recover" in recover.out
    incident.require(is_well, f"recover: exit {recover.code}: {(recover.out + recover.err)[-300:]}")
