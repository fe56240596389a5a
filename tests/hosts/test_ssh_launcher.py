"""Agents on other machines: real ones, placed over a real ssh, and known by their messages."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import zmq

from daemons import process
from daemons.coordinator.agents import Agents
from daemons.loop import Loop
from daemons.transport.sockets import Transport
from dlctl.control.keys import CurveKeys
from dlctl.errors import DlctlError, NotPermitted, Unreachable, VersionMismatch
from dlctl.job import config
from dlctl.job.config import Host
from dlctl.launch import answers, base, calls, launcher, remote, sshwords
from dlctl.launch.answers import CallResult
from dlctl.roles.coordinator.records import KillAgent, LaunchAgent
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import ProcessEnded
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.runs.database import RunDb
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Event, Exit, Peer, Received, Send, Started, StopRequested
from dlctl.wire.messages import Register

from .cluster import Cluster
from .network import LAB_ADDRESS
from .waiting import until

pytestmark = pytest.mark.root

SSH = launcher.made("ssh", {})
KEYS = CurveKeys(b"k" * 32)
RUN_ID, AGENT, SERVER, WORKER = "digits-7f3a", "agent-1", "server-0", "worker-0"
H1 = {AGENT: Host(ssh="h1")}
ASK_S, HEAR_S = 30.0, 20.0
FILES = ("root", "tmp", "run", "var/tmp", "dev/shm", "home")
"""Where a host has files of its own; what it has in /etc is in /run, too."""
NASTY = [
    "a b", " ", "'", '"', "it's", "a\nb", "$HOME", "$(id)", "`id`", "a;id", "*", "~", "\\", "\t",
    "-v", "--", "&&", "|", ">x", "!!", "#", "é\u202e", "\udcff", "%s",
]  # fmt: skip
WAITING = """#!/bin/sh
if [ ! -e ~/here ]; then
    touch ~/here
    while [ ! -e ~/go ]; do sleep 0.02; done
    rm ~/here
fi
exec {python} "$@"
"""
M = TypeVar("M", bound=m.Message)
T = TypeVar("T")


class Lab:
    """The machine of the coordinator: ssh and sockets of this process are in its network."""

    def __init__(self, cluster: Cluster, thread: ThreadPoolExecutor, path: Path) -> None:
        self.cluster, self.path = cluster, path
        self._thread = thread

    def do(self, function: Callable[..., T], *arguments: Any) -> T:
        return self.begin_to(function, *arguments).result()

    def begin_to(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._thread.submit(function, *arguments)

    def ask(self, hosts: dict[str, Host], request: dict[str, Any]) -> dict[str, CallResult]:
        return self.do(SSH.ask, hosts, request, ASK_S)

    def run(self, hosts: list[Host]) -> Path:
        """A run directory whose agents have been asked for nothing yet."""
        home = self.path / "experiment"
        home.mkdir()
        (home / "train.py").write_text("from nets.small import task\n")
        (home / "nets").mkdir()
        (home / "nets" / "small.py").write_text("task = None\n")
        directory = home / "runs" / RUN_ID
        directory.mkdir(parents=True)
        job = config.JobFile(
            job=config.Job(name="digits", task=str(home / "train.py") + ":task"),
            network=config.Network(transport="tcp"),
            hosts=tuple(hosts),
            launcher=config.Launch(name="ssh"),
        )
        (directory / "job.json").write_text(json.dumps(config.to_dict(job)))
        with closing(RunDb(directory, create=True)) as db:
            db.put_run(job_file=str(home / "job.toml"))
            db.commit()
        return directory

    def begin(self, order: base.StartOrder, host: Host, directory: Path) -> CallResult:
        shared = remote.shared_request(directory)
        request = {**remote.begin_request(shared, order), "dir": host.dir}
        call = self.do(SSH.call, host, request, ASK_S)
        return self.do(calls.wait_for, {"": call})[""]

    def slow_python(self, host: str) -> Path:
        """Make ~/slow there, which touches `here` and waits for `go` before it is Python; only one
        waits at a time. Returns the home directory.
        """
        home = self.cluster.files(host) / "root"
        (home / "slow").write_text(WAITING.format(python=self.cluster.python))
        (home / "slow").chmod(0o755)
        return home

    def calls(self) -> set[int]:
        return {p.pid for p in self.cluster.processes("lab") if p.name() == "ssh"}

    def agents(self, host: str = "h1") -> list[psutil.Process]:
        found = self.cluster.processes(host)
        return [p for p in found if "daemons.agent" in p.cmdline()]


@pytest.fixture
def lab(shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    yield from _lab(shared_cluster, tmp_path, monkeypatch)


@pytest.fixture
def broken_lab(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """With hosts of its own, to be set up wrongly."""
    yield from _lab(cluster, tmp_path, monkeypatch)


def _lab(cluster: Cluster, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Connections of ssh are shared within one test only."""
    runtime = cluster.directory / f"run{len(os.listdir(cluster.directory))}"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PATH", cluster.env["PATH"])
    with cluster.thread() as thread:
        yield Lab(cluster, thread, path)
    for connection in cluster.processes("lab"):
        connection.kill()


