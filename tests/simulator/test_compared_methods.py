"""`dlctl compare`: the same table again, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from workplace import Workplace


@pytest.fixture
def place() -> Iterator[Workplace]:
    place = Workplace()
    place.job(workers=2, stop="{ epochs = 6 }")
    yield place
    place.close()


def test_a_comparison_is_repeated_exactly(place: Workplace) -> None:
    methods = "downpour,torch,ddp"
    arguments = ["--methods", methods, "--target", "accuracy >= 0.9", "--seeds", "2"]
    ended = place.dlctl("compare", "job.toml", *arguments, "--tune", "2", "--json", timeout_s=120)
    assert ended.code == 0, ended.err
    first = json.loads(ended.out)
    assert {row["method"] for row in first["rows"]} == set(methods.split(","))
    assert all(row["seeds"] == 2 and not row["failed"] for row in first["rows"])
    record = f"{first['directory']}/comparison.json"
    ended = place.dlctl("compare", "--again", record, "--json", "--slots", "1", timeout_s=120)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["rows"] == first["rows"]
    assert "not the same" not in ended.err
    place.job(workers=3, stop="{ epochs = 6 }")
    ended = place.dlctl("compare", "--again", record)
    assert ended.code == 2
    assert "job file" in ended.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--methods", "downpour,dilco", "--target", "accuracy >= 0.9"], "diloco"),
        (["--methods", "downpour"], "target"),
        (["--methods", "downpour", "--target", "good"], "--target"),
        (["--methods", "downpour,hogwild", "--target", "accuracy >= 0.9"], "hogwild"),
        ([], "methods"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(
    place: Workplace, command_at: Callable[..., Any], arguments: list[str], word: str
) -> None:
    ended = command_at(place, "compare", "job.toml", *arguments)
    assert ended.code == 2, ended.err
    assert word in ended.err
    assert not list(place.path.glob("runs/*"))


@pytest.mark.long
def test_final_runs_may_be_real(place: Workplace) -> None:
    methods = "downpour,torch,ddp"
    arguments = ["--methods", methods, "--target", "accuracy >= 0.9", "--seeds", "1"]
    ended = place.dlctl(
        "compare", "job.toml", *arguments, "--tune", "1", "--real", "--json", timeout_s=120
    )
    assert ended.code == 0, ended.err
    rows = {row["method"]: row for row in json.loads(ended.out)["rows"]}
    assert all(row["reached"] == 1 for row in rows.values())
    assert rows["torch"]["bytes"]["median"] == 0 < rows["ddp"]["bytes"]["median"]
    # None of them is a run of the job.
    assert json.loads(place.dlctl("plan", "job.toml", "--json").out)["run_id"] is None


def test_advice_is_one_method_in_five_lines_and_changes_the_job(place: Workplace) -> None:
    arguments = ["--target", "accuracy >= 0.5", "--methods", "sync,hogwild", "--seeds", "1"]
    ended = place.dlctl("advise", "job.toml", *arguments, "--tune", "1", "--write", timeout_s=120)
    assert ended.code == 0, ended.err
    assert "hogwild is left out" in ended.err
    lines = ended.out.splitlines()
    assert len(lines) == 5
    assert lines[0].split()[1].strip(",") == "sync"
    assert 'name = "sync"' in (place.path / "job.toml").read_text()


@pytest.mark.long
def test_without_a_method_that_reaches_the_target_there_is_no_advice(place: Workplace) -> None:
    arguments = ["--target", "accuracy >= 2", "--methods", "sync", "--seeds", "1", "--tune", "1"]
    before = (place.path / "job.toml").read_text()
    ended = place.dlctl("advise", "job.toml", *arguments, "--write", timeout_s=120)
    assert ended.code == 4, ended.err
    assert "stop" in ended.err
    assert (place.path / "job.toml").read_text() == before
