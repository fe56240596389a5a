"""Jobs on the nodes of a real Slurm: they train, lose daemons and nodes, and are taken off."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from hosts.jobs import (
    ENDLESS,
    SLOW_S,
    digits_on_hosts,
    hurry,
    kill,
    until_moved,
    write_digits,
    write_loop,
)
from workplace import Workplace

from .slurm_cluster import SlurmCluster

pytestmark = pytest.mark.root

PROJECT = Path(__file__).parents[2]
LONG_S = 90.0
WAITS = "is pending: Resources"
ALL_WAIT = f"agent-1, agent-2, agent-3 (job 2 {WAITS})"
HOG = "#!/bin/bash\n#SBATCH --nodes=3 --exclusive --chdir=/ --output=/dev/null\nsleep 600\n"


def write_job(place: Workplace, slurm: SlurmCluster, more: str = "", **keys: str) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, workers=3, more=slurm.section(**keys) + more)


def begin(place: Workplace, slurm: SlurmCluster, more: str = "", **keys: str) -> str:
    """A job without an end on three nodes, at work; returns its number in Slurm."""
    write_job(place, slurm, more, **keys)
    place.start()
    (job,) = slurm.jobs()
    return job


def begin_in_queue(place: Workplace, slurm: SlurmCluster) -> str:
    """A job that waits for its nodes; returns the number of the job that has them all."""
    (slurm.directory / "hog.sh").write_text(HOG)
    hog = slurm.run("sbatch", "--parsable", str(slurm.directory / "hog.sh")).stdout.strip()
    place.until("it has all nodes", lambda: slurm.facts(hog).get("JobState") == "RUNNING")
    write_job(place, slurm)
    assert place.dlctl("start", "--no-wait", "job.toml").code == 0
    place.until("it waits", lambda: place.run().get("waiting") == ALL_WAIT)
    return hog


# ---------------------------------------------------------------- in the queue; without torch


def test_a_job_that_slurm_refuses_fails_the_start_in_slurm_s_own_words(
    slurm: SlurmCluster, place: Workplace
) -> None:
    write_job(place, slurm, partition='"nowhere"')
    (place.path / "job.toml").write_text(
        (place.path / "job.toml").read_text() + '[network]\naddress = "10.99.0.1"\n'
    )
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert "invalid partition specified: nowhere" in ended.err
    assert not slurm.jobs()
    place.nothing_left()


@pytest.mark.long
def test_a_job_in_the_queue_says_why_it_waits_and_is_taken_out_by_stop(
    slurm: SlurmCluster, place: Workplace
) -> None:
    hog = begin_in_queue(place, slurm)
    status = place.dlctl("status").out
    assert "pending: Resources" in status
    assert "slurm       job 2" in status
    for private in (*slurm.directory.glob("orders/*"), *slurm.directory.glob("orders/*/*.order")):
        assert private.stat().st_mode & 0o077 == 0, f"{private} is for nobody else"
    orders = [str(path) for path in slurm.orders()]
    as_another = ("runuser", "-u", "nobody", "--", "cat", str(slurm.directory / "slurm.conf"))
    assert slurm.run(*as_another, *orders).stdout == (slurm.directory / "slurm.conf").read_text()
    assert place.dlctl("stop").code == 0
    assert slurm.jobs() == [hog]
    slurm.run("scancel", hog)
    place.until("the queue is empty", lambda: not slurm.jobs())
    place.nothing_left()


@pytest.mark.long
def test_a_coordinator_that_dies_while_its_job_waits_is_replaced_and_submits_no_second_one(
    slurm: SlurmCluster, place: Workplace
) -> None:
    hog = begin_in_queue(place, slurm)
    place.until("its number is known", lambda: "job 2" in place.run().get("waiting", ""))
    os.kill(place.pid("coordinator"), signal.SIGKILL)
    place.until("another one leads", lambda: place.run().get("incarnation") == 2)
    place.until("it still waits", lambda: WAITS in place.daemon("agent-3").get("phase", ""))
    assert slurm.jobs() == ["2", hog]
    slurm.run("scancel", hog)
    place.until_state("running", timeout_s=LONG_S)
    assert slurm.jobs() == ["2"]
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ('python = "/no/python"', "execve(): /no/python: No such file or directory"),
        ('dir = "{place}"', "dir of launcher slurm has to be on a shared file system"),
    ],
)
def test_nodes_that_cannot_start_a_keeper_fail_the_start_and_say_why(
    slurm: SlurmCluster, place: Workplace, section: str, reason: str
) -> None:
    key, _, value = section.format(place=place.path / "alone").partition(" = ")
    write_job(place, slurm, **{key: value})
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert reason in ended.err
    place.nothing_left()


@pytest.mark.long
def test_a_job_that_waits_too_long_is_given_up(slurm: SlurmCluster, place: Workplace) -> None:
    write_job(place, slurm, queue_s="1.0", extra='["--begin=now+1hour"]')
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert "is pending: BeginTime for 1.0s" in ended.err
    place.nothing_left()


# ---------------------------------------------------------------- at work


@pytest.mark.long
def test_two_servers_and_four_workers_on_three_nodes_train_digits_without_sacct(
    slurm: SlurmCluster, place: Workplace
) -> None:
    asked = slurm.cluster.directory / "sacct-was-asked"
    trap = slurm.cluster.directory / "bin" / "sacct"
    trap.write_text(f"#!/bin/sh\ntouch {asked}\nexit 1\n")
    trap.chmod(0o755)
    digits = PROJECT / "examples" / "digits"
    (place.path / "job.toml").write_text((digits / "job.toml").read_text())
    (place.path / "train.py").write_text(digits_on_hosts(slurm.cluster))
    with (place.path / "job.toml").open("a") as file:
        file.write(f"\n{slurm.section()}")
    ended = place.dlctl("run", "job.toml", timeout_s=120)
    assert ended.code == 0, ended.err
    run = place.run()
    assert run["state"] == "finished"
    assert run["evaluation"]["accuracy"] >= 0.95
    hosts = {row["name"]: row["host"] for row in run["daemons"]}
    assert [hosts[f"agent-{i}"] for i in range(4)] == ["lab", "h1", "h2", "h3"]
    assert {hosts[name] for name in hosts if name.startswith("worker")} == {"h1", "h2", "h3"}
    assert place.dlctl("checkpoint", "verify").code == 0, "all of it is here"
    assert place.dlctl("verify").code == 0
    assert slurm.facts("1")["JobState"] == "COMPLETED"
    assert not asked.exists()
    place.nothing_left()


@pytest.mark.long
def test_whoever_is_killed_on_a_node_the_run_goes_on(slurm: SlurmCluster, place: Workplace) -> None:
    job = begin(place, slurm)
    place.until_step(10)
    for node, name in (("h1", "agent-1"), ("h2", "server-1"), ("h3", "worker-2")):
        kill(slurm.cluster, node, name)
        place.until(f"{name} begins anew", lambda name=name: place.daemon(name)["incarnation"] == 2)
        place.until_state("running", timeout_s=LONG_S)
        place.until_step(place.run()["step"] + 20)
    os.kill(place.pid("coordinator"), signal.SIGKILL)
    place.until_step(place.run()["step"] + 20)
    place.until_state("running")
    agents = [place.daemon(f"agent-{i}")["incarnation"] for i in range(4)]
    assert agents == [1, 2, 1, 1], "who lives goes on"
    assert slurm.jobs() == [job]
    controller = int((slurm.directory / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGKILL)
    place.until_step(place.run()["step"] + 200, LONG_S)
    assert place.run()["state"] == "running", "nobody misses Slurm's controller"
    slurm.start_controller()
    assert place.dlctl("scale", "worker=4").code == 0
    assert place.dlctl("set", "worker-*", "push=5MB/s").code == 0
    assert place.dlctl("checkpoint").code == 0
    assert place.dlctl("stop").code == 0
    assert slurm.facts(job)["JobState"] == "COMPLETED"
    assert place.run()["checkpoint"]["step"] == place.run()["step"], "nothing is lost"
    place.nothing_left()


@pytest.mark.long
def test_a_stopped_run_goes_on_from_its_checkpoint_in_another_job(
    slurm: SlurmCluster, place: Workplace
) -> None:
    first = begin(place, slurm)
    secret = json.loads(next(slurm.directory.glob("orders/*/agent-1.order")).read_text())["secret"]
    for node in slurm.cluster.names:
        for process in slurm.processes(node):
            files = (Path(f"/proc/{process.pid}/{file}") for file in ("cmdline", "environ"))
            assert all(secret.encode() not in file.read_bytes() for file in files)
    place.until_step(20)
    assert place.dlctl("stop").code == 0
    step = place.run()["step"]
    assert not slurm.orders()
    place.start()
    place.until_step(step + 20)
    (second,) = slurm.jobs()
    assert second != first
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_scancel_from_outside_is_named_and_nothing_is_left(
    slurm: SlurmCluster, place: Workplace
) -> None:
    job = begin(place, slurm)
    place.until_step(10)
    assert place.dlctl("checkpoint").code == 0
    slurm.run("scancel", job)
    place.until_state("failed", timeout_s=LONG_S)
    reason = f"the Slurm job {job} was cancelled, and not by dlctl (CANCELLED)"
    assert place.run()["reason"] == reason
    place.until("nobody is left", lambda: not any(map(slurm.daemons, slurm.living())), LONG_S)
    place.nothing_left(timeout_s=20.0)
    place.start()
    place.until_step(place.run()["checkpoint"]["step"] + 10)
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_before_its_time_limit_a_run_is_saved_and_stopped(
    slurm: SlurmCluster, place: Workplace
) -> None:
    job = begin(place, slurm, time='"2m"', notice_s="60.0")
    place.until_state("stopped", timeout_s=LONG_S)
    reason = f"job {job} is about to reach its time limit of 00:02:00"
    assert place.run()["reason"] == reason
    assert place.run()["checkpoint"]["step"] == place.run()["step"] > 0
    place.nothing_left(timeout_s=20.0)
    assert slurm.facts(job)["JobState"] == "COMPLETED"


@pytest.mark.long
def test_a_run_whose_job_is_queued_again_waits_and_goes_on(
    slurm: SlurmCluster, place: Workplace
) -> None:
    job = begin(place, slurm, requeue="true")
    place.until_step(20)
    slurm.run("scontrol", "requeue", job)
    waits = f"job {job} is pending again: BeginTime"
    place.until("it waits", lambda: waits in place.daemon("agent-1").get("phase", ""), LONG_S)
    step = place.run()["step"]
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    place.until_step(step + 20, timeout_s=LONG_S)
    place.until_state("running", timeout_s=LONG_S)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0, "the shards were on their nodes still"
    place.nothing_left()


@pytest.mark.long
def test_a_run_that_comes_back_to_nodes_without_its_shards_says_so_and_start_goes_on(
    slurm: SlurmCluster, place: Workplace
) -> None:
    job = begin(place, slurm, requeue="true")
    place.until_step(20)
    assert place.dlctl("checkpoint").code == 0
    slurm.run("scontrol", "requeue", job)
    waits = f"job {job} is pending again: BeginTime"
    place.until("it waits", lambda: waits in place.daemon("agent-1").get("phase", ""), LONG_S)
    for node in ("h1", "h2"):  # In their own memory, not in this machine's.
        shutil.rmtree(slurm.cluster.files(node) / f"dev/shm/dlctl-{os.getuid()}")
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    place.until_state("failed", timeout_s=LONG_S)
    reason = "there is none; start the run again: it resumes from its newest checkpoint"
    assert reason in place.run()["reason"]
    place.nothing_left(timeout_s=20.0)
    assert not slurm.jobs(), "its nodes are given back"
    saved = place.run()["checkpoint"]["step"]
    place.start()
    place.until_step(saved + 20)
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("requeue", ["true", "false"])
def test_a_run_that_has_to_make_room_is_queued_again_only_if_it_may_be(
    slurm: SlurmCluster, place: Workplace, requeue: str
) -> None:
    job = begin(place, slurm, requeue=requeue)
    place.until_step(20)
    assert place.dlctl("checkpoint").code == 0
    (slurm.directory / "hog.sh").write_text(HOG)
    urgent = ("sbatch", "--parsable", "--partition=urgent", str(slurm.directory / "hog.sh"))
    hog = slurm.run(*urgent).stdout.strip()
    if requeue == "false":
        place.until_state("failed", timeout_s=LONG_S)
        reason = f"the Slurm job {job} was preempted by another job (PREEMPTED)"
        assert place.run()["reason"] == reason
        slurm.run("scancel", hog)
    else:
        waits = f"job {job} is pending again: "
        place.until("it waits", lambda: waits in place.daemon("agent-1").get("phase", ""), LONG_S)
        step = place.run()["step"]
        slurm.run("scancel", hog)
        slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        place.until_step(step + 20, timeout_s=LONG_S)
        assert place.dlctl("stop").code == 0
    place.until("the queue is empty", lambda: not slurm.jobs(), LONG_S)
    place.nothing_left(timeout_s=20.0)


@pytest.mark.long
def test_the_workers_of_a_node_that_is_lost_go_on_elsewhere(
    slurm: SlurmCluster, place: Workplace
) -> None:
    begin(place, slurm, "[timeouts]\nsilent_s = 2.0\nhost_s = 6.0\n")
    place.until_step(20)
    slurm.lose("h3")
    until_moved(place)
    ended = place.dlctl("stop")
    assert ended.code in (0, 8), ended.err
    place.until("the job is gone", lambda: not slurm.jobs(), LONG_S)
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_group_learns_while_a_worker_is_killed_and_a_node_is_lost(
    slurm: SlurmCluster, place: Workplace
) -> None:
    write_digits(slurm.cluster, place, "allreduce", slurm.section())
    ended = place.dlctl("validate", "job.toml")
    assert ended.code == 2
    assert "[network] private = true" in " ".join(ended.err.split())
    limits = "[timeouts]\nsilent_s = 5.0\nhost_s = 10.0\n"
    write_digits(
        slurm.cluster, place, "allreduce", f"{slurm.section()}[network]\nprivate = true\n{limits}"
    )
    place.start()
    place.until_step(20)
    kill(slurm.cluster, "h2", "worker-1")
    place.until("it begins anew", lambda: place.daemon("worker-1")["incarnation"] == 2, LONG_S)
    slurm.lose("h3")
    until_moved(place)
    hurry(slurm.cluster, slurm.living())
    place.until_state("finished", "failed", timeout_s=240.0)
    run = place.run()
    assert run["state"] == "finished", place.story()
    assert run["evaluation"]["accuracy"] >= 0.9
    place.until("the job is gone", lambda: not slurm.jobs(), LONG_S)
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_stop_kill_ends_a_run_that_nobody_leads_any_more(
    slurm: SlurmCluster, place: Workplace
) -> None:
    begin(place, slurm)
    place.until_step(5)
    home = [psutil.Process(place.pid(name)) for name in ("coordinator", "agent-0")]
    place.kill_at_once(home)
    assert slurm.daemons("h1")
    ended = place.dlctl("stop", "--kill")
    assert ended.code == 0, ended.err
    place.until("nobody is left", lambda: not any(map(slurm.daemons, slurm.living())), LONG_S)
    place.nothing_left()


@pytest.mark.long
def test_a_script_with_its_own_loop_trains_and_returns_when_it_is_killed(
    slurm: SlurmCluster, place: Workplace
) -> None:
    write_loop(place, 3, slurm.section())
    place.start()
    place.until_step(20, LONG_S)
    kill(slurm.cluster, "h2", "worker-1")
    place.until("it begins anew", lambda: place.daemon("worker-1")["incarnation"] == 2, LONG_S)
    place.until("it trains", lambda: place.daemon("worker-1")["state"] == "running", LONG_S)
    hurry(slurm.cluster, slurm.living())
    place.until_state("finished", "failed", timeout_s=240.0)
    run = place.run()
    assert run["state"] == "finished", place.story()
    assert run["evaluation"]["accuracy"] >= 0.8
    place.until("the job is gone", lambda: not slurm.jobs(), LONG_S)
    place.nothing_left()