class Desk:
    """The coordinator's socket in the lab, and the keys of those who may come to it."""

    def __init__(self, lab: Lab) -> None:
        self.poller = zmq.Poller()
        self.transport = Transport(self.poller, KEYS.secret(COORDINATOR))
        self.control = lab.do(self.transport.listen, f"tcp://{LAB_ADDRESS}:*")
        self.transport.admit({KEYS.public(name): name for name in (AGENT, SERVER)})

    def hear(
        self, kind: type[M], what: Callable[[M], bool] = lambda _: True
    ) -> tuple[Peer, M, str]:
        """The next message of a kind; others are dropped. Raises TimeoutError."""
        deadline = time.monotonic() + HEAR_S
        while (left_s := deadline - time.monotonic()) > 0:
            for source, _ in self.poller.poll(left_s * 1000):
                for came in self.transport.receive(source):
                    if isinstance(came.message, kind) and what(came.message):
                        return came.peer, came.message, came.identity
        raise TimeoutError(f"no {kind.__name__} came")

    def welcome(self, name: str) -> tuple[Peer, m.Register]:
        peer, register, identity = self.hear(m.Register, lambda message: message.name == name)
        assert identity == name
        self.transport.send(peer, m.Welcome(name, 0, 1, b"", {}))
        return peer, register

    def order(self, incarnation: int) -> base.StartOrder:
        credentials = base.Credentials(KEYS.secret(AGENT), KEYS.public(COORDINATOR))
        return base.StartOrder(AGENT, incarnation, self.control, credentials)


@pytest.fixture
def context(lab: Lab) -> Iterator[Desk]:
    context = Desk(lab)
    yield context
    context.transport.close()


def secrets_in(cluster: Cluster, host: str) -> list[str]:
    """Where on a host there is any secret key of this run."""
    known = [KEYS.secret(name).encode() for name in (AGENT, SERVER, WORKER, COORDINATOR)]
    found = []
    for each in cluster.processes(host):
        for name in ("cmdline", "environ"):
            data = Path(f"/proc/{each.pid}/{name}").read_bytes()
            found += [f"{name} of {each.pid}" for key in known if key in data]
    return found + [str(path) for path in files_of(cluster, host) if _has(path, known)]


def files_of(cluster: Cluster, host: str) -> list[Path]:
    """None of those that it has from this machine, read-only: they are on another file system."""
    found = []
    for top in FILES:
        root = cluster.files(host) / top
        own = root.stat().st_dev
        for place, folders, names in os.walk(root):
            folders[:] = [name for name in folders if os.lstat(f"{place}/{name}").st_dev == own]
            found += [Path(place, name) for name in names]
    return [path for path in found if stat.S_ISREG(path.lstat().st_mode)]


def _has(path: Path, known: list[bytes]) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return any(key in data for key in known)


# ---------------------------------------------------------------- an agent on another machine


