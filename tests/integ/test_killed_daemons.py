"""Daemons that die, freeze or are shot: the run goes on, or ends and says who is gone."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from limited_memory import limited_memory
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl.runs import database

EATING = """def loss(self, model, batch):
        from pathlib import Path

        if Path(__file__).with_name("eat").exists():
            self.eaten = bytearray(b"x" * (1 << 30))"""


@pytest.mark.long
def test_a_run_finishes_although_a_worker_is_killed(place: Workplace) -> None:
    place.task(pause_s=0.05)
    place.job(stop="{ epochs = 2 }", workers=2, more_workers="loader_processes = 1")
    run = place.begin("run", "job.toml")
    place.until_step(8)
    count = len(place.processes())
    assert count == 10, "each worker has one that loads data, and one that reads; and a template"
    os.kill(place.pid("worker-1"), signal.SIGKILL)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert place.run()["step"] == 64, "16 portions of 2 batches, twice"
    assert re.search(r"worker-1 .*SIGKILL", ended.err)
    again = r"worker-1 starts again; \d+ portions? of its data can be leased again"
    assert any(re.fullmatch(again, text) for text in place.events("lost"))
    place.nothing_left(timeout_s=0.5)


@pytest.mark.long
def test_a_run_finishes_although_a_process_that_loads_data_is_killed(place: Workplace) -> None:
    place.task(pause_s=0.05)
    place.job(stop="{ epochs = 2 }", workers=2, more_workers="loader_processes = 2")
    run = place.begin("run", "job.toml")
    place.until_step(8)
    psutil.Process(place.pid("worker-1")).children()[0].kill()
    ended = run.end()
    assert ended.code == 0, ended.err
    assert place.run()["step"] == 64, "16 portions of 2 batches, twice"
    assert re.search(r"data loader process \d+ was killed by SIGKILL", ended.err)
    assert any(text.startswith("worker-1 starts") for text in place.events("lost"))
    place.nothing_left(timeout_s=0.5)


@pytest.mark.long
def test_without_durability_a_killed_server_ends_the_run_which_says_how_to_go_on(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, more_servers='durability = "none"')
    run = place.begin("run", "job.toml")
    place.until_step(5)
    assert place.dlctl("checkpoint").code == 0
    os.kill(place.pid("server-1"), signal.SIGKILL)
    ended = run.end()
    assert ended.code == 7
    assert re.search(r"server-1 .*SIGKILL", ended.err)
    assert re.search(r"next: dlctl recover .*\n +resumes from the checkpoint at step", ended.err)
    saved = f"resumes from the checkpoint at step {place.run()['checkpoint']['step']}"
    recover = f"dlctl recover -j {place.directory.name}"
    status = place.dlctl("status").out
    assert f"  next        {recover}\n              {saved}" in status
    asked = place.dlctl("recover", "--dry-run").out
    assert 'durability = "none"' in asked
    failed = place.dlctl("logs", "--failed").out
    assert {line.partition(" ")[0] for line in failed.splitlines()} == {"server-1"}
    assert failed.endswith("SIGKILL\n")
    assert f"next: {recover}\n         {saved}" in place.dlctl("why").out
    place.nothing_left()


def _pid(place: Workplace, name: str) -> int | None:
    """None while it has no process."""
    row = place.run() if name == "coordinator" else place.daemon(name)
    return row.get("pid")


def _is_template(process: psutil.Process) -> bool:
    """It ends with its agent."""
    return "daemons.template" in process.cmdline()


def _version(place: Workplace, name: str) -> int | None:
    """None before its first report."""
    return place.daemon(name)["metrics"].get("version")


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ["server-1", "agent-0", "coordinator"])
def test_whoever_is_killed_the_run_goes_on_by_itself(place: Workplace, name: str) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2)
    place.start()
    place.until_step(20)
    version = place.until("it has told its version", lambda: _version(place, "server-1"))
    before = place.pid(name)
    others = {p.pid for p in place.processes() if name != "agent-0" or not _is_template(p)}
    others -= {before}
    os.kill(before, signal.SIGKILL)
    place.until("it has a successor", lambda: _pid(place, name) not in (None, before))
    place.until_state("running")
    step = place.run()["step"]
    place.until_step(step + 20)
    assert others <= {p.pid for p in place.processes()}, "nobody else was ended"
    if name == "server-1":
        now = place.until("it has told its version", lambda: _version(place, name))
        assert now > version, "it went on where it was"
        assert place.daemon(name)["restarts"] == 1
    assert place.dlctl("stop").code == 0
    assert place.run()["checkpoint"]["step"] == place.run()["step"]
    place.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("name", ["agent-0", "server-0"])
def test_sigterm_to_whom_the_run_cannot_do_without_stops_it_in_order(
    place: Workplace, name: str
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    run = place.begin("run", "job.toml")
    place.until_step(5)
    os.kill(place.pid(name), signal.SIGTERM)
    ended = run.end()
    assert ended.code == 3
    assert place.run()["state"] == "stopped"
    assert place.run()["checkpoint"]["step"] == place.run()["step"], "nothing is lost"
    place.nothing_left()


@pytest.mark.long
def test_a_frozen_coordinator_is_given_up_by_stop_kill(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    frozen = place.pid("coordinator")
    os.kill(frozen, signal.SIGSTOP)
    place.until(
        "status says so", lambda: "  not answering for" in place.dlctl("status").out.splitlines()[0]
    )
    assert place.dlctl("why").out.startswith("coordinator: ")
    recover = place.dlctl("recover", "--dry-run")
    said = f"next: kill -9 {frozen}\n        makes its agent"
    assert (recover.code, said in recover.err) == (5, True)
    ended = place.dlctl("stop", "--kill")
    assert ended.code == 0, ended.err
    place.nothing_left()


@pytest.mark.long
def test_a_coordinator_that_stands_still_is_replaced(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, more="[timeouts]\nsilent_s = 2.0\n")
    place.start()
    place.until_step(5)
    before = place.pid("coordinator")
    others = {p.pid for p in place.processes()} - {before}
    os.kill(before, signal.SIGSTOP)
    place.until("it has a successor", lambda: _pid(place, "coordinator") not in (None, before))
    place.until_step(place.run()["step"] + 20)
    assert others <= {p.pid for p in place.processes()}, "nobody else was ended"
    assert place.events("recover")
    assert place.dlctl("stop").code == 0
    place.nothing_left()


def _kill_all_that_watch(place: Workplace) -> None:
    """Coordinator and agent: who is left has nobody."""
    names = ("agent-0", "coordinator")
    place.kill_at_once([psutil.Process(place.pid(name)) for name in names])


@pytest.mark.long
def test_an_agent_ends_with_its_run_although_nobody_is_left_to_tell_it(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    agent = psutil.Process(place.pid("agent-0"))
    agent.suspend()
    coordinator = psutil.Process(place.pid("coordinator"))
    coordinator.kill()
    psutil.wait_procs([coordinator], timeout=5)
    with closing(database.RunDb(place.directory)) as db:
        db.put_run(state="failed", reason="the end was recorded and not told")
        db.commit()
    agent.resume()
    place.nothing_left(timeout_s=15)
    assert place.run()["state"] == "failed"


@pytest.mark.long
def test_a_dead_coordinator_and_agent_are_noticed_and_stop_cleans_up(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    pid = place.pid("coordinator")
    _kill_all_that_watch(place)

    status = place.dlctl("status")
    assert status.code == 0
    assert f"(pid {pid}" in status.out
    assert "running     server-0" in status.out
    assert re.search(r"! coordinator: .*\[coordinator-gone\]\n", status.out)
    recover = f"dlctl recover -j {place.directory.name}"
    assert f"next        {recover}" in status.out
    assert f"next: {recover}" in place.dlctl("why").out
    assert "coordinator | " in place.dlctl("logs", "--failed").out
    assert place.dlctl("status", "--check").code == 3
    assert place.dlctl("wait").code == 7
    change = place.dlctl("set", "worker-0", "push=off")
    assert change.code == 1

    stop = place.dlctl("stop")
    assert stop.code == 0, stop.err
    assert "server-0, worker-0" in stop.err
    place.nothing_left()
    again = place.dlctl("stop").err
    assert "(failed)" in again
    assert f"next: {recover}" in again


@pytest.mark.long
def test_a_start_after_coordinator_and_agent_have_died_goes_on_where_they_were(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    server = place.pid("server-0")
    _kill_all_that_watch(place)
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 0, ended.err
    step = place.run()["step"]
    place.until_step(step + 20)
    assert place.pid("server-0") == server, "it was adopted"
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_frozen_worker_is_shown_the_others_go_on_and_it_is_replaced(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, workers=2, more="[timeouts]\nsilent_s = 4.0\n")
    place.start()
    place.until_step(10)
    frozen = place.pid("worker-1")
    os.kill(frozen, signal.SIGSTOP)
    place.until("status calls it slow", lambda: place.daemon("worker-1")["state"] == "slow")
    status = place.dlctl("status").out
    assert "degraded (worker-1)" in status
    assert re.search(r"! worker-1: .*\[heartbeat-late\]\n", status)
    assert "(limit 4.0s)" in status
    failed = place.dlctl("logs", "--failed", "worker-1").out
    assert "worker-1" in failed
    assert place.pid("worker-1") == frozen
    step = place.run()["step"]
    place.until_step(step + 20)
    place.until("it is replaced", lambda: place.daemon("worker-1")["incarnation"] == 2)
    assert not psutil.pid_exists(frozen)
    place.until_state("running")
    assert ["worker-1" in text and "killed" in text for text in place.events("silent")] == [True]
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
@pytest.mark.root
def test_a_worker_that_outgrows_its_memory_is_said_to_have_done_so(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    path = place.path / "train.py"
    path.write_text(path.read_text().replace("def loss(self, model, batch):", EATING))
    place.job(stop=ENDLESS, more_workers="restarts_max = 0")
    with limited_memory(64 * 2**20) as group:
        directory = place.start()
        (group / "cgroup.procs").write_text(str(place.pid("worker-0")))
        seen = [place.daemon("agent-0")["updated_at"]]
        # An agent looks at its processes about as often as it reports, at times only every second
        # time; and the first report that is seen here may have been sent before.
        for _ in range(4):
            place.until("a report", lambda: place.daemon("agent-0")["updated_at"] > seen[-1])
            seen.append(place.daemon("agent-0")["updated_at"])
        (place.path / "eat").touch()
        place.until_state("failed")
        place.nothing_left()
    last = place.daemon("worker-0")["last_exit"]
    assert last["text"] == "killed by SIGKILL (out of memory: limit 64 MiB)"
    assert f"worker-0 ended: {last['text']}" in place.events("exit")
    assert "out of memory: limit 64 MiB" in place.dlctl("status", "-j", str(directory)).out


SHARED_BYTES = 32768
"""Of the index of the database's log. A process that opens it alone cuts it off and lets it grow
again: on a full disk there is room for that. The log itself is longer, and cannot grow."""


def _cannot_write(pid: int, bytes_max: int) -> None:
    """From now on no file of a process, nor of those that it starts, grows beyond this size."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_max, hard))


