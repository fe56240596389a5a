"""The ways a job comes to its end, and how it goes on afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl.runs import kept_shards


def _newest_checkpoint(place: Workplace) -> Path:
    return Path(place.run()["checkpoint"]["path"])


def test_a_stopped_job_goes_on_where_it_was_and_takes_every_sample_once(place: Workplace) -> None:
    place.task(pause_s=0.3, samples=128)
    seen = place.count_samples()
    place.job(stop="{ epochs = 2 }", workers=2, servers=2)
    first = place.start()
    place.until_step(6)
    assert place.dlctl("stop").code == 0
    place.nothing_left()
    stopped = place.run()
    before = load_file(_newest_checkpoint(place) / "shard-0.safetensors")
    assert stopped["state"] == "stopped"
    assert 6 <= stopped["step"] < 32

    ended = place.dlctl("run", "job.toml")

    assert ended.code == 0, ended.err
    assert f" step {stopped['step']}" in ended.err
    assert place.directory == first
    assert place.run()["step"] == 32, "16 batches of 8 samples, twice"
    assert seen() == dict.fromkeys(range(128), 2)
    after = load_file(_newest_checkpoint(place) / "shard-0.safetensors")
    assert (after["slot.sum"] >= before["slot.sum"]).all(), "Adagrad's sums"
    manifest = json.loads((_newest_checkpoint(place) / "manifest.json").read_text())
    assert manifest["step"] == 32
    place.nothing_left()


def test_ctrl_c_stops_in_order_and_saves(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    terminal = place.terminal("run", "job.toml")
    place.until_step(5)
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert "Ctrl-C again kills" in terminal.shown
    run = place.run()
    assert (run["state"], run["reason"]) == ("stopped", "stopped by Ctrl-C")
    assert run["checkpoint"]["step"] == run["step"] >= 5
    place.nothing_left()


@pytest.mark.long
def test_ctrl_c_twice_does_not_wait_for_anybody(place: Workplace) -> None:
    place.task(pause_s=60.0)
    place.job(stop=ENDLESS)
    terminal = place.terminal("run", "job.toml")
    place.until("it computes", lambda: place.daemon("worker-0").get("phase") == "computing")
    terminal.type(b"\x03")
    place.until("the worker drains", lambda: "draining: worker-0" in terminal.shown)
    began = time.monotonic()
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert time.monotonic() - began < 10
    assert "killing" in terminal.shown
    place.nothing_left()


@pytest.mark.long
def test_ctrl_c_in_start_only_leaves_and_says_how_to_stop(place: Workplace) -> None:
    place.job(stop=ENDLESS)
    terminal = place.terminal("start", "job.toml")
    place.until("it waits", lambda: "waiting for worker-0" in terminal.shown)
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert f"dlctl stop -j {place.directory.name}" in terminal.shown
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_closed_window_stops_an_attached_run_in_order(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    terminal = place.terminal("run", "job.toml")
    place.until_step(5)
    terminal.hang_up()
    assert terminal.end() == 129
    assert place.run()["checkpoint"]["step"] >= 5
    place.nothing_left()


@pytest.mark.long
def test_sigterm_to_the_coordinator_is_an_orderly_stop(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    place.start()
    place.until_step(5)
    os.kill(place.pid("coordinator"), signal.SIGTERM)
    place.until_state("stopped")
    assert place.run()["reason"] == "SIGTERM"
    assert place.run()["checkpoint"]["step"] >= 5
    place.nothing_left()


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("is_led", [True, False], ids=["led", "its coordinator is dead"])
def test_a_job_whose_run_directory_is_removed_ends(place: Workplace, is_led: bool) -> None:
    """Nobody could find it any more, and no command could end it."""
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS)
    directory = place.start()
    place.until_step(2)
    shards = kept_shards.shared_memory() / directory.name
    assert shards.exists()
    agent = psutil.Process(place.pid("agent-0"))
    if not is_led:
        agent.suspend()
        os.kill(place.pid("coordinator"), signal.SIGKILL)

    def remove() -> bool:
        shutil.rmtree(directory, ignore_errors=True)  # Something may be written there just now.
        return not directory.exists()

    place.until("the run directory is removed", remove)
    agent.resume()
    place.until("no process is left", lambda: not place.processes(), 15.0)
    assert not place.sockets()
    assert not shards.exists()