def test_an_agent_on_another_host_works_without_its_connection_and_can_be_replaced_and_ended(
    lab: Lab, context: Desk
) -> None:
    cluster, directory = lab.cluster, lab.run([Host(ssh="h1")])
    before = set(files_of(cluster, "h1"))

    first = answers.value_of(lab.begin(context.order(1), Host(ssh="h1"), directory))
    peer, register = context.welcome(AGENT)
    assert (register.host, register.run_id, register.incarnation) == ("h1", RUN_ID, 1)
    assert register.pid == first["pid"]

    # ssh is gone, its shared connection too; the agent starts a server all the same.
    for connection in cluster.processes("lab"):
        connection.kill()
    context.transport.send(peer, m.Spawn(SERVER, "server", 1, KEYS.secret(SERVER)))
    _, spawned, _ = context.hear(m.Spawned)
    _, at_work = context.welcome(SERVER)
    assert (at_work.host, at_work.pid, at_work.run_id) == ("h1", spawned.pid, RUN_ID)
    assert secrets_in(cluster, "h1") == []
    planted = cluster.files("h1") / "tmp" / "planted"
    planted.write_text(f"x{KEYS.secret(SERVER)}x")
    assert secrets_in(cluster, "h1") == [str(planted)]  # It would have been found.
    planted.unlink()

    # Another agent takes the place of the first one, and what that has started lives on.
    second = answers.value_of(lab.begin(context.order(2), Host(ssh="h1"), directory))
    assert [each.is_running() for each in lab.agents()] == [True]
    context.welcome(AGENT)
    adopted = context.hear(m.Report, lambda message: message.incarnation == 2)[1].metrics[
        "children"
    ]
    assert adopted == {SERVER: 1}

    # It has the files of the run there, and nobody else may enter; neither database nor key.
    there = cluster.files("h1") / second["directory"][1:]
    job = json.loads((there / "job.json").read_text())
    assert job["job"]["task"] == f"{second['directory']}/task/train.py:task"
    assert (there / "task" / "nets" / "small.py").read_text() == "task = None\n"
    modes = [stat.S_IMODE(p.lstat().st_mode) for p in (there, there.parent, there.parents[1])]
    assert modes == [0o700] * 3
    assert sorted(p.name for p in there.iterdir()) == ["host.json", "job.json", "logs", "task"]

    seen = answers.value_of(lab.ask(H1, remote.look_request(RUN_ID))[AGENT])
    assert {(d["name"], d["pid"]) for d in seen["daemons"]} == {
        (AGENT, second["pid"]),
        (SERVER, spawned.pid),
    }
    assert first["directory"] == second["directory"]

    done = answers.value_of(lab.ask(H1, remote.end_request(RUN_ID, grace_s=5, purge=True))[AGENT])
    assert sorted(done["ended"]) == [AGENT, SERVER]
    assert done["left"] == []
    again = answers.value_of(lab.ask(H1, remote.end_request(RUN_ID, purge=True))[AGENT])
    assert again == {"ended": [], "left": []}
    assert cluster.processes("h1") == []
    assert set(files_of(cluster, "h1")) == before


class Story:
    """A machine that wants some effects, and then what each event makes of it until the end."""

    def __init__(self, first: list[Effect], then: Callable[[Event], list[Effect]]) -> None:
        self.first, self.then = first, then
        self.until = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Started):
            self.until = now + HEAR_S
            return self.first
        return self.then(event) if now < self.until else [Exit(1, "too late")]

    def deadline(self) -> float | None:
        return self.until


def serve(lab: Lab, directory: Path, then: Callable[[Event], list[Effect]], *first: Effect) -> int:
    """A loop with the coordinator's agents, in the lab, until the story exits."""
    loop = Loop(secret=KEYS.secret(COORDINATOR))
    control = loop.transport.listen(f"tcp://{LAB_ADDRESS}:*")
    loop.transport.admit({KEYS.public(name): name for name in (AGENT, SERVER)})
    agents_of(directory, loop, control)
    return loop.run(Story([*first], then))


def agents_of(directory: Path, loop: Loop, control: str) -> Agents:
    job = process.read_job(directory)
    handler = logging.NullHandler()
    registration = Register(RUN_ID, COORDINATOR, COORDINATOR, 1, os.getpid(), "lab", "")
    context = process.DaemonContext(directory, "", registration, job, base.NO_CREDENTIALS, handler)  # type: ignore[arg-type]
    agents = Agents(context, loop, control, KEYS.public(COORDINATOR))
    with closing(RunDb(directory, readonly=True)) as db:
        assert agents.adopt(db) == {}
    return agents


