"""What every launcher of the registry must do; a new name gets all of these tests.

Their agents are real processes. ssh and Slurm are pretended (`tests/kit/fake_launchers.py`): the
launchers use them as they use the real ones.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import fake_launchers
import psutil
import pytest

from dlctl import jobfile, registry
from dlctl.errors import Unreachable, UsageError
from dlctl.job import config, placement
from dlctl.job.config import Host, JobFile
from dlctl.launch import base, launcher, remote
from dlctl.launch.launcher import Launcher
from dlctl.runs.database import RunDb
from dlctl.util.keydocs import keys

ROOT = Path(__file__).parents[2]
NAMES = registry.names("launchers")
EXAMPLES: dict[str, tuple[str, str]] = {
    "local": ("", ""),
    "ssh": ("", '[[hosts]]\nssh = "h1"\ndir = "{0}/h1"\n[[hosts]]\nssh = "h2"\ndir = "{0}/h2"\n'),
    "slurm": ('nodes = 2\ndir = "{0}/orders"\nscratch = "{0}/nodes"\n', ""),
    "toy-boxes": ('boxes = 2\ndirectory = "{0}/boxes"\n', ""),
    "toy-tied": ('boxes = 2\ndirectory = "{0}/boxes"\n', ""),
}
"""Name -> its keys of [launcher], and the hosts, for two hosts; {0} is a directory."""
RUN_ID = "digits-7f3a"
TURN_S = 30.0
every = pytest.mark.parametrize("name", NAMES)
every_other = pytest.mark.parametrize("name", [name for name in NAMES if name != "toy-tied"])
"""toy-tied runs what toy-boxes runs, and only declares something else."""
every_command = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "toy-boxes"))
        for name in NAMES
        if name != "toy-tied"
    ],
)
"""The boxes are reached as hosts are by ssh: one test of their processes is for every commit."""


class Place(NamedTuple):
    """A job with two hosts in a directory of its own, of which nobody leads the run."""

    path: Path
    run: Path
    job: JobFile

    @property
    def hosts(self) -> dict[str, Host]:
        """Those of its launcher."""
        found = placement.agents(self.job.places)
        others = {name: host for name, host in found.items() if host.is_other}
        return others or found

    @property
    def launcher(self) -> Launcher:
        return launcher.of(self.job)


def load(path: Path, name: str) -> JobFile:
    options, hosts = (part.format(path) for part in EXAMPLES[name])
    head = '[job]\nname = "digits"\ntask = "train.py:task"\n[network]\ntransport = "tcp"\n'
    (path / "train.py").write_text("task = 1\n")
    (path / "job.toml").write_text(f'{head}[launcher]\nname = "{name}"\n{options}{hosts}')
    return jobfile.load(path / "job.toml")


@pytest.fixture
def place(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="dlctl-"))  # Short, because paths of sockets must be.
    (path / "x").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path / "x"))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    monkeypatch.setenv("DLCTL_SPAWN", "1")  # No worker is wanted of these agents, nor a template.
    # An agent beside the coordinator would start one.
    code = idle_agents(path) if name == "local" else ROOT
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (code, ROOT / "tests" / "toys"))))
    monkeypatch.setenv("PATH", f"{fake_launchers.install(path)}:{os.environ['PATH']}")
    job = load(path, name)
    run = path / "runs" / RUN_ID
    run.mkdir(parents=True)
    (run / "job.json").write_text(json.dumps(config.to_dict(job)))
    with closing(RunDb(run, create=True)) as db:
        db.put_run(job_file=str(path / "job.toml"))
        db.commit()
    yield Place(path, run, job)
    left = processes(path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path)
    assert left == {}


def idle_agents(path: Path) -> Path:
    """Where Python finds agents that only say that they are there."""
    package = path / "code" / "daemons"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "agent.py").write_text("print('starts, pid')\nimport signal\nsignal.pause()\n")
    return package.parent


def processes(path: Path, module: str = "") -> dict[int, list[str]]:
    """Processes of this place: with its path, and this module, in their command lines."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(str(path) in word for word in words[1:]) and (not module or module in words):
            found[process.pid] = words
    return found


