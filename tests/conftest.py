"""Shared by all tests: run directories made by hand, with a real database and real files."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import fork_server
import golden as golden_files
import oracles
import per_commit
import pytest
from hypothesis import HealthCheck, settings
from surroundings import Surroundings
from workplace import Workplace
from xdist.scheduler import LoadScopeScheduling

from dlctl.job import config
from dlctl.runs import paths
from dlctl.runs.database import RunDb

# Methods from outside are installed here: whatever goes over the registry meets them, too.
sys.path.insert(0, str(Path(__file__).parent / "toys"))
# Torch is imported later: the threads of its pool would only wait for each other's cores here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in a daemon (`daemons.process`): what tests have left may not be collected in a forked child.
os.register_at_fork(after_in_child=gc.freeze)
BEFORE = pytest.StashKey[Surroundings]()
"""Of the tests so far."""
START = 1_750_000_000.0
"""A time in June 2025, in seconds since 1970."""
LONGEST_FIRST = ("sim", "integ", "attach", "cli", "daemons")
ONE_BY_ONE = (
    "test_killed_daemons.py",
    "test_stop_and_resume.py",
    "test_recovery.py",
    "test_environment_faults.py",
    "test_loops_against_tasks.py",
    "test_killed_scripts.py",
    "test_ended_scripts.py",
)
"""Files whose tests share nothing and take long: each of them may run anywhere."""


# Few examples, and the same ones every time, however slow the machine is just then; in the long run
# many, which are others each time: what has failed is printed as a line that does so again.
settings.register_profile(
    "few",
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "many", settings.get_profile("few"), max_examples=500, derandomize=False, print_blob=True
)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(golden_files.UPDATE, action="store_true", help="write the golden files")


def pytest_configure() -> None:
    """Ctrl-C is tried on commands: a shell that has us in the background has it ignored."""
    gc.disable()  # Modules and tests stay: each collection would look at all of them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_server.allow()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, for no core is to wait for the last of it: the simulator,
    whole runs, commands and daemons; and of them the files that stay together, as their tests
    share what they have set up.
    """
    per_commit.leave_the_others(items)

    def folder(item: pytest.Item) -> int:
        of = item.nodeid.split("/")[1]
        return LONGEST_FIRST.index(of) if of in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=lambda item: (folder(item), item.path.name in ONE_BY_ONE))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    if BEFORE not in item.config.stash:
        item.config.stash[BEFORE] = Surroundings.now()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """A test that leaves something changed, which those after it meet, fails itself."""
    try:
        yield
    finally:
        before, now = item.config.stash[BEFORE], Surroundings.now()
        if changes := before.left_changed(now):
            before.restore(now)
    if changes:
        pytest.fail(f"the test has left changed: {'; '.join(changes)}", pytrace=False)


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The tests of a file run in one process, but for those of `ONE_BY_ONE`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).name in ONE_BY_ONE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> golden_files.Golden:
    """Compares a whole screen with a file: `golden("status", out)`; see `golden.py`."""
    return golden_files.Golden(
        request.path.parent / "golden",
        is_updated=golden_files.may_update(request.config.getoption(golden_files.UPDATE)),
        names={str(tmp_path / "home"): "~", str(tmp_path): "/tmp"},
    )


@pytest.fixture
def agree(request: pytest.FixtureRequest) -> oracles.Agree:
    """Compares what a method comes to with what the oracle of this test's marker does."""
    return oracles.Agree(request.node)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """`make oracles` runs their tests alone, and prints what they have found."""
    if config.option.markexpr != oracles.MARK:
        return
    stats = terminalreporter.stats
    terminalreporter.section("oracles")
    for line in oracles.table([*stats.get("passed", ()), *stats.get("failed", ())]):
        terminalreporter.write_line(line)


@pytest.fixture
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State, sockets and the current directory of this test alone; returns the latter."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("DLCTL_JOB", raising=False)
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