@pytest.mark.long
def test_the_coordinator_places_an_agent_and_kills_it_alone(lab: Lab) -> None:
    directory = lab.run([Host(ssh="h1")])
    ends: list[m.ProcessExited] = []

    def then(event: Event) -> list[Effect]:
        match event:
            case Received(peer, m.Register(name=name)) if name == AGENT:
                spawn = m.Spawn(SERVER, "server", 1, KEYS.secret(SERVER))
                return [Send(peer, m.Welcome(AGENT, 0, 1, b"", {})), Send(peer, spawn)]
            case Received(_, m.Register()):
                return [KillAgent(AGENT)]
            case ProcessEnded(exited):
                ends.append(exited)
                return [Exit(0, "it is known")]
        return []

    launch = LaunchAgent(AGENT, 1, KEYS.secret(AGENT))
    try:
        assert lab.do(serve, lab, directory, then, launch) == 0
        assert ends == [m.ProcessExited(AGENT, 1, STATUS_UNKNOWN, ())]
        # The agent's template dies with it, a moment later.
        until("one is left", lambda: len(lab.cluster.processes("h1")) == 1, HEAR_S)
        (alive,) = lab.cluster.processes("h1")
        assert "daemons.server" in alive.cmdline()
        seen = answers.value_of(lab.ask(H1, remote.look_request(RUN_ID))[AGENT])
        assert [daemon["name"] for daemon in seen["daemons"]] == [SERVER]
    finally:
        done = answers.value_of(lab.ask(H1, remote.end_request(RUN_ID, purge=True))[AGENT])
    assert done["ended"] == [SERVER]
    assert lab.cluster.processes("h1") == []


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [True, False], ids=["it is killed", "the run ends"])
def test_an_agent_that_is_just_being_started_is_not_left_there(lab: Lab, is_killed: bool) -> None:
    home = lab.slow_python("h1")
    loop, directory = Loop(), lab.run([Host(ssh="h1", python="~/slow")])
    # Somebody who is there also when the loop has ended: an agent that is begun then would stay.
    with lab.do(socket.create_server, (LAB_ADDRESS, 0)) as server:
        is_told = threading.Event()
        agents = agents_of(directory, loop, f"tcp://{LAB_ADDRESS}:{server.getsockname()[1]}")

        def then(event: Event) -> list[Effect]:
            match event:
                case StopRequested("SIGINT"):
                    return [KillAgent(AGENT)]
                case StopRequested("SIGUSR1"):
                    is_told.set()
                case StopRequested() | ProcessEnded():
                    return [Exit(0, "it is over")]
            return []

        launch = LaunchAgent(AGENT, 1, KEYS.secret(AGENT))
        running = lab.begin_to(loop.run, Story([launch], then))
        until("it is being started", (home / "here").exists, HEAR_S)
        calls = lab.calls()
        for signal in ("SIGINT", "SIGUSR1") if is_killed else ("SIGTERM",):
            loop.post(StopRequested(signal))
        if is_killed:
            assert is_told.wait(HEAR_S)
            until("nobody kills in vain", lambda: lab.calls() <= calls, HEAR_S)
        else:
            assert running.result() == 0
        closed = lab.begin_to(agents.close)
        (home / "go").touch()
        closed.result()
        assert running.result() == 0
        until("nothing goes on there", lambda: not _has_host_process(lab), HEAR_S)
    left = answers.value_of(lab.ask(H1, remote.end_request(RUN_ID, purge=True))[AGENT])
    assert left["ended"] == []
    assert lab.cluster.processes("h1") == []
    (home / "go").unlink()


def _has_host_process(lab: Lab) -> bool:
    return any("daemons.node" in p.cmdline() for p in lab.cluster.processes("h1"))