def agents(place: Place) -> dict[str, tuple[int, int]]:
    """The running agents: name -> incarnation and pid."""
    there = processes(place.path, "daemons.agent")
    return {words[-3]: (int(words[-2]), pid) for pid, words in there.items()}


@pytest.fixture
def control() -> Iterator[str]:
    """The address of a coordinator that lets everybody connect, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


class Coordinator:
    """The loop of one, and what it has been told."""

    def __init__(self, place: Place, control: str) -> None:
        self.news: list[base.News] = []
        self.is_closed = False
        self._place, self._control = place, control
        self.watched: dict[int, Callable[[], None]] = {}
        own = place.launcher
        self.agents = own.agents(place.run, place.hosts, self, self.news.append)

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        self.watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        del self.watched[fd]

    def start(self, name: str, incarnation: int) -> None:
        self.agents.start(base.StartOrder(name, incarnation, self._control, base.NO_CREDENTIALS))

    def until(self, condition: Callable[[], Any]) -> None:
        """Turn until it is true."""
        deadline = time.monotonic() + TURN_S
        while not condition():
            assert time.monotonic() < deadline, self.news
            for fd in select.select([*self.watched], [], [], 0.1)[0]:
                if fd in self.watched:
                    self.watched[fd]()
            if not self.is_closed:
                self.agents.look()

    def ended(self) -> list[tuple[str, int]]:
        return [(n.name, n.incarnation) for n in self.news if isinstance(n, base.Ended)]


def incarnations(found: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    return {name: incarnation for name, (incarnation, _) in found.items()}


# ---------------------------------------------------------------- declarations


def test_no_launcher_is_mentioned_outside_of_its_own_modules() -> None:
    """Whoever wants to know something asks its declaration."""
    schema = {"dlctl/registry.py", "dlctl/job/config.py"}
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("dlctl", "daemons")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if path.parent != ROOT / "dlctl" / "launch"
    }
    found = {file for file, text in texts.items() if re.search("slurm", text, re.IGNORECASE)}
    assert found <= schema
    names = re.compile(r"""launcher(\.name)?\s*[=!]=\s*["']""")
    assert [file for file, text in texts.items() if names.search(text)] == []


@every
def test_its_declarations_are_whole_and_its_keys_are_documented(name: str) -> None:
    kind = launcher.load(name)
    assert {key.name for key in keys(kind.Options) if not key.text} == set()
    assert [getattr(kind, key) for key in ("title", "noun")].count("") == 0
    for ability in ("takes_hosts", "can_ask", "outlives", "is_reclaimed", "copies_files"):
        assert type(getattr(kind, ability)) is bool
        assert (name in launcher.that_have(ability)) == getattr(kind, ability)


@every
def test_its_hosts_are_those_listed_or_its_own_and_each_gets_an_agent(
    name: str, tmp_path: Path
) -> None:
    job = load(tmp_path, name)
    own = launcher.of(job)
    assert not (own.takes_hosts and job.launcher.places)
    others = [host for host in placement.agents(job.places).values() if host.is_other]
    assert len(others) == (0 if name == "local" else 2)
    assert job.has_other_hosts == bool(others)
    for host in others:
        assert own.folder(host)
    assert config.of_stored(json.loads(json.dumps(config.to_dict(job)))) == job
    assert {key.name for key in fields(own.options)} == job.launcher.options.keys()
    assert [*own.check(), *own.warnings()] == []


# ---------------------------------------------------------------- agents


@every_other
def test_an_agent_is_started_killed_alone_told_once_and_replaced(
    name: str, place: Place, control: str
) -> None:
    ours, names = Coordinator(place, control), [*place.hosts]
    begin(place, ours)
    first = agents(place)
    ours.agents.kill(names[0])
    ours.until(lambda: ours.ended() == [(names[0], 1)])
    assert incarnations(agents(place)) == dict.fromkeys(names[1:], 1)
    for agent in names:  # All others are still running: they are killed first.
        ours.start(agent, 2)
    ours.until(lambda: incarnations(agents(place)) == dict.fromkeys(names, 2))
    assert not {*first.values()} & {*agents(place).values()}
    assert [each for each in ours.ended() if each[1] == 2] == []
    finish(place, ours)


