"""Runs whose workers are Slurm jobs of their own: queued, preempted, queued again, one by one."""

from __future__ import annotations

import pytest
from hosts.jobs import ENDLESS, SLOW_S
from workplace import Workplace

from .slurm_cluster import SlurmCluster

pytestmark = pytest.mark.root

LONG_S = 90.0
HOG = (
    "#!/bin/bash\n#SBATCH --nodes={nodes} --exclusive --chdir=/ --output=/dev/null "
    "--partition=urgent\nsleep 600\n"
)


def begin(place: Workplace, slurm: SlurmCluster, **keys: str) -> None:
    """A run without an end with three workers, each a job."""
    place.task(pause_s=SLOW_S)
    more = slurm.section(jobs='"each"', requeue="true", cpus_per_node="4", **keys)
    place.job(stop=ENDLESS, servers=1, workers=3, more=more)
    place.start()


def states(place: Workplace) -> list[str]:
    return [place.daemon(f"worker-{n}")["state"] for n in range(3)]


def evict(slurm: SlurmCluster, place: Workplace, nodes: int) -> str:
    """Another user's job takes nodes from the run; returns its number."""
    script = slurm.directory / "hog.sh"
    script.write_text(HOG.format(nodes=nodes))
    hog = slurm.run("sbatch", "--parsable", str(script)).stdout.strip()
    place.until("it has its nodes", lambda: slurm.facts(hog).get("JobState") == "RUNNING", LONG_S)
    return hog


def controls(slurm: SlurmCluster) -> list[str]:
    """The numbers of the jobs of coordinators."""
    jobs = slurm.run("squeue", "-h", "-o", "%A %j").stdout.splitlines()
    return [line.split()[0] for line in jobs if "dlctl-control" in line]


@pytest.mark.long
def test_workers_whose_nodes_are_preempted_come_back_and_the_run_never_stops(
    slurm: SlurmCluster, place: Workplace
) -> None:
    begin(place, slurm)
    place.until("all train", lambda: states(place) == ["running"] * 3, LONG_S)
    for _ in range(2):
        hog = evict(slurm, place, 2)
        place.until("two are queued", lambda: states(place).count("queued") == 2, LONG_S)
        step = place.run()["step"]
        place.until_step(step + 20, LONG_S)
        run = place.run()
        assert run["state"] == "running"
        assert not run["problems"]
        slurm.run("scancel", hog)
        for job in slurm.jobs():  # A requeued job begins two minutes later.
            slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        place.until("all train", lambda: states(place) == ["running"] * 3, LONG_S)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_scale_changes_the_number_of_worker_jobs(slurm: SlurmCluster, place: Workplace) -> None:
    """`nodes` is the most of them; a job is there for each node that has workers."""

    def run(count: int) -> bool:
        names = [f"worker-{n}" for n in range(3)]
        at_work = [name for name in names if place.daemon(name).get("state") == "running"]
        return len(at_work) == count and len(slurm.jobs()) == count

    place.task(pause_s=SLOW_S)
    more = slurm.section(nodes=3, jobs='"each"', requeue="true", cpus_per_node="4")
    place.job(stop=ENDLESS, servers=1, workers=1, more=more)
    place.start()
    place.until("one job", lambda: run(1), LONG_S)
    for count in (3, 2, 3, 1):
        assert place.dlctl("scale", f"worker={count}", timeout_s=LONG_S).code == 0
        place.until(f"{count} jobs", lambda count=count: run(count), LONG_S)
        place.until_step(place.run()["step"] + 10, LONG_S)
        assert place.run()["state"] == "running"
        assert not place.run()["problems"]
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_the_login_node_holds_nothing_of_a_run_whose_coordinator_is_a_job(
    slurm: SlurmCluster,
) -> None:
    """Its time ends, and its node is lost: the next control job continues the run, and nothing is
    lost.
    """
    place = Workplace(slurm.cluster.enter, slurm.cluster.env, within=slurm.directory)
    try:
        place.task(pause_s=SLOW_S)
        more = slurm.section(
            jobs='"each"', requeue="true", cpus_per_node="2", control="{ cpus = 1 }", nodes="2"
        )
        place.job(stop=ENDLESS, servers=1, workers=2, more_servers='durability = "disk"', more=more)
        ended = place.dlctl("start", "job.toml", timeout_s=LONG_S)
        assert ended.code == 0, ended.err
        assert not [p for p in slurm.cluster.processes("lab") if "daemons." in str(p.cmdline())]
        assert place.dlctl("set", "worker-*", "push=5MB/s").code == 0, "from the login node"
        place.until_step(20, LONG_S)
        (first,) = controls(slurm)
        slurm.run("scancel", "--batch", "--signal=USR1", first)  # As before its time limit.
        place.until("the next one has begun", lambda: first not in controls(slurm), LONG_S)
        (control,) = controls(slurm)
        place.until_step(place.run()["step"] + 20, LONG_S)
        assert "running" in place.dlctl("status").out
        slurm.lose(slurm.facts(control)["NodeList"])
        place.until("it is queued", lambda: slurm.facts(control)["JobState"] == "PENDING", LONG_S)
        step = place.run()["step"]
        slurm.run("scontrol", "update", f"jobid={control}", "StartTime=now")
        place.until_step(step + 20, LONG_S)
        assert "running" in place.dlctl("status").out
        assert place.dlctl("stop").code == 0
        assert place.dlctl("verify").code == 0
        # The job that is about to end takes no new run.
        ended = place.dlctl("start", "job.toml", timeout_s=LONG_S)
        assert ended.code == 0, ended.err
        assert control not in slurm.jobs()
        (control,) = controls(slurm)
        place.until_step(step + 40, LONG_S)
        slurm.run("scontrol", "requeuehold", control)
        place.until("it is held", lambda: slurm.facts(control)["JobState"] == "PENDING", LONG_S)
        place.dlctl("stop")
        place.until("the queue is empty", lambda: not slurm.jobs(), LONG_S)
    finally:
        place.dlctl("stop", "--kill")
        place.close()