def _at_work(place: Workplace) -> tuple[int, int, Callable[[], None]]:
    """A slow run without an end: the pids of its agent and its coordinator, and what waits until
    its workers have trained for a while, although nothing of that is on record.
    """
    place.task(pause_s=SLOW_S)
    counts = place.count_samples()
    place.job(stop=ENDLESS, workers=2)
    place.start()
    place.until_step(20)

    def resumes() -> None:
        counted = counts().total()
        place.until("training goes on", lambda: counts().total() > counted + 1_500)

    return place.pid("agent-0"), place.pid("coordinator"), resumes


def _those_of(place: Workplace, role: str) -> list[psutil.Process]:
    found = []
    for process in place.processes():
        with suppress(psutil.NoSuchProcess):  # It is just ending.
            found += [process] * (f"daemons.{role}" in process.cmdline())
    return found


def _coordinators(place: Workplace) -> list[psutil.Process]:
    return _those_of(place, "coordinator")


@pytest.mark.long
def test_a_coordinator_that_begins_on_a_full_disk_leads_the_run_and_waits_for_room(
    place: Workplace,
) -> None:
    agent, before, resumes = _at_work(place)
    _cannot_write(agent, SHARED_BYTES)
    os.kill(before, signal.SIGKILL)
    log = place.directory / "logs" / "coordinator.2.jsonl"
    said = "cannot write the run's database"
    place.until("it says why", lambda: log.exists() and said in log.read_text())
    _cannot_write(agent, resource.RLIM_INFINITY)
    (leader,) = _coordinators(place)
    resumes()
    assert _coordinators(place) == [leader], "it was not started again"
    assert place.run()["pid"] == before, "it is not on record yet"
    _cannot_write(leader.pid, resource.RLIM_INFINITY)
    place.until("it is on record", lambda: place.run()["pid"] == leader.pid)
    place.until_step(place.run()["step"] + 20)
    assert place.run()["incarnation"] == 2
    assert place.dlctl("stop").code == 0
    place.nothing_left()


