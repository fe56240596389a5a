"""Launchers whose commands are not here, cannot be run, or do not answer."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dlctl.errors import DlctlError, Unreachable
from dlctl.job import config
from dlctl.job.config import Allocated, Host
from dlctl.launch import base, commands, launcher, local, orderfiles, slurmagents, slurmcalls
from dlctl.launch.ssh import address_of
from dlctl.runs.database import RunDb
from dlctl.util import processes

RUN_ID = "digits-7f3a"
HEAR_S = 10.0


class Watcher:
    """A loop that turns when it is told to."""

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HEAR_S
        while not condition():
            assert time.monotonic() < deadline
            for fd in select.select([*self._watched], [], [], HEAR_S)[0]:
                self._watched[fd]()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All the commands that there are."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    return tools


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a run that nobody leads."""
    home = tmp_path / "experiment"
    directory = home / "runs" / RUN_ID
    directory.mkdir(parents=True)
    (home / "train.py").write_text("task = 1\n")
    job = config.JobFile(
        job=config.Job(name="digits", task=f"{home}/train.py:task"),
        network=config.Network(transport="tcp"),
    )
    (directory / "job.json").write_text(json.dumps(config.to_dict(job)))
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(job_file=str(home / "job.toml"))
        db.commit()
    return directory


def put(tools: Path, command: str, script: str, mode: int = 0o755) -> None:
    (tools / command).write_text(f"#!/bin/sh\n{script}\n")
    (tools / command).chmod(mode)


def order(name: str, incarnation: int = 1) -> base.StartOrder:
    return base.StartOrder(name, incarnation, "tcp://127.0.0.1:1", base.NO_CREDENTIALS)


# ---------------------------------------------------------------- this machine


@pytest.fixture
def idle_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are started do nothing."""
    package = tmp_path / "code" / "daemons"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "agent.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.mark.usefixtures("idle_agents")
def test_of_two_with_one_number_only_the_end_of_the_one_that_is_wanted_is_told(
    directory: Path, news: list[base.Ended]
) -> None:
    """Nobody remembered that the first had been started."""
    watcher = Watcher()
    here = local.LocalAgents(directory, watcher, news.append)
    here.start(order("agent-0"))
    (first,) = local.living(directory)
    here.start(order("agent-0"))
    watcher.turn_until(lambda: len(watcher._watched) == 1)
    assert not processes.is_alive(first.pid, first.start)
    assert news == []
    here.kill("agent-0")
    watcher.turn_until(lambda: bool(news))
    assert news == [base.Ended("agent-0", 1, -signal.SIGKILL)]


@pytest.mark.usefixtures("idle_agents")
def test_who_was_started_is_found_although_its_command_line_comes_a_moment_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says that a program has begun before it shows what it was begun with."""
    honest, asked = processes.command_line, []

    def late(pid: object, start: object) -> list[str]:
        asked.append(pid)
        return honest(pid, start) if len(asked) > 3 else []

    monkeypatch.setattr(processes, "command_line", late)
    process = local.start(directory, "agent", "agent-0", 1, "")
    try:
        assert len(asked) == 4
        assert [each.pid for each in local.living(directory)] == [process.pid]
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- ssh


@pytest.fixture
def news() -> list[base.Ended]:
    return []


@pytest.fixture
def ssh(directory: Path, news: list[base.Ended]) -> base.AgentControl:
    hosts = {"agent-1": Host(ssh="h1")}
    return launcher.made("ssh", {}).agents(directory, hosts, Watcher(), news.append)


def test_one_whose_start_has_failed_at_once_is_not_waited_for_when_it_is_killed(
    tools: Path, ssh: base.AgentControl, news: list[base.Ended], caplog: pytest.LogCaptureFixture
) -> None:
    ssh.start(order("agent-1"))
    ssh.kill("agent-1")
    assert ["ssh" in str(ended.error) for ended in news] == [True, True]
    with caplog.at_level(logging.WARNING):
        ssh.close()
    assert not caplog.records


def test_one_whose_newer_start_has_failed_at_once_is_not_waited_for_either(
    tools: Path, ssh: base.AgentControl, news: list[base.Ended]
) -> None:
    put(tools, "ssh", "exec /bin/sleep 60")
    ssh.start(order("agent-1"))
    ssh.kill("agent-1")
    assert news == [], "it is killed when it is there"
    (tools / "ssh").chmod(0o644)
    ssh.start(order("agent-1", 2))
    ssh.kill("agent-1")
    assert [(ended.incarnation, ended.status) for ended in news] == [(2, None)] * 2
    assert os.strerror(errno.EACCES) in str(news[0].error)


