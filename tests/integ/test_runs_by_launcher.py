"""Whole runs on two hosts of each launcher, of one that is installed beside dlctl, too: they train,
are killed, and recover. ssh and Slurm are pretended on this machine: `tests/kit/fake_launchers.py`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from operator import ge
from pathlib import Path

import fake_launchers
import pytest
from workplace import ENDLESS, SLOW_S, Workplace

TOYS = Path(__file__).parents[1] / "toys"
WRAPPER = """#!/bin/sh
echo "$1" >> {0}/wrapped
exec env "$@"
"""
SECTIONS = {
    "toy-boxes": """[launcher]
name = "toy-boxes"
boxes = 2
directory = "{0}/boxes"
wrapper = ["{0}/wrapper"]
""",
    "ssh": """[[hosts]]
ssh = "box-1"
dir = "{0}/boxes/box-1"
[[hosts]]
ssh = "box-2"
dir = "{0}/boxes/box-2"
""",
    "slurm": """[slurm]
nodes = 2
dir = "{0}/orders"
scratch = "{0}/boxes"
""",
}
pytestmark = pytest.mark.timeout(180)
every = pytest.mark.parametrize("launcher", ["toy-boxes", "ssh", "slurm"])


@pytest.fixture
def launcher() -> str:
    return "toy-boxes"


@pytest.fixture
def workers() -> int:
    return 2


@pytest.fixture
def place(place: Workplace, launcher: str, workers: int) -> Workplace:
    """The same with the toys installed, and a job on two hosts."""
    place.env["PYTHONPATH"] += os.pathsep + str(TOYS)
    place.env["PATH"] = f"{fake_launchers.install(place.path)}:{place.env['PATH']}"
    wrapper = place.path / "wrapper"
    wrapper.write_text(WRAPPER.format(place.path))
    wrapper.chmod(0o755)
    place.task(pause_s=SLOW_S)
    section = SECTIONS[launcher].format(place.path)
    place.job(stop=ENDLESS, servers=2, workers=workers, more=section)
    return place


def in_boxes(place: Workplace) -> list[Path]:
    """The task's file on the hosts."""
    return list((place.path / "boxes").rglob("task/train.py"))


def versions(place: Workplace) -> list[int]:
    rows = place.run()["daemons"]
    return [r["metrics"].get("version", 0) for r in rows if r["role"] == "server"]


def killed(place: Workplace, name: str) -> Callable[[], bool]:
    """Kill a daemon; the result tells whether another process of it is at work."""
    before = place.pid(name)
    os.kill(before, signal.SIGKILL)

    def is_replaced() -> bool:
        row = place.run() if name == "coordinator" else place.daemon(name)
        at_work = row.get("state") in ("running", "degraded")
        return at_work and row.get("pid") not in (None, before)

    return is_replaced


@pytest.mark.long
@every
def test_two_hosts_train_and_survive_the_deaths_of_worker_agent_and_coordinator(
    place: Workplace, launcher: str
) -> None:
    place.start()
    place.until_step(8)
    rows = {row["name"]: row["host"] for row in place.run()["daemons"]}
    first, second = ("node-1", "node-2") if launcher == "slurm" else ("box-1", "box-2")
    assert {rows[name] for name in ("agent-1", "server-0", "worker-0")} == {first}
    assert {rows[name] for name in ("agent-2", "server-1", "worker-1")} == {second}
    assert len(in_boxes(place)) == 2, "its files were sent to each"
    held = json.loads(place.dlctl("status", "--json").out)["allocation"]
    assert held == ("job 17" if launcher == "slurm" else None)
    for name in ("worker-1", "agent-1", "coordinator"):
        place.until(f"another {name}", killed(place, name))
    place.until_step(place.run()["step"] + 16)
    assert {row["restarts"] for row in place.run()["daemons"] if row["role"] == "server"} == {0}
    assert place.dlctl("stop").code == 0
    assert place.run()["state"] == "stopped", place.story()
    if launcher == "toy-boxes":
        wrapped = (place.path / "wrapped").read_text().split()
        assert set(wrapped) == {"DLCTL_HOST=box-1", "DLCTL_HOST=box-2"}
    place.nothing_left()
    assert in_boxes(place) == [], "nothing is left there"


@pytest.mark.long
@pytest.mark.parametrize("workers", [1])
@pytest.mark.parametrize("launcher", ["toy-boxes", "ssh"])
def test_hosts_on_which_no_process_is_left_go_on_where_they_were(place: Workplace) -> None:
    place.start()
    place.until_step(16)
    place.kill_at_once(place.processes())
    step, version = place.run()["step"], versions(place)
    asked = json.loads(place.dlctl("recover", "--dry-run", "--json").out)
    assert (asked["obstacles"], len(asked["shards"]), asked["away"]) == ([], 2, {})
    back = place.dlctl("recover")
    assert back.code == 0, back.err
    place.until("the servers go on", lambda: all(map(ge, versions(place), version)))
    place.until_step(step + 16)
    checked = place.dlctl("verify", "--json")
    assert (checked.code, json.loads(checked.out)["lost"]) == (0, 0), checked.err
    killed_all = place.dlctl("stop", "--kill")
    assert killed_all.code == 0, killed_all.err
    place.nothing_left()


@pytest.mark.long
def test_doctor_and_plan_reach_the_boxes(place: Workplace) -> None:
    planned = json.loads(place.dlctl("plan", "job.toml", "--json").out)
    hosts = {row["name"]: row["host"] for row in planned["daemons"]}
    assert (hosts["server-1"], hosts["worker-0"]) == ("box-2", "box-1")
    assert planned["daemons"][0]["address"] == "127.0.0.1"
    found = json.loads(place.dlctl("doctor", "job.toml", "--json").out)["findings"]
    logins = {row["place"]: row["mark"] for row in found if row["subject"] == "boxes"}
    assert logins == {"box-1": "ok", "box-2": "ok"}
    (place.path / "wrapper").unlink()
    found = json.loads(place.dlctl("doctor", "job.toml", "--json").out)["findings"]
    broken = [row["place"] for row in found if row["subject"] == "boxes" and row["mark"] != "ok"]
    assert broken == ["box-1", "box-2"]


@pytest.mark.long
def test_an_agent_that_cannot_be_placed_fails_the_start_with_its_words(place: Workplace) -> None:
    (place.path / "wrapper").write_text("#!/bin/sh\necho the box is locked >&2\nexit 3\n")
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert "the box is locked" in ended.err
    place.nothing_left()