class RunDirectory:
    """One run, as the coordinator would have written it. `run` and `daemon` change its database."""

    def __init__(self, path: Path, job: config.JobFile) -> None:
        self.path = path
        (path / "logs").mkdir(parents=True)
        (path / "job.json").write_text(json.dumps(config.to_dict(job)))
        self.db = RunDb(path, create=True)
        self.run(run_id=path.name, name=job.job.name, algorithm=job.algorithm.name, state="stopped")
        paths.register(path)

    def run(self, **values: Any) -> RunDirectory:
        self.db.put_run(**values)
        self.db.commit()
        return self

    def daemon(self, name: str, **values: Any) -> RunDirectory:
        row = {"name": name, "role": name.partition("-")[0], "state": "running", **values}
        self.db.put_daemon(name, row)
        self.db.commit()
        return self

    def problem(
        self, code: str, daemon: str, since: float | None = None, **facts: Any
    ) -> RunDirectory:
        """One more of those that the coordinator has found."""
        found = self.db.run().get("problems", [])
        row = {"code": code, "daemon": daemon, "since": since, "facts": facts}
        return self.run(problems=[*found, row])

    def event(self, at: float, kind: str, daemon: str, text: str, **data: Any) -> RunDirectory:
        self.db.add_event(at, kind, daemon, text, data)
        self.db.commit()
        return self

    def log(
        self, name: str, incarnation: int, *lines: dict[str, Any] | str, suffix: str = ""
    ) -> Path:
        """Add lines to a log file: objects as JSON, text as it is."""
        path = self.path / "logs" / f"{name}.{incarnation}.jsonl{suffix}"
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            for line in lines:
                file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
        return path


class Ended(NamedTuple):
    """How a command has ended."""

    code: int
    out: str
    err: str

    @property
    def where(self) -> str:
        """The place of its error: a file, a line, a daemon."""
        return _after(self.err, r"  --> ")

    @property
    def next(self) -> str:
        """The next command, or its first line."""
        return _after(self.err + self.out, r" *next:? +")

    @property
    def rows(self) -> dict[str, str]:
        """The values of lines such as "  checkpoint  step 90, 41s ago"."""
        return dict(re.findall(r"^[! ] ([a-z]\S*) {2,}(\S.*)$", self.out + self.err, re.MULTILINE))


def _after(text: str, mark: str) -> str:
    found = re.search(rf"^{mark}(.*)$", text, re.MULTILINE)
    return found.group(1) if found else ""


@pytest.fixture
def dlctl_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """Runs one command line in this process: `dlctl_command("status", "--json").out`. Processes
    that it starts are forked as those of the commands of a workplace are.
    """
    from dlctl.cli import app

    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)

    def command(*arguments: str) -> Ended:
        code = app.run(list(arguments))
        return Ended(code, *capsys.readouterr())

    return command


@pytest.fixture
def command_at(
    dlctl_command: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """The same in a workplace, for commands that start no daemon: their own processes would mostly
    import what is there already. `command_at(place, "status", "--json").out`.
    """

    def command(place: Workplace, *arguments: str) -> Ended:
        monkeypatch.chdir(place.path)
        monkeypatch.delenv("DLCTL_JOB", raising=False)
        for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
            monkeypatch.setenv(variable, place.env[variable])
        return dlctl_command(*arguments)

    return command


@pytest.fixture
def run_directory(own_place: Path):
    """Makes run directories under ./runs: `run_directory("digits-7f3a", servers=2, workers=3)`."""
    made: list[RunDirectory] = []

    def make(run_id: str = "digits-7f3a", servers: int = 1, workers: int = 2) -> RunDirectory:
        job = config.JobFile(
            job=config.Job(name=run_id.rpartition("-")[0], task="train.py:task"),
            servers=config.Servers(count=servers),
            workers=config.Workers(count=workers),
        )
        made.append(RunDirectory(own_place / "runs" / run_id, job))
        return made[-1]

    yield make
    for directory in made:
        directory.db.close()