# ---------------------------------------------------------------- a command of theirs


@pytest.mark.parametrize("end", ["wait", "exit 3"])
def test_a_wrapper_whose_child_goes_on_is_not_waited_for_longer_than_its_time(
    tools: Path, tmp_path: Path, end: str
) -> None:
    """The child has the wrapper's output open, too, and nobody tells it to end."""
    put(tools, "wrapper", f"/bin/sleep 60 &\necho $! > {tmp_path}/child\necho said\n{end}")
    began = time.monotonic()
    result = commands.wait(["wrapper"], 1.0)
    assert time.monotonic() - began < 30.0
    child = int((tmp_path / "child").read_text())
    assert result == (commands.LATE if end == "wait" else 3, "said\n", "")
    if end == "wait":
        row = {"pid": child, "pid_start": processes.start_of(child)}
        assert processes.wait([row], 10.0) == [], "it is killed with its wrapper"
    else:
        os.kill(child, signal.SIGKILL)


def test_what_ssh_says_of_a_host_or_why_it_does_not(tools: Path) -> None:
    put(tools, "ssh", "echo user ann; echo hostname h1.example")
    assert address_of(Host(ssh="h1")) == "h1.example"
    put(tools, "ssh", "echo Bad configuration option: prot >&2; exit 255")
    with pytest.raises(
        DlctlError, match="does not report the address of h1: Bad configuration option"
    ):
        address_of(Host(ssh="h1"))


# ---------------------------------------------------------------- Slurm


def test_a_job_that_could_not_be_submitted_is_submitted_by_the_next_start(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    news: list[base.News] = []
    watcher = Watcher()
    nodes = {"agent-1": Allocated(), "agent-2": Allocated()}
    asked = {"nodes": 2, "dir": str(tmp_path / "orders")}
    ours = launcher.made("slurm", asked).agents(directory, nodes, watcher, news.append)
    for name in nodes:
        ours.start(order(name))
    put(tools, "sbatch", "echo 17", mode=0o644)
    ours.start(order("agent-1", 2))
    absent, absent_too, not_run = news
    for ended in (absent, absent_too):
        assert isinstance(ended, base.Ended)
        assert (ended.status, "Slurm" in str(ended.error)) == (1, True)
    assert isinstance(not_run, base.Ended)
    assert not_run.status is None, "it may be possible a little later"
    assert os.strerror(errno.EACCES) in str(not_run.error)
    assert slurmcalls.read_handle(directory) is None
    assert list((tmp_path / "orders").iterdir()) == []

    (tools / "sbatch").chmod(0o755)
    ours.start(order("agent-1", 3))
    (tmp_path / "experiment" / "train.py").write_text("task = 2\n")
    ours.start(order("agent-2", 2))
    handle = slurmcalls.read_handle(directory)
    assert handle is not None
    watcher.turn_until(lambda: ours._command is None)
    assert slurmcalls.read_handle(directory) == handle._replace(job_id="17")
    assert news[3:] == []
    orders = [orderfiles.read(orderfiles.order(handle.directory, name)) for name in nodes]
    assert [each["incarnation"] for each in orders] == [3, 2]
    assert orders[0]["files"] == orders[1]["files"], "all nodes have the same task"


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        (None, DlctlError, "this machine has no Slurm commands: squeue"),
        (0o644, DlctlError, "cannot run Slurm's commands: Permission denied"),
        (0o755, Unreachable, "exists: slurm_load_jobs error: Unable to contact"),
    ],
)
def test_a_job_is_not_forgotten_while_nobody_says_whether_it_is_there(
    tools: Path, directory: Path, tmp_path: Path, mode: int | None, kind: type, words: str
) -> None:
    """Its number was never noted: whoever has submitted it has died."""
    handle = slurmcalls.new_handle(RUN_ID, tmp_path / "orders")
    orderfiles.make(handle.directory, "")
    handle.write(directory)
    if mode is not None:
        put(tools, "squeue", "echo slurm_load_jobs error: Unable to contact >&2; exit 1", mode)
    with pytest.raises(DlctlError, match=words) as refused:
        slurmcalls.end(directory)
    assert type(refused.value) is kind
    assert slurmcalls.read_handle(directory) == handle
    assert handle.directory.is_dir()
    put(tools, "squeue", "exit 0")
    slurmcalls.end(directory)
    assert slurmcalls.read_handle(directory) is None
    assert not handle.directory.exists()


