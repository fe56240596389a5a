"""Workers that are forked from a template: each is a daemon like one with imports of its own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemons.agent.template import PR_SET_CHILD_SUBREAPER, SWITCH, Forked, Template, reap
from daemons.template.words import PER_DAEMON
from dlctl import jobfile
from dlctl.job.config import to_dict
from dlctl.launch import base, local
from dlctl.runs import paths
from dlctl.util import processes

CONTROL = "ipc:///nowhere/control"
LIMIT_S = 45.0
OF_PYTEST = "PYTEST_CURRENT_TEST"
"""A variable that changes between the start of the template and that of a worker."""
JOB = """
[job]
name = "own"
script = "train.py"
[algorithm]
name = "local-sgd"
[workers]
threads = 1
"""
TELL = """
import json, os, random, sys
were_there = {"torch", "torch._dynamo"} <= {*sys.modules}
import numpy as np, torch
print(json.dumps({
    "numbers": [random.random(), np.random.rand(), torch.rand(1).item(), torch.initial_seed()],
    "name": os.getenv("DLCTL_NAME"), "rank": os.getenv("RANK"), "umask": os.umask(0o22),
    "argv": sys.argv, "cwd": os.getcwd(), "threads": torch.get_num_threads(),
    "main": sys.modules["__main__"].__dict__ is globals(), "were_there": were_there,
    "hash": hash("a"), "open": sorted(os.readlink(f"/proc/self/fd/{fd}")[:6] for fd in (0, 1, 2)),
}))
"""


def until(what: str, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        threading.Event().wait(0.01)
    return value


class Place:
    """A run directory whose workers run a script, and never hear of a coordinator."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = path / "runs" / "own-1"
        (self.directory / "logs").mkdir(parents=True)
        self.write("print('an old one')\n")
        (path / "job.toml").write_text(JOB)
        job = jobfile.load(path / "job.toml")
        (self.directory / "job.json").write_text(json.dumps(to_dict(job)))
        self.template = Template(self.directory, "agent-0")
        self.started: list[Forked | subprocess.Popen[bytes]] = []

    def write(self, program: str) -> None:
        (self.path / "train.py").write_text(program)

    def await_template(self) -> None:
        def is_there() -> bool:
            if self.template.fd >= 0:
                select.select([self.template.fd], [], [], 0.1)
            self.template.look()
            return not self.template.is_loading

        until("the template is ready", is_there)

    def begin(self) -> None:
        os.environ.pop(OF_PYTEST, None)
        self.template.begin()
        self.await_template()

    def ask(self, name: str, incarnation: int = 1) -> Forked | None:
        os.environ.pop(OF_PYTEST, None)
        return self.template.start(name, incarnation, CONTROL, base.NO_CREDENTIALS)

    def fork(self, name: str, incarnation: int = 1) -> Forked:
        forked = self.ask(name, incarnation)
        assert forked is not None
        self.started.append(forked)
        return forked

    def spawn(self, name: str, incarnation: int = 1) -> subprocess.Popen[bytes]:
        process = local.start(self.directory, "worker", name, incarnation, CONTROL)
        self.started.append(process)
        return process

    def log(self, name: str, incarnation: int = 1) -> list[dict[str, Any]]:
        lines = paths.log_path(self.directory, name, incarnation).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def of_rank_0(self, name: str, incarnation: int = 1) -> dict[str, Any]:
        """What the program has printed."""

        def printed() -> list[str]:
            said = (line["msg"] for line in self.log(name, incarnation) if "stream" in line)
            return [line for line in said if line.startswith("{")]

        found: dict[str, Any] = json.loads(until("the program prints", printed)[0])
        return found

    def use(self, job: str, role: str = base.WORKER) -> None:
        """Another job, and a template of this role."""
        self.template.end()
        (self.path / "job.toml").write_text(job)
        (self.directory / "job.json").write_text(
            json.dumps(to_dict(jobfile.load(self.path / "job.toml")))
        )
        self.template = Template(self.directory, "agent-0", role)
        self.begin()

    def close(self) -> None:
        for process in self.started:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        self.template.end()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = _children()  # Of other tests in this process.
    place = Place(tmp_path)
    try:
        place.begin()
        yield place
    finally:
        place.close()
        until("no orphan is left", lambda: (reap(lambda _: False), _children() <= before)[1])
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children(of: int | None = None) -> set[str]:
    pid = of or os.getpid()
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _words(pid: int) -> str:
    """Its command line; "" if it has ended."""
    return " ".join(processes.command_line(pid, processes.start_of(pid)))