@every_command
def test_the_next_coordinator_can_kill_what_the_last_one_has_started(
    name: str, place: Place, control: str
) -> None:
    assert place.launcher.outlives
    before, names = Coordinator(place, control), [*place.hosts]
    begin(place, before)
    before.until(lambda: name == "local" or not before.watched)  # Nothing is under way.
    there = agents(place)
    ours = Coordinator(place, control)
    adopted = ours.agents.adopt(dict.fromkeys(names, 1))
    assert adopted.items() <= dict.fromkeys(names, 1).items()
    assert agents(place) == there, "to look at them does nothing to them"
    ours.agents.kill(names[-1])
    ours.until(lambda: ours.ended() == [(names[-1], 1)])
    assert agents(place).keys() == {*names[:-1]}
    finish(place, ours)
    before.until(lambda: not before.watched)


@every_command
def test_whoever_can_be_asked_says_what_is_there(name: str, place: Place, control: str) -> None:
    own = place.launcher
    own.preflight()
    if not own.can_ask:
        return
    assert own.an_address(place.job.places) == "127.0.0.1"
    ours = Coordinator(place, control)
    begin(place, ours)
    found = own.ask(place.hosts, remote.look_request(RUN_ID), TURN_S)
    assert found.keys() == place.hosts.keys()
    for agent, answer in found.items():
        assert answer.host == place.hosts[agent].name
        assert answer.value is not None
        assert [row["name"] for row in answer.value["daemons"]] == [agent]
    refused = own.ask(place.hosts, {"verb": "purge"}, TURN_S)
    assert {type(own.explain(answer)) for answer in refused.values()} == {UsageError}
    for host in place.hosts.values():
        with closing(own.session(host)) as session:
            assert session.ask({"verb": "hello"}, TURN_S)["at"] > 0
    finish(place, ours)


@every_command
def test_an_agent_that_cannot_reach_its_coordinator_is_told_with_the_reason(
    name: str, place: Place
) -> None:
    if not place.launcher.copies_files:
        return  # It has the files of the run, and finds its coordinator by them.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ours, (first, *_) = Coordinator(place, f"tcp://127.0.0.1:{port}"), place.hosts
    ours.start(first, 1)
    ours.until(lambda: ours.ended() == [(first, 1)])
    (ended,) = [news for news in ours.news if isinstance(news, base.Ended)]
    assert ended.status == Unreachable.exit_code
    assert f"tcp://127.0.0.1:{port}" in str(ended.error)
    finish(place, ours)


def begin(place: Place, ours: Coordinator) -> None:
    """Start all agents; returns when they are up, and nobody is starting any."""
    for agent in place.hosts:
        ours.start(agent, 1)
    ours.until(lambda: incarnations(agents(place)) == dict.fromkeys(place.hosts, 1))
    for agent in place.hosts:
        log = f"logs/{agent}.1.jsonl"
        ours.until(lambda log=log: any("starts, pid" in p.read_text() for p in logs(place, log)))


def logs(place: Place, name: str) -> list[Path]:
    return [path for path in place.path.rglob("*.jsonl") if str(path).endswith(name)]


def finish(place: Place, ours: Coordinator) -> None:
    """End the run: nothing is left, and who ends it once more finds nothing."""
    for agent in agents(place):
        ours.agents.kill(agent)
    ours.until(lambda: agents(place) == {} and not ours.watched)
    ours.agents.close()
    ours.is_closed = True
    own = place.launcher
    for left in own.end(place.run, place.hosts, 1.0, purge=True):
        assert (left.error, left.may_run) == (None, False)
    assert not any(left.done for left in own.end(place.run, place.hosts, 0.0, purge=True))
    assert own.held(place.run) == ""
    ours.until(lambda: not processes(place.path))
    kept = {place.path, *place.run.rglob("*")}
    sent = [path for path in place.path.rglob("train.py") if not {path.parent, path} & kept]
    assert sent == [], "no file of the task is left on a host"