class Submitted:
    """A coordinator whose predecessor has submitted a job, and died before it knew the number."""

    def __init__(self, directory: Path, orders: Path) -> None:
        self.handle = slurmcalls.new_handle(RUN_ID, orders)
        orderfiles.make(self.handle.directory, "")
        self.handle.write(directory)
        self.news: list[base.News] = []
        self._directory, self._watcher = directory, Watcher()
        nodes = {"agent-1": Allocated()}
        self.agents = launcher.made("slurm", {"nodes": 1}).agents(
            directory, nodes, self._watcher, self.news.append
        )
        self.agents.adopt({"agent-1": 1})

    def ask(self) -> str:
        """Ask Slurm once; returns the number of the job if it is known then."""
        self.agents._due_at = 0.0
        self.agents.look()
        self._watcher.turn_until(lambda: self.agents._command is None)
        handle = slurmcalls.read_handle(self._directory)
        assert handle is not None
        return handle.job_id


@pytest.fixture
def submitted(tools: Path, directory: Path, tmp_path: Path) -> Submitted:
    return Submitted(directory, tmp_path / "orders")


def test_a_job_that_the_queue_lists_late_is_waited_for_and_found(
    submitted: Submitted, tools: Path
) -> None:
    put(tools, "squeue", "exit 0")
    for _ in range(2):
        assert submitted.ask() == ""
    assert len(submitted.news) == 2
    for waits in submitted.news:
        assert isinstance(waits, base.Waiting)
        assert submitted.handle.name in waits.why
    put(tools, "squeue", "echo 17")
    assert submitted.ask() == "17"
    assert not submitted.agents.is_over