def private_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(n) for n in re.findall(r"^Private_\w+: +(\d+)", text, re.MULTILINE))


@pytest.mark.long
def test_forked_workers_are_as_started_ones_in_all_but_memory(place: Place) -> None:
    place.write(TELL)  # The program is read after the fork.
    pair = [place.fork("worker-0"), place.fork("worker-1")]
    alone = place.spawn("worker-2")
    told = [place.of_rank_0(f"worker-{number}") for number in range(3)]
    found = {daemon[:4] for daemon in local.living(place.directory)}
    pids = [*(each.pid for each in pair), alone.pid]
    assert found == {("worker", f"worker-{n}", 1, pid) for n, pid in enumerate(pids)}
    for pid in pids:
        start = processes.start_of(pid)
        assert processes.command_line(pid, start)[2:4] == ["-m", "daemons.script"]
        assert os.getsid(pid) == pid
    assert [each.pop("name") for each in told] == ["worker-0", "worker-1", "worker-2"]
    assert [each.pop("were_there") for each in told] == [True, True, False]
    numbers = [each.pop("numbers") for each in told]
    assert all(len(set(drawn)) == 3 for drawn in zip(*numbers, strict=True))
    assert told[0] == told[1] == told[2]
    assert told[0]["threads"] == 1
    assert private_kb(pids[0]) < private_kb(pids[2]) / 3


@pytest.mark.long
def test_the_other_ranks_of_a_forked_worker_are_forked_too(place: Place) -> None:
    place.write(TELL)
    place.use(JOB.replace("threads = 1", "threads = 2\nprocesses = 2"))
    worker = place.fork("worker-0")
    told = []

    def of_all() -> bool:
        lines = (line["msg"] for line in place.log("worker-0") if "stream" in line)
        told[:] = [json.loads(line) for line in lines if line.startswith("{")]
        return len(told) == 2

    until("both ranks print", of_all)
    (rank,) = (int(pid) for pid in _children(worker.pid) if "later_rank" in _words(int(pid)))
    assert _words(rank).split()[2:4] == ["-m", "daemons.script.later_rank"]
    assert {each["rank"] for each in told} == {"0", "1"}
    assert [each["were_there"] for each in told] == [True, True]
    assert len({each["numbers"][0] for each in told}) == 2
    assert {each["threads"] for each in told} == {1}
    assert [each["open"] for each in told] == [told[0]["open"]] * 2
    assert next(local.living(place.directory)).pid == worker.pid
    os.kill(worker.pid, signal.SIGKILL)
    until("it ends with the worker", lambda: not _words(rank))


def test_spares_that_are_of_no_use_are_replaced_by_processes(tmp_path: Path) -> None:
    told = _python(
        "import os, signal, sys; from daemons.template import spares\n"
        "spares.fork([sys.executable, '-P', '-m', 'daemons.worker', '.', 'x', '1', ''], 2)\n"
        "os.kill(spares._spares[0][0], signal.SIGKILL)\n"
        "os.waitid(os.P_PID, spares._spares[0][0], os.WEXITED | os.WNOWAIT)\n"
        "for words in ['killed'], ['too long' * 999]:\n"
        "    argv = [sys.executable, '-c', 'import sys; print(len(sys.argv[1]))', *words]\n"
        "    rank = spares.start_rank(argv, pass_fds=(), is_piped=True)\n"
        "    print(type(rank).__name__, int(rank.stdout.read()), rank.wait())\n"
    )
    assert told == "Popen 6 0\nPopen 7992 0\n"


@pytest.mark.long
def test_servers_have_a_template_without_torch(place: Place) -> None:
    place.use(JOB, base.SERVER)
    forked = place.fork("server-0")
    found = [daemon[:4] for daemon in local.living(place.directory)]
    assert found == [("server", "server-0", 1, forked.pid)]
    until("it has a log", lambda: place.log("server-0"))
    maps = Path(f"/proc/{forked.pid}/maps").read_text()
    assert "numpy" in maps
    assert "torch" not in maps