def _leader(place: Workplace, since: float) -> psutil.Process | None:
    """The coordinator that has the run's lock, if it has touched it since then: it is at work.
    Others may come and end before, as long as they cannot even open the database.
    """
    lock = (place.directory / "lock").stat()
    for line in Path("/proc/locks").read_text().splitlines():
        _, _, _, _, pid, file, *_ = line.split()
        if file.endswith(f":{lock.st_ino}") and lock.st_mtime > since:
            return next((p for p in _coordinators(place) if p.pid == int(pid)), None)
    return None


def _agent(place: Workplace, _since: float) -> psutil.Process | None:
    agents = _those_of(place, "agent")
    return agents[0] if len(agents) == 1 else None


@pytest.mark.long
def test_an_agent_and_a_coordinator_that_are_on_no_record_find_each_other(
    place: Workplace,
) -> None:
    """The disk is full all the time, and each of them dies after the other."""
    agent, before, resumes = _at_work(place)

    def another(
        of: Callable[[Workplace, float], psutil.Process | None], pid: int
    ) -> psutil.Process:
        os.kill(pid, signal.SIGKILL)
        since = time.time()

        def found() -> psutil.Process | None:
            process = of(place, since)
            return process if process is not None and process.pid != pid else None

        process: psutil.Process = place.until("another one", found)
        return process

    _cannot_write(agent, SHARED_BYTES)
    second = another(_leader, before)
    resumes()
    second_agent = another(_agent, agent)
    resumes()
    assert _coordinators(place) == [second], "no other is started beside it"
    assert _agent(place, 0.0) == second_agent
    third = another(_leader, second.pid)
    resumes()
    assert _agent(place, 0.0) == second_agent, "it is gone on with"
    assert place.run()["pid"] == before, "nobody is on record yet"
    _cannot_write(third.pid, resource.RLIM_INFINITY)
    _cannot_write(second_agent.pid, resource.RLIM_INFINITY)
    place.until("it is on record", lambda: place.run()["pid"] == third.pid)
    place.until("its agent, too", lambda: place.pid("agent-0") == second_agent.pid)
    place.until_step(place.run()["step"] + 20)
    assert place.dlctl("stop").code == 0
    place.nothing_left()