def test_a_job_that_the_queue_does_not_list_in_its_time_is_over(
    submitted: Submitted, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while Slurm does not answer."""
    monkeypatch.setattr(slurmagents, "LISTED_S", 0.0)
    put(tools, "squeue", "exit 1")
    assert submitted.ask() == ""
    assert submitted.news == []
    put(tools, "squeue", "exit 0")
    assert submitted.ask() == ""
    (over,) = submitted.news
    assert isinstance(over, base.Notice)
    assert over.kind == "over"
    assert submitted.handle.name in over.reason


def test_an_agent_that_is_killed_while_its_job_waits_is_not_started_once_the_job_runs(
    submitted: Submitted, tools: Path
) -> None:
    """Its order is there: the kill stands beside it, for the keeper."""
    put(tools, "squeue", "echo 17")
    put(tools, "scontrol", "echo JobId=17 JobState=PENDING Reason=Resources")
    for _ in range(2):
        submitted.ask()
    submitted.agents.kill("agent-1")
    assert submitted.news[-1] == base.Ended("agent-1", 1, None)
    kill = orderfiles.read(orderfiles.kill(submitted.handle.directory, "agent-1"))
    assert kill == {"incarnation": 1}


class Fleet:
    """Two agents, each in a job of its own, for a Slurm whose answers are files."""

    def __init__(self, tools: Path, directory: Path, tmp_path: Path) -> None:
        self.news: list[base.News] = []
        self._tools, self._directory, self._watcher = tools, directory, Watcher()
        nodes = {"agent-1": Allocated(servers=0), "agent-2": Allocated(servers=0)}
        asked = {"nodes": 2, "jobs": "each", "requeue": True, "dir": str(tmp_path / "orders")}
        self.jobs = launcher.made("slurm", asked).agents(
            directory, nodes, self._watcher, self.news.append
        )
        count = f"{tmp_path}/count"
        put(
            tools,
            "sbatch",
            f"echo >> {count}; n=0; while read -r _; do n=$((n + 1)); done < {count}; echo $n",
        )
        put(tools, "scontrol", f"read -r line < {tmp_path}/job.$4; echo $line")
        self._path = tmp_path

    def says(self, job: int, state: str, restarts: int = 0, reason: str = "None") -> None:
        line = f"JobId={job} JobState={state} Reason={reason} Restarts={restarts}"
        (self._path / f"job.{job}").write_text(line)

    def start(self, name: str, incarnation: int) -> None:
        self.jobs.start(order(name, incarnation))
        self._turn()

    def _turn(self) -> None:
        each = self.jobs._jobs.values()
        self._watcher.turn_until(lambda: all(job._command is None for job in each))

    def look(self) -> list[base.News]:
        """What is new after Slurm was asked about each job."""
        self.news.clear()
        for job in self.jobs._jobs.values():
            job._due_at = 0.0
        self.jobs.look()
        self._turn()
        return list(self.news)


def test_each_job_is_preempted_queued_and_submitted_again_on_its_own(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    for name in ("agent-1", "agent-2"):
        fleet.start(name, 1)
    names = {only: handle.job_id for only, handle in slurmcalls.handles(directory).items()}
    assert names == {"agent-1": "1", "agent-2": "2"}
    fleet.says(1, "RUNNING")
    fleet.says(2, "PENDING", reason="Priority")
    (waits,) = fleet.look()
    assert waits == base.Waiting("agent-2", 1, "job 2 is pending: Priority")

    fleet.says(1, "PENDING", restarts=1, reason="BeginTime")
    taken = [each for each in fleet.look() if isinstance(each, base.Taken)]
    assert [(each.name, each.incarnation) for each in taken] == [("agent-1", 1)]
    fleet.start("agent-1", 2)
    assert base.Waiting("agent-1", 2, "job 1 is pending again: BeginTime") in fleet.look()

    fleet.says(2, "PREEMPTED")
    taken = [each for each in fleet.look() if isinstance(each, base.Taken)]
    assert [(each.name, each.incarnation) for each in taken] == [("agent-2", 1)]
    fleet.start("agent-2", 2)
    assert slurmcalls.handles(directory)["agent-2"].job_id == "3", "it is submitted again"


def test_a_job_that_is_being_ended_is_a_notice_and_a_wait(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    """It may take longer than the coordinator misses an agent, and be requeued or not."""
    fleet = Fleet(tools, directory, tmp_path)
    fleet.start("agent-1", 1)
    fleet.says(1, "RUNNING")
    fleet.look()
    fleet.says(1, "COMPLETING")
    assert base.Going("agent-1", 1, "job 1 is being ended") in fleet.look()
    fleet.start("agent-1", 2)  # It was missed.
    assert fleet.look() == [base.Waiting("agent-1", 2, "job 1 is being ended")]
    fleet.says(1, "PENDING", restarts=1)
    taken = [each for each in fleet.look() if isinstance(each, base.Taken)]
    assert [(each.name, each.incarnation) for each in taken] == [("agent-1", 2)]


def test_an_agent_that_slurm_refuses_or_cannot_start_is_no_host_that_was_taken(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    fleet.start("agent-1", 1)
    fleet.says(1, "FAILED")
    (ended,) = fleet.look()
    assert isinstance(ended, base.Ended)
    assert (ended.name, ended.status) == ("agent-1", 1)
    put(tools, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    fleet.news.clear()
    fleet.start("agent-2", 1)
    (ended,) = fleet.news
    assert isinstance(ended, base.Ended)
    assert "invalid partition" in str(ended.error)


def test_while_slurm_does_not_answer_a_job_is_submitted_later(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    put(tools, "sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    fleet.start("agent-1", 1)
    (waits,) = fleet.look()[:1]
    assert waits == base.Waiting("agent-1", 1, "Slurm does not answer")
    assert "agent-1" not in slurmcalls.handles(directory) or not fleet.jobs._jobs["agent-1"].is_over
    put(tools, "sbatch", "echo 7")
    fleet.look()
    assert slurmcalls.handles(directory)["agent-1"].job_id == "7"


def test_a_job_that_sbatch_could_not_be_asked_for_is_no_end_of_the_coordinator(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    (tools / "sbatch").unlink()
    fleet.start("agent-1", 1)
    assert [type(each) for each in fleet.news] == [base.Ended]
    assert fleet.look() == []


def test_a_job_whose_submission_got_no_answer_is_looked_for_before_there_is_another(
    tools: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    put(tools, "sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    put(tools, "squeue", "echo 9")
    for name in ("agent-1", "agent-2"):
        fleet.start(name, 1)
    assert fleet.look() == []
    assert slurmcalls.handles(directory)["agent-1"].job_id == "9"
    handle = slurmcalls.new_handle(RUN_ID, tmp_path / "orders", "agent-2")
    fleet.jobs._jobs["agent-2"]._handle = handle
    monkeypatch.setattr(slurmagents, "LISTED_S", 0.0)
    put(tools, "squeue", "exit 0")
    put(tools, "sbatch", "echo 12")
    fleet.look()
    fleet.look()
    assert slurmcalls.handles(directory)["agent-2"].job_id == "12"


def test_a_job_takes_nothing_from_the_job_that_it_is_submitted_in(
    tools: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control job that was requeued has a number of restarts."""
    for name in ("SLURM_RESTART_COUNT", "SLURMD_NODENAME", slurmcalls.PLACE, "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    fleet = Fleet(tools, directory, tmp_path)
    put(
        tools,
        "sbatch",
        f"echo 4$SLURM_RESTART_COUNT$SLURMD_NODENAME${{{slurmcalls.PLACE}}}2$SLURM_CONF",
    )
    fleet.start("agent-1", 1)
    assert slurmcalls.handles(directory)["agent-1"].job_id == "421"


def test_many_jobs_are_cancelled_at_once(tools: Path, directory: Path, tmp_path: Path) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    for name in ("agent-1", "agent-2"):
        fleet.start(name, 1)
    fleet.says(1, "PENDING", reason="Priority")
    fleet.says(2, "PENDING", reason="Priority")
    ended = "JobId=0 JobState=CANCELLED"
    put(
        tools,
        "scancel",
        f"echo $* >> {tmp_path}/cancelled\nfor n in $*; do echo {ended} > {tmp_path}/job.$n; done",
    )
    slurmcalls.end(directory)
    assert sorted((tmp_path / "cancelled").read_text().split()) == ["1", "2"]
    assert len((tmp_path / "cancelled").read_text().splitlines()) == 1
    assert slurmcalls.handles(directory) == {}


def at_work(fleet: Fleet) -> tuple[Fleet, Any]:
    """With the job of an agent, which runs."""
    fleet.start("agent-1", 1)
    fleet.says(1, "RUNNING")
    fleet.look()
    return fleet, fleet.jobs._jobs["agent-1"]


def test_a_job_that_could_not_be_cancelled_is_cancelled_later(
    tools: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node would be held, and paid for, although no worker is to run there."""
    fleet, job = at_work(Fleet(tools, directory, tmp_path))
    put(tools, "scancel", "echo 'Unable to contact slurm controller' >&2; exit 1")
    fleet.jobs.want(["agent-2"])
    fleet._turn()
    assert not job.is_ending
    said = f'echo "$*" >> {tmp_path}/cancelled'
    put(tools, "scancel", said)
    fleet.look()
    assert not (tmp_path / "cancelled").exists(), "there is a pause before the next try"
    monkeypatch.setattr(job, "_cancel_at", 0.0)
    for _ in range(3):
        fleet.look()
    assert (tmp_path / "cancelled").read_text() == "1\n", "once is enough"
    assert job.is_ending


def test_a_job_that_is_wanted_again_is_not_cancelled_later(
    tools: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, job = at_work(Fleet(tools, directory, tmp_path))
    put(tools, "scancel", "exit 1")
    fleet.jobs.want([])
    fleet.jobs.want(["agent-1"])  # While scancel runs.
    fleet._turn()
    monkeypatch.setattr(job, "_cancel_at", 0.0)
    put(tools, "scancel", f"touch {tmp_path}/cancelled")
    fleet.look()
    assert (job.is_ending, (tmp_path / "cancelled").exists()) == (False, False)


def test_a_job_that_is_not_there_any_more_needs_no_other_cancellation(
    tools: Path, directory: Path, tmp_path: Path
) -> None:
    fleet = Fleet(tools, directory, tmp_path)
    fleet.start("agent-1", 1)
    said = "scancel: error: Kill job error on job id 1: Invalid job id specified"
    put(tools, "scancel", f"echo >> {tmp_path}/asked; echo '{said}' >&2; exit 1")
    fleet.says(1, "RUNNING")
    fleet.jobs.want([])
    fleet._turn()
    assert fleet.jobs._jobs["agent-1"].is_ending
    fleet.look()
    assert (tmp_path / "asked").read_text() == "\n"
