"""One real job in a directory of its own: started, watched, judged, and cleaned away.

Everything that is started here carries the directory in its command line. `close` ends all of it,
whatever state it is in, and removes the directory; `sweep` does the same for a harness that was
itself killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from dlctl.errors import DlctlError
from dlctl.runs import acks, checkpoints, database, lineage

from . import ledger
from .watch import Watch

PREFIX = "dlctl-faults-"
BLOCK_CELLS = 256
SERVERS, WORKERS = 2, 3
POLL_S = 0.01
SHARED_MEMORY = Path("/dev/shm")
"""Where servers keep the shards of a run, in a directory of its name."""
COMMAND_S = 90.0
START = """
import json, os, sys
os.environ.update(json.loads(sys.argv.pop(1)))
from dlctl.cli.app import main
main()
"""
"""A dlctl command. What daemons get besides is put into the environment when it has begun: a false
clock is for them and not for the command."""

JOB = """
[job]
name = "ledger"
task = "ledger_task.py:task"
stop = {{ steps = 1000000000 }}
run_dir = "{run_dir}"

[algorithm]
name = "downpour"
push_every_steps = 1
fetch_every_steps = 4

[inner]
name = "none"

[optimizer]
name = "sgd"
lr = 1.0

[compression]
{compression}

[servers]
count = {servers}
durability = "{durability}"

[workers]
count = {workers}
batch_size = 8
threads = 1
device = "cpu"
restarts_max = 10000

[data]
portion_batches = {portion_batches}

[limits]
push = "{push}"

[checkpoints]
every_s = 0.0
keep = 2

[evaluation]
every_epochs = 0.0

[network]
transport = "{transport}"
port = {port}

[timeouts]
silent_s = {silent_s}
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Broken(Exception):
    """What was waited for does not come: this job is of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What differs between the jobs of two rows."""

    transport: str = "ipc"
    port: int = 0
    silent_s: float = 4.0
    portion_batches: int = 8
    cells: int = 1 << 16
    """Gradients that the job can tell apart."""
    work: int = 2
    """Matrix products per step."""
    push: str = "60MB/s"
    """Keeps a worker to about a hundred steps per second, so that there is some room on two cores
    for what has to be done about a fault."""
    durability: str = "process"
    compression: str = 'name = "none"'
    """Lines of the job file."""
    enter: tuple[str, ...] = ()
    """Put before every command, to run it in another namespace."""
    daemon_env: Mapping[str, str] = field(default_factory=dict)
    disk: Callable[[Path], None] | None = None
    """Called with the (new, empty) directory of all runs before anything is written to it."""