@pytest.mark.long
def test_workers_outlive_the_template_and_the_next_one_forks(place: Place) -> None:
    first = place.fork("worker-0")
    process = place.template._process
    assert process is not None
    process.kill()
    place.await_template()
    until("there is another one", lambda: place.template._process not in (None, process))
    place.await_template()
    place.fork("worker-1")
    assert len([*local.living(place.directory)]) == 2
    os.kill(first.pid, signal.SIGSEGV)
    assert first.wait() == -signal.SIGSEGV, "the agent gets what another process has forked"


@pytest.mark.long
def test_a_template_that_hangs_is_replaced_and_has_no_worker(place: Place) -> None:
    process = place.template._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert place.ask("worker-0") is None
    assert process.returncode == -signal.SIGKILL
    assert place.template.is_loading
    assert not [*local.living(place.directory)]


def test_a_variable_that_came_too_late_for_an_import_is_no_work_for_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.template.begin()
    monkeypatch.setenv("KMP_AFFINITY", "disabled")
    assert place.ask("worker-0") is None
    assert place.template.fd == -1
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.parametrize("why", ["it is switched off", "the script may set variables"])
def test_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    place = Place(tmp_path)
    if why.startswith("the script"):
        place.write("import os; os.environ['OMP_NUM_THREADS'] = '1'; import torch")
    else:
        monkeypatch.setenv(SWITCH, "1")
    place.template = Template(place.directory, "agent-0")
    place.begin()
    assert place.template.fd == -1
    assert place.ask("worker-0") is None


def _python(code: str, *words: str) -> str:
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
         "thread"),
        ("raise OSError('torn')", "torn"),
        ("x = 1", ""),
    ],
)  # fmt: skip
def test_a_process_in_which_more_runs_than_imports_does_not_fork(
    tmp_path: Path, module: str, refused: str
) -> None:
    (tmp_path / "imported.py").write_text(module)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from daemons.template.__main__ import prepare\n"
        "print(prepare(['imported']), flush=True); os._exit(0)"
    )
    said = _python(code, str(tmp_path)).strip()
    assert refused in said
    assert bool(refused) == bool(said)


def test_a_thread_that_runs_before_all_imports_is_one_that_no_fork_copies() -> None:
    """As of a sitecustomize: a profiler's, say."""
    code = (
        "import os, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "from daemons.template.__main__ import prepare\n"
        "print(prepare(['json']), flush=True); os._exit(0)"
    )
    assert "sitecustomize" in _python(code)


def test_a_process_whose_imports_have_opened_a_gpu_does_not_fork(tmp_path: Path) -> None:
    """A file in place of /dev/nvidia0: no context of CUDA survives a fork."""
    device = tmp_path / "nvidia0"
    device.touch()
    (tmp_path / "imported.py").write_text(f"held = open({str(device)!r})")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from daemons.template import running\n"
        "from daemons.template.__main__ import prepare\n"
        "running._GPUS = (sys.argv[1] + '/nvidia',)\n"
        "print([prepare([name]) for name in ('json', 'imported')])"
    )
    assert _python(code, str(tmp_path)) == "['', 'an import has opened a GPU']\n"


def test_a_process_changes_its_command_line_if_the_new_one_fits() -> None:
    code = (
        "import os; from daemons.template.command_line import rewrite\n"
        "from dlctl.util import processes\n"
        "me = os.getpid(), processes.start_of(os.getpid())\n"
        "print(rewrite(['zwölf', 'a b']), processes.command_line(*me), rewrite(['x' * 9999]))"
    )
    assert _python(code, "-" * 64) == "True ['zwölf', 'a b'] False\n"


def test_what_differs_between_workers_is_all_that_the_template_lacks(tmp_path: Path) -> None:
    one, two = (base.environment("worker", tmp_path, f"worker-{n}", n + 1) for n in range(2))
    assert {name for name, _ in one.items() ^ two.items()} == {*PER_DAEMON}