def test_the_coordinator_hears_in_words_why_an_agent_cannot_be_placed(lab: Lab) -> None:
    directory = lab.run([Host(ssh="h9")])
    ends: list[m.ProcessExited] = []

    def then(event: Event) -> list[Effect]:
        if isinstance(event, ProcessEnded):
            ends.append(event.exited)
        return [Exit(0, "it is known")] if ends else []

    launch = LaunchAgent(AGENT, 3, KEYS.secret(AGENT))
    assert lab.do(serve, lab, directory, then, launch) == 0
    (end,) = ends
    assert (end.name, end.incarnation, end.status) == (AGENT, 3, Unreachable.exit_code)
    assert end.last_lines[0].startswith("ssh: Could not resolve hostname h9")
    assert end.last_lines[-1].startswith("ERROR the name h9 cannot be resolved")


def test_an_agent_that_cannot_be_reached_to_be_killed_counts_as_gone(lab: Lab) -> None:
    """Another coordinator has placed it; this one has its incarnation from what that remembered."""
    directory = lab.run([Host(ssh="h9")])
    with closing(RunDb(directory)) as db:
        db.put_memory({f"daemon/{AGENT}": {"incarnation": 4}})
        db.commit()
    ends: list[m.ProcessExited] = []

    def then(event: Event) -> list[Effect]:
        if isinstance(event, ProcessEnded):
            ends.append(event.exited)
        return [Exit(0, "it is known")] if ends else []

    assert lab.do(serve, lab, directory, then, KillAgent(AGENT)) == 0
    assert [(end.name, end.incarnation, end.status) for end in ends] == [(AGENT, 4, STATUS_UNKNOWN)]
    assert ends[0].last_lines[-1].startswith("ERROR the name h9 cannot be resolved")


# ---------------------------------------------------------------- calls


def test_words_arrive_on_another_host_as_they_are(lab: Lab) -> None:
    words = ["/usr/bin/printf", "%s\\0", *NASTY]
    command = sshwords.argv(Host(ssh="root@h1"), words, "")
    ended = lab.do(lambda: subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL))
    assert ended.stdout == b"".join(os.fsencode(word) + b"\0" for word in NASTY)


def test_all_hosts_are_asked_at_once_and_over_one_connection_each(lab: Lab) -> None:
    homes = [lab.slow_python(name) for name in lab.cluster.names]
    hosts = {f"agent-{n}": Host(ssh=f"h{n}", python="~/slow") for n in (1, 2, 3)}
    for _ in range(2):
        asked = lab.begin_to(SSH.ask, hosts, remote.end_request(RUN_ID), ASK_S)
        until("all wait", lambda: all((home / "here").exists() for home in homes), HEAR_S)
        for home in homes:
            (home / "go").touch()
        assert [answer.is_good for answer in asked.result().values()] == [True] * 3
        for home in homes:
            (home / "go").unlink()
    assert len(lab.calls()) == 3, "the shared connections"


def test_a_login_that_talks_and_one_that_floods_or_hangs(lab: Lab) -> None:
    root = lab.cluster.files("h2") / "root"
    (root / ".bashrc").write_text("echo Welcome '{}'; echo it is Monday >&2\n")
    (root / "flood").write_text("#!/bin/sh\nexec yes 0123456789\n")
    (root / "hang").write_text("#!/bin/sh\nexec sleep 600\n")
    for name in ("flood", "hang"):
        (root / name).chmod(0o755)
    talks = lab.ask({AGENT: Host(ssh="h2")}, remote.end_request(RUN_ID))[AGENT]
    assert talks.is_good
    assert "it is Monday" in talks.words
    floods = lab.ask({AGENT: Host(ssh="h2", python="~/flood")}, remote.end_request(RUN_ID))[AGENT]
    assert "more than 1,048,576 bytes" in SSH.explain(floods).message
    hanging = {AGENT: Host(ssh="h2", python="~/hang")}
    late = SSH.explain(lab.do(SSH.ask, hanging, remote.end_request(RUN_ID), 0.5)[AGENT])
    assert type(late) is Unreachable
    assert "not answered in time" in late.message
    (root / ".bashrc").unlink()
    for left in lab.cluster.processes("h2"):
        left.kill()


# ---------------------------------------------------------------- hosts that are set up wrongly