class Job:
    def __init__(self, options: Options) -> None:
        self.options = options
        # Short, because paths of sockets must be.
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        (self.path / "x").mkdir(mode=0o700)
        self.blocks_path = self.path / "blocks"
        self.blocks_path.touch()
        self.watch = Watch()
        self._write_files()

    # ------------------------------------------------------------ files and commands

    def _write_files(self) -> None:
        o = self.options
        shutil.copy(Path(__file__).with_name("ledger_task.py"), self.path)
        runs = self.path / "runs"
        runs.mkdir()
        if o.disk is not None:
            o.disk(runs)
        text = JOB.format(
            run_dir="runs", servers=SERVERS, workers=WORKERS, transport=o.transport, port=o.port,
            portion_batches=o.portion_batches, silent_s=o.silent_s, push=o.push,
            durability=o.durability, compression=o.compression,
        )  # fmt: skip
        (self.path / "job.toml").write_text(text)
        dropped = ("DLCTL_JOB", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "MAKEFLAGS")
        self.env = {key: value for key, value in os.environ.items() if key not in dropped}
        self.env |= {
            "XDG_STATE_HOME": str(self.path / "state"),
            "XDG_RUNTIME_DIR": str(self.path / "x"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "LEDGER_SHARDS": str(SERVERS),
            "LEDGER_CELLS": str(o.cells),
            "LEDGER_BLOCK_CELLS": str(BLOCK_CELLS),
            "LEDGER_WORK": str(o.work),
            "LEDGER_SAMPLES": str(o.portion_batches * 8 * 64),
            "LEDGER_BLOCKS": str(self.blocks_path),
        }

    def dlctl(self, *arguments: str, timeout_s: float = COMMAND_S) -> Ended:
        """Run a command to its end. Raises Broken if there is none."""
        python = [sys.executable, "-P", "-c", START, json.dumps(dict(self.options.daemon_env))]
        try:
            ended = subprocess.run(
                [*self.options.enter, *python, *arguments], stdin=subprocess.DEVNULL,
                capture_output=True, text=True, cwd=self.path, env=self.env, timeout=timeout_s,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise Broken(f"dlctl {' '.join(arguments)} takes over {timeout_s:g} s") from late
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def start(self) -> None:
        ended = self.dlctl("start", "job.toml")
        if ended.code != 0:
            raise Broken(f"dlctl start: exit {ended.code}: {ended.err[-600:]}")
        self.watch.begin(self.directory)

    # ------------------------------------------------------------ the run

    @property
    def directory(self) -> Path:
        found = [d for d in (self.path / "runs").iterdir() if (d / database.FILE).exists()]
        if not found:
            raise Broken("there is no run directory")
        return max(found, key=lambda d: (d / "key").stat().st_mtime_ns)

    def run(self) -> dict[str, Any]:
        return database.read(self.directory)

    def daemons(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.run()["daemons"]}

    def pid(self, name: str) -> int:
        """Raises Broken if it has none."""
        run = self.run()
        row = run if name == "coordinator" else self.daemons()[name]
        if not isinstance(row.get("pid"), int):
            raise Broken(f"{name} has no process ({row.get('state')}: {run.get('reason')})")
        return int(row["pid"])

    def incarnations(self) -> dict[str, int]:
        """Of every daemon; the coordinator's, too."""
        run = self.run()
        found = {row["name"]: int(row["incarnation"]) for row in run["daemons"]}
        return {**found, "coordinator": int(run.get("incarnation") or 0)}

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        with closing(database.RunDb(self.directory, readonly=True)) as db:
            return list(db.events(after))

    def last_event(self) -> int:
        return max((event["id"] for event in self.events()), default=0)

    def is_over(self) -> str:
        """Why the run has ended or is ending; "" while it goes on."""
        run = self.run()
        over = run["state"] in ("stopping", "stopped", "failed", "finished")
        return f"{run['state']}: {run.get('reason', '')}" if over else ""

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = 30.0) -> float:
        """Wait for a condition; returns the time.monotonic() at which it was true. Raises Broken,
        also when the run ends meanwhile."""
        deadline = time.monotonic() + timeout_s
        look_at = 0.0
        while not condition():
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 0.5
                if why := self.is_over():
                    raise Broken(f"waited until {what}; the run is {why}")
            if now > deadline:
                raise Broken(f"not in {timeout_s:g} s: {what}")
            pause(POLL_S)
        return time.monotonic()

    def until_all_step(self, timeout_s: float = 60.0) -> None:
        """Wait until every slot has some new push settled, and the run is as it should be."""
        before = self.watch.now()
        slots = range(WORKERS)
        self.until(
            "all workers push and nobody is in trouble",
            lambda: (
                all(self.watch.grown(slot, before) >= 5 for slot in slots)
                and self.run()["state"] == "running"
            ),
            timeout_s,
        )

    def is_full(self) -> bool:
        """Whether the account is nearly used up."""
        used = self.blocks_path.stat().st_size // ledger.LINE.size * BLOCK_CELLS
        return used > 0.7 * self.options.cells

    # ------------------------------------------------------------ the end

    def finish(self) -> ledger.Verdict:
        """Stop the run in order and judge it. Raises Broken if it cannot be stopped."""
        self.watch.end()
        ended = self.dlctl("stop", "--grace", "20s")
        if ended.code != 0:
            raise Broken(f"dlctl stop: exit {ended.code}: {ended.err[-600:]}")
        return self.judge()

    def judge(self) -> ledger.Verdict:
        """What the newest good checkpoint has of what was acknowledged; of none, nothing."""
        weights = np.zeros(SERVERS * self.options.cells, np.float32)
        good = lineage.newest_good(self.directory)
        if good is not None:
            directory, manifest = good
            weights = checkpoints.read_slice(directory, manifest, "w", 0, manifest["size"])
        blocks = ledger.read_blocks(self.blocks_path, BLOCK_CELLS)
        records = acks.read_all(self.directory)
        return ledger.judge(weights, SERVERS, blocks, BLOCK_CELLS, records)

    def story(self) -> str:
        """The last events and errors, for a row that has failed."""
        try:
            lines = [f"    {event['kind']}: {event['text']}" for event in self.events()[-12:]]
            for log in sorted((self.directory / "logs").glob("*.jsonl")):
                said = log.read_text(errors="replace").splitlines()
                bad = [line for line in said if '"level": "error"' in line]
                lines += [f"    {log.name}: {line[-1500:]}" for line in bad[-2:]]
        except (OSError, DlctlError, Broken) as error:
            lines = [f"    {error}"]
        return "\n".join(lines)

    def processes(self) -> list[psutil.Process]:
        return processes_of(str(self.path))

    def close(self) -> None:
        self.watch.end()
        clean(self.path)


def pause(seconds: float) -> None:
    """Wait; Ctrl-C comes through."""
    threading.Event().wait(seconds)


def processes_of(word: str) -> list[psutil.Process]:
    """Every process that has `word` in an argument."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in argument for argument in process.cmdline()[1:]):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def clean(path: Path) -> None:
    """End every process of a job, take its disk away, and remove its directory."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while there := processes_of(str(path)):
            for process in there:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(there, timeout=5)
        for run in path.glob("runs/*/key"):
            shutil.rmtree(
                SHARED_MEMORY / f"dlctl-{os.getuid()}" / run.parent.name, ignore_errors=True
            )
        for mount in [p.mountpoint for p in psutil.disk_partitions(all=True)]:
            if Path(mount).is_relative_to(path):
                subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        signal.signal(signal.SIGINT, before)


def sweep() -> list[str]:
    """Clean up behind harnesses that were killed; returns the directories that they left."""
    left = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            clean(path)
            left.append(str(path))
    return left
