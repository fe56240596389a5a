"""A directory in which jobs really run: job file, task, state and sockets of its own.

Everything that a test starts here carries this directory in its command line. `close` ends what is
left of it, so that a test that fails leaves nothing behind, and says what that was.
"""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fork_server
import psutil
import pytest

from dlctl.runs import database, kept_shards, paths

POLL_S = 0.05
LOG_LINES = 15
COMMAND_S = 240.0
"""Commands have limits of their own, and say whom they wait for; this is for one that hangs."""
ENDLESS = "{ steps = 100000000 }"
SLOW_S = 0.04
"""A pause in every batch of a run that something is tried on: the cores are for what is tried."""
COUNTING = """class Counting(TensorDataset):
    def __getitem__(self, index):
        with open(__file__ + ".seen", "a") as file:
            file.write(f"{index}\\n")
        return super().__getitem__(index)


class Clouds"""
COMMAND = [sys.executable, "-P", "-c", "from dlctl.cli.app import main; main()"]
ON_TERMINAL = [
    sys.executable,
    "-P",
    "-c",
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from dlctl.cli.app import main; main()",
]
"""As a shell starts it: standard input is the terminal that controls the command."""

TASK = '''
import threading

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

PAUSE_S = {pause_s}


def clouds(points, seed):
    """Two clouds of points around (1, 1) and (-1, -1)."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (points,), generator=generator)
    noise = 0.6 * torch.randn(points, 2, generator=generator)
    return TensorDataset(noise + (2 * label[:, None] - 1), label)


class Clouds:
    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def dataset(self):
        return clouds({samples}, seed=1)

    def loss(self, model, batch):
        threading.Event().wait(PAUSE_S)
        points, label = batch
        return functional.cross_entropy(model(points), label)

    def evaluate(self, model):
        points, label = clouds(512, seed=2).tensors
        return {{"accuracy": (model(points).argmax(1) == label).float().mean()}}


task = Clouds()
'''