def test_every_way_to_fail_has_words_of_its_own(broken_lab: Lab) -> None:
    lab, cluster = broken_lab, broken_lab.cluster
    cluster.break_key("h1")
    cluster.firewall("h2", [22])
    cluster.other_version("h3", "9.8.7")
    context = Desk(lab)
    directory = lab.run([Host(ssh="h1")])
    wrong = {
        "agent-1": Host(ssh="h1"),
        "agent-2": Host(ssh="h2"),
        "agent-3": Host(ssh="h3"),
        "agent-4": Host(ssh="nowhere.invalid"),
        "agent-5": Host(ssh="h3", python="/opt/none/python"),
        "agent-6": Host(ssh="h3", python="/usr/bin/python3"),
    }
    request = remote.begin_request(remote.shared_request(directory), context.order(1))
    errors = {n: SSH.explain(a) for n, a in lab.ask(wrong, request).items()}
    context.transport.close()
    expected: list[tuple[type[DlctlError], str, str]] = [
        (
            NotPermitted,
            r"h1 refuses the login \(.*Permission denied \(publickey\)",
            "ssh-copy-id h1",
        ),
        (Unreachable, r"h2 cannot be reached \(.*timed out", "ssh h2 true"),
        (
            VersionMismatch,
            r"h3: this host has dlctl 9\.8\.7 .* the request comes from",
            "install dlctl",
        ),
        (Unreachable, r"the name nowhere\.invalid cannot be resolved", "ssh nowhere.invalid true"),
        (DlctlError, r"h3 does not have this Python \(.*/opt/none/python", "set python"),
        (DlctlError, r"h3 has no dlctl.*(No module named|ModuleNotFoundError)", "set python"),
    ]
    for error, (kind, message, hint) in zip(errors.values(), expected, strict=True):
        assert type(error) is kind
        assert re.match(message, error.message), error.message
        assert hint in (error.hint or "")
        assert error.where is not None
    assert all(cluster.processes(name) == [] for name in cluster.names)


def test_a_host_key_that_is_new_or_has_changed_is_refused(broken_lab: Lab) -> None:
    known = broken_lab.cluster.directory / "known_hosts"
    h1, h2, h3 = known.read_text().splitlines()
    stranger = " ".join([h1.split()[0], *h3.split()[1:]])
    known.write_text(f"{stranger}\n{h3}\n")
    hosts = {"agent-1": Host(ssh="h1"), "agent-2": Host(ssh="h2"), "agent-3": Host(ssh="h3")}
    found = broken_lab.ask(hosts, remote.end_request(RUN_ID))
    changed, new = (SSH.explain(found[name]) for name in ("agent-1", "agent-2"))
    assert type(changed) is type(new) is NotPermitted
    assert "the host key of h1 has changed" in changed.message
    assert "ssh-keygen -R h1" in (changed.hint or "")
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in found["agent-1"].words
    assert "host key of h2 is not known" in new.message
    assert found["agent-3"].is_good
    assert h2 not in known.read_text()


@pytest.mark.long
def test_a_home_that_is_read_only_and_a_coordinator_behind_a_firewall_are_named(
    broken_lab: Lab,
) -> None:
    lab = broken_lab
    lab.cluster.read_only_home("h1")
    context = Desk(lab)
    directory = lab.run([Host(ssh="h1")])
    read_only = SSH.explain(lab.begin(context.order(1), Host(ssh="h1"), directory))
    assert "Read-only file system" in read_only.message
    assert (read_only.where or "").startswith("h1:/root/.local")
    assert "set dir of this host" in (read_only.hint or "")
    elsewhere = Host(ssh="h1", dir="/tmp/dlctl")
    assert lab.begin(context.order(1), elsewhere, directory).is_good
    context.welcome(AGENT)
    context.transport.close()

    alone = SSH.explain(lab.begin(context.order(2), Host(ssh="h2"), directory))
    assert type(alone) is Unreachable
    assert f"this host cannot reach the coordinator at {context.control}" in alone.message
    assert lab.cluster.processes("h2") == []
    lab.ask({AGENT: elsewhere}, remote.end_request(RUN_ID, purge=True))
    assert not (lab.cluster.files("h1") / "tmp" / "dlctl").exists()
