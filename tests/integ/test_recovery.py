"""Runs that have died as a whole come back: where they were, or from their checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl.ops.remains import read_memory
from dlctl.records.memory import Memory
from dlctl.runs import checkpoints, kept_shards
from dlctl.runs.snapshot import started
from dlctl.util import processes


def versions(place: Workplace) -> dict[str, int]:
    rows = place.run()["daemons"]
    return {r["name"]: r["metrics"].get("version", 0) for r in rows if r["role"] == "server"}


@pytest.fixture
def dead(place: Workplace) -> Workplace:
    """A run with two servers and a worker, all of whose processes were killed."""
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2)
    place.start()
    place.until_step(20)
    place.kill_at_once(place.processes())
    return place


def test_a_run_of_which_no_process_is_left_goes_on_where_it_was(dead: Workplace) -> None:
    shown, version = dead.run()["step"], versions(dead)
    step = Memory(read_memory(dead.directory)).work.steps
    assert step >= shown, "the memory is written at every event, the status now and then"

    asked = dead.dlctl("recover", "--dry-run")
    assert asked.code == 0, asked.err
    assert "server-0    stored" in asked.out
    found = json.loads(dead.dlctl("recover", "--dry-run", "--json").out)
    assert (found["way"], found["step"]) == ("go on", step)
    assert not dead.processes(), "a dry run starts nothing"

    back = dead.dlctl("recover")
    assert back.code == 0, back.err + back.out
    rows = dead.run()["daemons"]
    assert {row["state"] for row in rows} == {"running"}
    assert len(processes.living(rows)) == len(rows), "it is back when all of them are there"
    lines = [line for line in back.err.splitlines() if line.startswith("recovering")]
    assert len(lines) == len(set(lines)), "the same wait is not told twice"
    assert dead.run()["step"] >= step
    dead.until(
        "the servers go on from their versions",
        lambda: all(now >= version[name] for name, now in versions(dead).items()),
    )
    dead.until_step(step + 20)
    assert dead.events("recover")

    healthy = json.loads(dead.dlctl("recover", "--json").out)
    assert (healthy["way"], healthy["done"]) == ("alive", False)
    checked = dead.dlctl("verify", "--json")
    assert (checked.code, json.loads(checked.out)["lost"]) == (0, 0), checked.err
    assert dead.dlctl("stop").code == 0
    assert dead.dlctl("verify").code == 0
    over = dead.dlctl("recover")
    words = " ".join(over.out.split())
    assert (over.code, "next dlctl start job.toml" in words) == (0, True)
    dead.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_a_run_that_dies_with_only_its_mirror_left_to_wait_for_ends(
    place: Workplace, state: str
) -> None:
    """Its servers have exited, and their shards are gone. It must not train again."""
    mount = place.path / "mount"
    mount.mkdir()
    place.task(pause_s=SLOW_S)
    stop = ENDLESS if state == "stopped" else "{ samples = 400 }"
    place.job(stop=stop, servers=2, more=f'mirror = "file://{mount}/store"')
    directory = place.start()
    place.until_step(5)
    mount.rename(place.path / "away")  # The last checkpoint cannot be uploaded.
    asked = place.begin("stop") if state == "stopped" else place.begin("wait")
    what = "the upload of the last checkpoint"
    place.until(what, lambda: what in str(place.run().get("waiting")), 60.0)
    step = place.run()["step"]
    asked.process.kill()
    place.kill_at_once(place.processes())
    assert not [*kept_shards.shared_memory().glob(f"{directory.name}/*.state")]
    (place.path / "away").rename(mount)

    back = place.dlctl("run", "job.toml")
    assert back.code == {"finished": 0, "stopped": 3}[state], back.err
    assert (place.directory, place.run()["state"]) == (directory, state)
    assert place.run()["step"] == step
    assert not place.events("resumed")
    name = [*checkpoints.complete(directory)][-1].name
    assert (mount / "store" / name / "manifest.json").exists()
    place.nothing_left()


@pytest.mark.long
def test_of_two_that_recover_at_once_one_wins_and_the_other_says_so(dead: Workplace) -> None:
    both = [dead.begin("recover"), dead.begin("recover")]
    ended = sorted((command.end() for command in both), key=lambda end: end.code)
    assert ended[0].code == 0, ended[0].err
    assert ended[1].code in (0, 1), ended[1].err
    dead.until("one coordinator", lambda: len(coordinators(dead)) == 1)
    assert len(dead.events("recover")) == 1
    assert dead.dlctl("stop").code == 0
    dead.nothing_left()


def coordinators(place: Workplace) -> list[psutil.Process]:
    return [p for p in place.processes() if "daemons.coordinator" in p.cmdline()]


@pytest.mark.long
def test_start_brings_back_what_is_whole(dead: Workplace) -> None:
    step, started_at = dead.run()["step"], started(dead.directory)
    ended = dead.dlctl("start", "job.toml")
    assert ended.code == 0, ended.err
    assert started(dead.directory) > started_at, "commands without a name refer to it now"
    assert dead.run()["step"] >= step
    assert dead.dlctl("stop").code == 0
    dead.nothing_left()


@pytest.mark.long
def test_without_a_shards_state_it_resumes_from_its_checkpoint_and_says_what_is_lost(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, more="", checkpoint_every_s=0.0)
    path = place.path / "job.toml"
    path.write_text(path.read_text().replace("count = 2", 'count = 2\nstate_dir = "STATES"', 1))
    path.write_text(path.read_text().replace("STATES", str(place.path / "states")))
    directory = place.start()
    place.until_step(10)
    assert place.dlctl("checkpoint").code == 0
    saved = place.until("it is on record", lambda: place.run().get("checkpoint"))["step"]
    place.until_step(saved + 10)
    place.kill_at_once(place.processes())
    (place.path / "states" / directory.name / "shard-1.state").unlink()

    asked = json.loads(place.dlctl("recover", "--dry-run", "--json").out)
    assert asked["way"] == "resume"
    assert asked["lost_steps"] == asked["step"] - saved >= 10
    assert asked["lost_updates"]["server-0"] > 0
    assert [text.partition(":")[0] for text in asked["obstacles"]] == ["server-1"]

    back = place.dlctl("recover")
    assert back.code == 0, back.err
    assert f"{asked['lost_steps']} steps" in back.out
    assert place.run()["step"] >= saved
    (event,) = place.events("resumed")
    assert re.findall(r"\d+", event)[:2] == [str(saved), str(asked["lost_steps"])]
    assert "(server-1: " in event
    checked = place.dlctl("verify")
    assert checked.code == 0, "since then"
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_when_nothing_is_left_it_says_so_and_how_to_begin_anew(dead: Workplace) -> None:
    from dlctl.job import config

    kept_shards.remove(dead.directory, config.Servers(count=2))
    ended = dead.dlctl("recover")
    assert ended.code == 1
    assert "dlctl start --fresh job.toml" in ended.err
    assert dead.dlctl("stop", "--kill").code == 0
    dead.nothing_left()


@pytest.mark.long
def test_stop_kill_keeps_the_agent_from_starting_its_coordinator_again(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    os.kill(place.pid("coordinator"), signal.SIGSTOP)
    ended = place.dlctl("stop", "--kill")
    assert ended.code == 0, ended.err
    place.nothing_left(timeout_s=1.0)
    run = place.run()
    assert (run["state"], run["reason"]) == ("stopped", "killed by dlctl stop --kill")
    assert place.dlctl("recover").out.count("nothing to recover") == 1


def copied(place: Workplace) -> Path:
    """A copy of the directory of a run that lives."""
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    directory = place.start()
    place.until_step(5)
    copy = place.path / "elsewhere" / directory.name
    shutil.copytree(directory, copy)
    return copy


@pytest.mark.long
def test_a_copy_of_a_living_run_is_refused(place: Workplace) -> None:
    copy = copied(place)
    for arguments in (["recover"], ["recover", "--dry-run"]):
        ended = place.dlctl(*arguments, str(copy))
        assert (ended.code, str(place.directory) in ended.err) == (1, True)
    assert place.dlctl("stop").code == 0
    ended = place.dlctl("recover", str(copy))
    assert (ended.code, str(place.directory) in ended.err) == (1, True)
    place.nothing_left()


@pytest.mark.long
def test_who_stops_or_kills_an_old_copy_does_no_harm_to_the_run(place: Workplace) -> None:
    """The copy takes its run for dead: it knows neither the coordinator nor the agent of now."""
    copy, first = copied(place), place.pid("coordinator")
    os.kill(first, signal.SIGKILL)
    # Not only begun: it would die with the agent that has begun it.
    place.until("the next one", lambda: place.pid("coordinator") != first)
    place.until_state("running")
    os.kill(place.pid("agent-0"), signal.SIGKILL)
    place.until("the next agent", lambda: place.daemon("agent-0")["incarnation"] == 2)
    place.until_state("running")
    at_work = {name: place.pid(name) for name in ("server-0", "worker-0")}

    def is_refused(*command: str) -> None:
        ended = place.dlctl(*command, "-j", str(copy))
        assert (ended.code, str(place.directory) in ended.err) == (1, True), ended.err

    for command in (["stop"], ["stop", "--kill"], ["scale", "worker=2"], ["restart", "*"]):
        is_refused(*command)
    step = place.run()["step"]
    place.until_step(step + 10)
    assert at_work == {name: place.pid(name) for name in at_work}
    place.kill_at_once(place.processes())
    is_refused("stop", "--kill")
    back = place.dlctl("recover")
    assert back.code == 0, back.err
    assert place.dlctl("verify").code == 0
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.timeout(120)  # Everything begins anew, one after the other.
@pytest.mark.long
def test_workers_come_and_go_and_daemons_begin_anew_while_it_trains(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    more = place.dlctl("scale", "worker=2")
    assert (more.code, more.out) == (0, "workers  1 -> 2  (new: worker-1)\n"), more.err
    assert place.daemon("worker-1")["state"] == "running"
    less = place.dlctl("scale", "worker=1")
    assert less.code == 0, less.err
    assert less.out.startswith("workers  2 -> 1  ")
    assert not place.daemon("worker-1")
    again = place.dlctl("restart", "*")
    assert again.code == 0, again.err
    assert again.out.splitlines() == [
        "NAME         INCARNATION",
        "coordinator  1 -> 2",
        "agent-0      1 -> 2",
        "server-0     1 -> 2",
        "worker-0     1 -> 2",
    ]
    step = place.run()["step"]
    place.until_step(step + 10)
    assert "nothing waits" in place.dlctl("why").out
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_request_reaches_the_coordinator_that_takes_the_place_of_a_dead_one(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    os.kill(place.pid("coordinator"), signal.SIGKILL)
    stopped = place.dlctl("stop")
    assert stopped.code == 0, stopped.err
    assert place.run()["state"] == "stopped"
    assert place.run()["checkpoint"]["step"] == place.run()["step"], "in order: nothing is lost"
    place.nothing_left()


@pytest.mark.long
def test_recover_does_the_work_of_an_agent_that_does_not(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, more="[timeouts]\nsilent_s = 3.0\n")
    place.start()
    place.until_step(5)
    agent = place.pid("agent-0")
    os.kill(agent, signal.SIGSTOP)
    coordinator = place.pid("coordinator")
    os.kill(coordinator, signal.SIGKILL)
    place.until("status tells", lambda: "the coordinator is gone (pid" in place.dlctl("status").out)
    assert "[coordinator-gone]" in place.dlctl("why").out
    back = place.dlctl("recover")
    assert back.code == 0, back.err
    assert place.pid("coordinator") != coordinator
    place.until("an agent that answers", lambda: place.pid("agent-0") != agent)
    assert place.dlctl("stop").code == 0
    place.nothing_left()
