"""Pushes are acknowledged long before the first step counts, which it does with its portion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from workplace import ENDLESS, TASK, Workplace

PUSHES = 6


@pytest.fixture
def in_it(place: Workplace) -> Workplace:
    """A run with some acknowledged pushes, in the middle of its first portions."""
    place.task(pause_s=0.1, samples=4096)
    name = place.job(stop=ENDLESS, workers=2)
    path = place.path / name
    path.write_text(path.read_text().replace("portion_batches = 2", "portion_batches = 200"))
    place.start()
    place.until("there are pushes", lambda: version(place) >= PUSHES)
    assert place.run()["step"] == 0
    return place


def version(place: Workplace) -> int:
    return place.daemon("server-0").get("metrics", {}).get("version", 0)


def none_lost(place: Workplace) -> int:
    """How many pushes were acknowledged, none of which is lost."""
    checked = place.dlctl("verify", "--json")
    assert checked.code == 0, checked.err + checked.out
    found = json.loads(checked.out)
    assert found["lost"] == 0
    return found["acknowledged"]


@pytest.mark.long
def test_a_stop_that_does_not_wait_for_the_portion_saves_what_was_acknowledged(
    in_it: Workplace,
) -> None:
    ended = in_it.dlctl("stop", "--grace", "0.2s")
    assert ended.code == 0, ended.err
    run = in_it.run()
    assert (run["state"], run["step"]) == ("stopped", 0)
    assert "checkpoint  step 0" in ended.err
    assert none_lost(in_it) >= PUSHES
    shard = load_file(Path(run["checkpoint"]["path"]) / "shard-0.safetensors")
    assert shard["slot.sum"].any(), "Adagrad's sums"
    in_it.nothing_left()


@pytest.mark.long
def test_start_goes_on_with_a_run_that_was_killed_then(in_it: Workplace) -> None:
    before = version(in_it)
    in_it.kill_at_once(in_it.processes())
    back = in_it.dlctl("start", "job.toml")
    assert back.code == 0, back.err
    in_it.until("the server goes on from its version", lambda: version(in_it) > before)
    assert none_lost(in_it) >= PUSHES
    assert in_it.dlctl("stop", "--grace", "0.2s").code == 0
    assert none_lost(in_it) >= PUSHES
    in_it.nothing_left()


@pytest.mark.long
def test_a_run_that_failed_in_its_first_batch_begins_anew_when_the_model_is_mended(
    place: Workplace,
) -> None:
    good = TASK.format(pause_s=0.0, samples=64)
    place.task(good.replace("nn.Linear(2, 8)", "nn.Linear(3, 8)"))
    place.job(stop="{ epochs = 1 }")
    failed = place.dlctl("run", "job.toml")
    assert (failed.code, "RuntimeError" in failed.err) == (7, True)
    first = place.directory
    assert "dlctl start job.toml" in place.dlctl("status").out
    place.task(good)
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    assert place.directory != first
    place.nothing_left()


@pytest.mark.long
def test_another_job_file_is_no_reason_to_give_it_up_without_a_word(in_it: Workplace) -> None:
    in_it.kill_at_once(in_it.processes())
    path = in_it.path / "job.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    refused = in_it.dlctl("start", "job.toml")
    assert refused.code == 1
    assert "dlctl start --fresh" in refused.err
    assert "next: dlctl recover -j " in refused.err
    assert in_it.dlctl("recover").code == 0
    assert in_it.dlctl("stop", "--grace", "0.2s").code == 0
    assert none_lost(in_it) >= PUSHES
    in_it.nothing_left()