OPTIMIZER = """
[optimizer]
name = "adagrad"
lr = 0.1
"""
DOWNPOUR = 'name = "downpour"\nfetch_every_steps = 2\npush_every_steps = 2'
JOB = """
[job]
name = "clouds"
{program}
stop = {stop}

[algorithm]
{algorithm}
{optimizer}
[servers]
count = {servers}
{more_servers}

[workers]
count = {workers}
batch_size = {batch_size}
threads = 1
{more_workers}

[data]
portion_batches = 2

[checkpoints]
every_s = {checkpoint_every_s}
{more}
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """A dlctl command that goes on by itself; what it prints goes to files."""

    def __init__(self, place: Workplace, arguments: tuple[str, ...], number: int) -> None:
        self._place = place
        self._out = place.path / f"command-{number}.out"
        self._err = place.path / f"command-{number}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = fork_server.Popen(
                [*place.enter, *COMMAND, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                cwd=place.path, env=place.env, start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def end(self, timeout_s: float = 60.0) -> Ended:
        """Wait until it has ended by itself."""
        self._place.until("the command ends", lambda: self.process.poll() is not None, timeout_s)
        return Ended(self.process.returncode, self.out, self.err)


class Terminal:
    """A dlctl command on a terminal of its own."""

    def __init__(
        self, place: Workplace, arguments: tuple[str, ...], env: Mapping[str, str]
    ) -> None:
        self._place = place
        self._master, slave = pty.openpty()
        self.shown = ""
        self.process = fork_server.Popen(
            [*ON_TERMINAL, *arguments],
            stdin=slave, stdout=slave, stderr=slave,
            cwd=place.path, env={**place.env, "TERM": "xterm", **env}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self.shown += data.decode(errors="replace")
        except OSError:  # nobody has the terminal open any more
            return

    def type(self, keys: bytes) -> None:
        """Ctrl-C is b"\x03"."""
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """What the kernel does to the command when the window is closed."""
        self.process.send_signal(signal.SIGHUP)

    def end(self, timeout_s: float = 60.0) -> int:
        self._place.until("the command ends", lambda: self.process.poll() is not None, timeout_s)
        self.close()
        return self.process.returncode

    def close(self) -> None:
        self._reader.join()
        if self._master >= 0:
            os.close(self._master)
            self._master = -1


class Workplace:
    def __init__(
        self,
        enter: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        within: Path | None = None,
    ) -> None:
        """`enter` is put before every command, to run it in other namespaces, with this `env`.
        within: the parent directory.
        """
        self.enter = enter
        # Short, because paths of sockets must be.
        self.path = Path(tempfile.mkdtemp(prefix="dlctl-", dir=within))
        (self.path / "x").mkdir(mode=0o700)
        dropped = ("DLCTL_JOB", "NO_COLOR", "FORCE_COLOR", "COLUMNS")
        around = os.environ if env is None else env
        self.env = {key: value for key, value in around.items() if key not in dropped}
        self.env |= {
            "XDG_STATE_HOME": str(self.path / "state"),
            "XDG_RUNTIME_DIR": str(self.path / "x"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        self._commands: list[Command | Terminal] = []
        self.task()

    # ------------------------------------------------------------ files

    def task(self, text: str = TASK, pause_s: float = 0.0, samples: int = 256) -> None:
        """Write train.py: the two clouds, or another text."""
        if text is TASK:
            text = TASK.format(pause_s=pause_s, samples=samples)
        (self.path / "train.py").write_text(text)

    def count_samples(self) -> Callable[[], Counter[int]]:
        """From now on the dataset writes down every sample that a worker takes; how often each."""
        path = self.path / "train.py"
        text = path.read_text().replace("return TensorDataset(", "return Counting(")
        path.write_text(text.replace("class Clouds", COUNTING))
        seen = Path(f"{path}.seen")
        return lambda: Counter(map(int, seen.read_text().split()))

    def job(
        self,
        stop: str = "{ epochs = 2 }",
        workers: int = 1,
        servers: int = 1,
        checkpoint_every_s: float = 0.0,
        batch_size: int = 8,
        program: str = 'task = "train.py:task"',
        algorithm: str = DOWNPOUR,
        optimizer: str = OPTIMIZER,
        more: str = "",
        more_workers: str = "",
        more_servers: str = "",
        file: str = "job.toml",
    ) -> str:
        """Write a job file; returns its name."""
        (self.path / file).write_text(
            JOB.format(
                program=program,
                stop=stop,
                workers=workers,
                servers=servers,
                batch_size=batch_size,
                algorithm=algorithm,
                optimizer=optimizer if servers else "",
                more=more,
                more_workers=more_workers,
                more_servers=more_servers,
                checkpoint_every_s=float(checkpoint_every_s),
            )
        )
        return file

    # ------------------------------------------------------------ commands

    def dlctl(self, *arguments: str, timeout_s: float = COMMAND_S) -> Ended:
        """Run a command to its end."""
        return self.begin(*arguments).end(timeout_s)

    def begin(self, *arguments: str) -> Command:
        command = Command(self, arguments, len(self._commands))
        self._commands.append(command)
        return command

    def terminal(self, *arguments: str, **env: str) -> Terminal:
        command = Terminal(self, arguments, env)
        self._commands.append(command)
        return command

    def start(self, *arguments: str) -> Path:
        """Start job.toml in the background; returns its run directory."""
        ended = self.dlctl("start", "job.toml", *arguments)
        assert ended.code == 0, ended.err
        return self.directory

    # ------------------------------------------------------------ the run

    @property
    def directory(self) -> Path:
        """The newest run directory, but for simulated ones."""
        found = [d for d in (self.path / "runs").iterdir() if (d / database.FILE).exists()]
        found = [directory for directory in found if not paths.is_simulated(directory)]
        return max(found, key=lambda d: (d / "key").stat().st_mtime_ns)

    def run(self) -> dict[str, Any]:
        """What the coordinator last wrote; {} before there is a run."""
        try:
            return database.read(self.directory)
        except (OSError, ValueError, database.NotFound):
            return {}

    def daemon(self, name: str) -> dict[str, Any]:
        rows = self.run().get("daemons", [])
        return next((row for row in rows if row["name"] == name), {})

    def pid(self, name: str) -> int:
        """The process of a daemon that must be there."""
        pid = self.run().get("pid") if name == "coordinator" else self.daemon(name).get("pid")
        assert isinstance(pid, int), f"{name} has no process:\n{self.story()}"
        return pid

    def events(self, kind: str = "") -> list[str]:
        with closing(database.RunDb(self.directory, readonly=True)) as db:
            return [e["text"] for e in db.events() if not kind or e["kind"] == kind]

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        """Wait until `condition()` is true; returns what it gave. The test fails with the run's
        state and its last words if that takes too long."""
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not in {timeout_s:g} s: {what}\n{self.story()}", pytrace=True)
            pause.wait(POLL_S)
        return found

    def until_state(self, *states: str, timeout_s: float = 30.0) -> None:
        self.until(" or ".join(states), lambda: self.run().get("state") in states, timeout_s)

    def until_step(self, step: int, timeout_s: float = 30.0) -> None:
        self.until(f"step {step}", lambda: self.run().get("step", 0) >= step, timeout_s)

    # ------------------------------------------------------------ what is left

    def story(self) -> str:
        """All there is to know about what went wrong."""
        parts = []
        for command in self._commands[-3:]:
            said = command.shown if isinstance(command, Terminal) else command.out + command.err
            parts.append(f"--- {command.process.args[3:]}\n{said[-3000:]}")  # type: ignore[index]
        run = self.run()
        for row in run.pop("daemons", []):
            keys = ("name", "pid", "state", "phase", "waiting_for", "restarts", "error")
            parts.append("  ".join(f"{key}={row.get(key)}" for key in keys))
        parts.append(str(run))
        for log in sorted(self.path.glob("runs/*/logs/*.jsonl")):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            parts.append("\n".join([f"--- {log.name}", *(line[:600] for line in lines)]))
        return "\n".join(parts)

    def processes(self) -> list[psutil.Process]:
        """Every daemon of this place, known by the directory in its command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if any(str(self.path) in word for word in process.cmdline()[1:]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_at_once(self, processes: list[psutil.Process]) -> None:
        """Nobody of them sees another one die."""
        for process in processes:
            process.suspend()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=5)
        pids = {process.pid for process in processes}
        self.until("they are gone", lambda: not pids & {p.pid for p in self.processes()})

    def sockets(self) -> list[str]:
        """Not those of ssh, which keeps a connection for a minute, for the next command."""
        found = [path for path in (self.path / "x").rglob("*") if not path.is_dir()]
        return [str(path) for path in found if path.parent.name != "ssh"]

    def nothing_left(self, timeout_s: float = 5.0) -> None:
        """Wait until no process, no socket and no half written file is left, nor, of a run that has
        ended in order, what its servers have kept.
        """
        self.until("no process is left", lambda: not self.processes(), timeout_s)
        assert not self.sockets()
        assert not [*self.path.glob("runs/**/.*.tmp")]
        for run in self.path.glob("runs/*/run.db"):
            if database.read(run.parent).get("state") in ("finished", "stopped"):
                assert not [*kept_shards.shared_memory().glob(f"{run.parent.name}/*")]
                assert not [*run.parent.glob("state/*")]

    def close(self) -> list[str]:
        """End everything and remove the directory; returns what had to be ended."""
        left = []
        for command in self._commands:
            if command.process.poll() is None:
                left.append(f"the command {command.process.args[3:]}")  # type: ignore[index]
                command.process.kill()
                command.process.wait()
            if isinstance(command, Terminal):
                command.close()
        while there := self.processes():
            left += [" ".join(process.cmdline()[1:]) for process in there]
            for process in there:
                process.kill()
            psutil.wait_procs(there, timeout=5)
        for run in self.path.glob("runs*/*"):
            # A run that has failed keeps its shards for `recover`; nobody will ask for it any more.
            shutil.rmtree(kept_shards.shared_memory() / run.name, ignore_errors=True)
        left += self.sockets()
        shutil.rmtree(self.path, ignore_errors=True)
        return left


@contextmanager
def opened() -> Iterator[Workplace]:
    """A place for jobs, of which nothing is left at the end, unless the test fails."""
    place = Workplace()
    try:
        yield place
    finally:
        left = place.close()
    assert not left, f"left behind: {left}"
