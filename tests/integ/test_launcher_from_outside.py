"""A launcher that is installed beside dlctl: its hosts train, are killed, and recover."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from workplace import ENDLESS, SLOW_S, Workplace

TOYS = Path(__file__).parents[1] / "toys"
WRAPPER = """#!/bin/sh
echo "$1" >> {place}/wrapped
exec env "$@"
"""


@pytest.fixture
def place(place: Workplace) -> Workplace:
    """The same with the toys installed, and a job on two boxes."""
    place.env["PYTHONPATH"] += os.pathsep + str(TOYS)
    wrapper = place.path / "wrapper"
    wrapper.write_text(WRAPPER.format(place=place.path))
    wrapper.chmod(0o755)
    section = (
        f'[launcher]\nname = "toy-boxes"\nboxes = 2\ndirectory = "{place.path}/boxes"\n'
        f'wrapper = ["{wrapper}"]\n'
    )
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, workers=2, more=section)
    return place


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


def test_two_boxes_train_and_survive_the_deaths_of_worker_agent_and_coordinator(
    place: Workplace,
) -> None:
    place.start()
    place.until_step(8)
    rows = {row["name"]: row["host"] for row in place.run()["daemons"]}
    assert {rows[name] for name in ("agent-1", "server-0", "worker-0")} == {"box-1"}
    assert {rows[name] for name in ("agent-2", "server-1", "worker-1")} == {"box-2"}
    box = place.path / "boxes" / "box-2" / "agent-2" / place.directory.name
    assert (box / "task" / "train.py").exists(), "its files were sent"
    for name in ("worker-1", "agent-1", "coordinator"):
        place.until(f"another {name}", killed(place, name))
    place.until_step(place.run()["step"] + 16)
    assert {row["restarts"] for row in place.run()["daemons"] if row["role"] == "server"} == {0}
    assert place.dlctl("stop").code == 0
    assert place.run()["state"] == "stopped", place.story()
    wrapped = (place.path / "wrapped").read_text().split()
    assert set(wrapped) == {"DLCTL_HOST=box-1", "DLCTL_HOST=box-2"}
    assert not list((place.path / "boxes").rglob("*.py")), "nothing is left in the boxes"
    place.nothing_left()


def test_boxes_of_which_no_process_is_left_go_on_where_they_were(place: Workplace) -> None:
    place.start()
    place.until_step(16)
    place.kill_at_once(place.processes())
    step, version = place.run()["step"], versions(place)
    asked = json.loads(place.dlctl("recover", "--dry-run", "--json").out)
    assert (asked["obstacles"], len(asked["shards"]), asked["away"]) == ([], 2, {})
    back = place.dlctl("recover")
    assert back.code == 0, back.err
    place.until("the servers go on", lambda: all(a >= b for a, b in zip(versions(place), version)))
    place.until_step(step + 16)
    checked = place.dlctl("verify", "--json")
    assert (checked.code, json.loads(checked.out)["lost"]) == (0, 0), checked.err
    killed_all = place.dlctl("stop", "--kill")
    assert killed_all.code == 0, killed_all.err
    place.nothing_left()


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


def test_an_agent_that_cannot_be_placed_fails_the_start_with_its_words(place: Workplace) -> None:
    (place.path / "wrapper").write_text("#!/bin/sh\necho the box is locked >&2\nexit 3\n")
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert "the box is locked" in ended.err
    place.nothing_left()
