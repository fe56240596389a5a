"""`make rampage`: the digits example is trained while a random daemon is killed every two seconds
for a minute, the coordinator and the agent included; it must still reach an accuracy of 0.95.

If coordinator and agent have died at once, nobody is left to start them: then `dlctl recover` is
called, as a person would. SEED= replays the choice of victims (not their instants).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from dlctl.runs import database

from .job import PREFIX, Ended, clean, pause

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
RAMPAGE_S, PAUSE_S, REST_S = 60.0, 2.0, 120.0
GOAL = 0.95


def dlctl(place: Path, *arguments: str) -> Ended:
    """Run a command to its end; its own files are in `place`."""
    own = {"XDG_STATE_HOME": str(place / "state"), "XDG_RUNTIME_DIR": str(place / "x")}
    command = [sys.executable, "-P", "-c", "from dlctl.cli.app import main; main()", *arguments]
    env = os.environ | own | {"PYTHONPATH": str(EXAMPLE.parents[1])}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def victims(directory: Path) -> list[psutil.Process]:
    """The daemons of the run that are there now."""
    run = database.read(directory)
    rows = [*run["daemons"], {"name": "coordinator", **run}]
    pids = sorted((row["name"], row["pid"]) for row in rows if row.get("pid"))
    return [psutil.Process(pid) for _, pid in pids if psutil.pid_exists(pid)]


def rampage(place: Path, directory: Path, rng: random.Random) -> tuple[int, int]:
    """(daemons killed, times that `recover` was needed)."""
    killed = recovered = 0
    until = time.monotonic() + RAMPAGE_S
    while time.monotonic() < until:
        pause(PAUSE_S)
        there = victims(directory)
        names = {p.cmdline()[3] for p in there if len(p.cmdline()) > 3}
        if not names & {"daemons.coordinator", "daemons.agent"}:
            print("nobody watches any more: dlctl recover", flush=True)
            recovered += 1
            dlctl(place, "recover", "-j", directory.name)
        elif there:
            victim = rng.choice(there)
            print(f"kill -9 {victim.pid}  {' '.join(victim.cmdline()[3:4])}", flush=True)
            victim.send_signal(signal.SIGKILL)
            killed += 1
    return killed, recovered


def main() -> int:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    (place / "x").mkdir(mode=0o700)
    try:
        shutil.copytree(EXAMPLE, place / "digits", ignore=shutil.ignore_patterns("runs"))
        job = place / "digits" / "job.toml"
        text = job.read_text()
        assert "epochs = 20" in text
        job.write_text(text.replace("epochs = 20", "epochs = 3000"))
        started = dlctl(place, "start", str(job))
        if started.code:
            print(started.err)
            return 1
        (directory,) = (place / "digits" / "runs").iterdir()
        killed, recovered = rampage(place, directory, random.Random(seed))
        return conclude(place, directory, seed, killed, recovered)
    finally:
        clean(place)


def conclude(place: Path, directory: Path, seed: int, killed: int, recovered: int) -> int:
    """Let all of them come back, end the run in order, and look at what it has come to."""
    until = time.monotonic() + REST_S
    while database.read(directory)["state"] != "running" and time.monotonic() < until:
        pause(0.5)
    ended = dlctl(place, "stop", "-j", directory.name)
    run = database.read(directory)
    accuracy = (run.get("evaluation") or {}).get("accuracy", 0.0)
    print(
        f"{killed} daemons killed in {RAMPAGE_S:.0f} s, recover needed {recovered} times; "
        f"{run['state']} at step {run['step']}, accuracy {accuracy:.4f}; SEED={seed}"
    )
    verify = dlctl(place, "verify", directory.name)
    print(verify.out + verify.err)
    is_good = accuracy >= GOAL and ended.code == 0 and verify.code == 0
    print("good" if is_good else f"BAD\n{ended.err}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
