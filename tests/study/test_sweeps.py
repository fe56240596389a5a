"""What a sweep varies, which points it tries, and what it writes into a job file."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from dlctl.errors import DlctlError, UsageError
from dlctl.jobfile.rewriting import rewritten
from dlctl.study import points, space
from dlctl.study.samplers import SAMPLERS, Known, Random, Sampler, Tpe, importances, untried
from dlctl.util import extras

SPACE = space.parse(["inner.lr=1e-4..1e-2:log", "algorithm.local_steps=5..50", "job.name=a,b"])


def test_ranges_lists_and_their_types() -> None:
    lr, steps, name = SPACE.values()
    assert isinstance(lr, space.ValueRange)
    assert (lr.is_log, lr.is_whole) == (True, False)
    assert isinstance(steps, space.ValueRange)
    assert steps.is_whole
    assert isinstance(name, space.Choices)
    assert name.values == ("a", "b")
    drawn = Random(SPACE, 1).ask(0, 200, [])
    assert all(1e-4 <= p["inner.lr"] <= 1e-2 for p in drawn)
    assert {p["algorithm.local_steps"] for p in drawn} <= set(range(5, 51))
    assert sum(p["inner.lr"] < 1e-3 for p in drawn) == pytest.approx(100, abs=25)


@pytest.mark.parametrize(
    "words",
    [["lr"], ["lr="], ["lr=2..1"], ["lr=0..1:log"], ["lr=a..b"], ["lr=1..2:cubic"], ["a=1", "a=2"]],
)
def test_what_is_no_space_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        space.parse(words)


def test_a_grid_has_every_point_once() -> None:
    axes = space.parse(["a=1,2,3", "b=x,y"])
    sampler, known, found = SAMPLERS["grid"](axes, 0), list[Known](), list[Any]()
    while asked := sampler.ask(len(found), 4, known):
        found += asked
        known += [Known(point, 0.0) for point in asked]
    assert len(found) == 6
    assert len({(p["a"], p["b"]) for p in found}) == 6
    with pytest.raises(UsageError):
        SAMPLERS["grid"](SPACE, 0)


FINITE = space.parse(["a=1,2,2", "b=x,y", "c=3..5"])


def all_of(sampler: Sampler) -> list[dict[str, Any]]:
    """What it gives in generations of four, of a space in which a smaller `c` is better."""
    known = list[Known]()
    while found := untried(sampler, len(known), 4, known):
        assert found == untried(sampler, len(known), 4, known)
        known += [Known(point, float(point["c"])) for point in found]
    return [dict(point.values) for point in known]


@pytest.mark.parametrize("name", ["grid", "random"])
def test_no_point_is_tried_twice_and_none_is_left_out(name: str) -> None:
    axes = FINITE if name == "random" else space.parse(["a=1,2,2", "b=x,y", "c=3,4,5"])
    found = [points.name(point) for point in all_of(SAMPLERS[name](axes, 0))]
    assert len(found) == len(set(found)) == space.count(axes) == 12


def test_values_that_were_drawn_before_are_drawn_again_elsewhere() -> None:
    axes = space.parse(["a=0..199999"])  # More than are listed.
    sampler = Random(axes, 0)
    first = sampler.ask(0, 4, [])
    assert untried(sampler, 0, 4, []) == first
    second = untried(sampler, 0, 4, [Known(point, 0.0) for point in first])
    assert len(second) == 4
    assert not [point for point in second if point in first]


def test_equal_numbers_of_two_types_are_two_values() -> None:
    (axis,) = space.parse(["a=1,1.0,true,1"]).values()
    assert isinstance(axis, space.Choices)
    assert list(map(repr, axis.values)) == ["1", "1.0", "True"]


def test_a_generation_depends_on_its_number_and_seed_alone() -> None:
    first, second = Random(SPACE, 7).ask(3, 4, []), Random(SPACE, 7).ask(3, 4, [])
    assert first == second
    assert first != Random(SPACE, 8).ask(3, 4, [])
    assert first != Random(SPACE, 7).ask(4, 4, [])


def test_without_optuna_its_sampler_names_the_package() -> None:
    if extras.is_there("sweep"):
        known = [Known(point, point["inner.lr"]) for point in Random(SPACE, 0).ask(0, 30, [])]
        found = Tpe(SPACE, 0).ask(1, 8, known)
        assert found == Tpe(SPACE, 0).ask(1, 8, known)
        assert sum(point["inner.lr"] for point in found) / 8 < 2e-3
        # A short training says less, however good it looks.
        worst = [Known(p, -1.0, 0) for p in Random(SPACE, 1).ask(0, 40, []) if p["inner.lr"] > 3e-3]
        found = Tpe(SPACE, 0).ask(1, 8, [*known, *worst])
        assert sum(point["inner.lr"] for point in found) / 8 < 2e-3
        assert len(all_of(Tpe(FINITE, 0))) == 12
    else:
        with pytest.raises(DlctlError, match="optuna"):
            Tpe(SPACE, 0)


def test_the_key_that_matters_has_the_largest_share() -> None:
    drawn = Random(SPACE, 0).ask(0, 100, [])
    shares = importances(SPACE, [Known(p, p["inner.lr"] ** 2) for p in drawn])
    assert shares["inner.lr"] == pytest.approx(1.0)
    assert max(shares["algorithm.local_steps"], shares["job.name"]) < 0.1
    assert importances(SPACE, []) == dict.fromkeys(SPACE, 0.0)


JOB = """# A job.
[job]
name = "a"   # its name

[inner]
name = "sgd"
lr = 0.1     # alpha
betas = [
    0.9, 0.99,
]
"""


def test_a_job_file_keeps_all_but_the_values() -> None:
    text = rewritten(JOB, {"inner.lr": 0.003, "job.name": 'b"c', "inner.nesterov": True, "x.y": 2})
    found = tomllib.loads(text)
    assert found["inner"]["lr"] == 0.003
    assert found["inner"]["nesterov"] is True
    assert found["job"]["name"] == 'b"c'
    assert found["x"]["y"] == 2
    assert found["inner"]["betas"] == [0.9, 0.99]
    for kept in ("# A job.", "# its name", "     # alpha"):
        assert kept in text
    with pytest.raises(UsageError):
        rewritten(JOB, {"inner.betas": 0.9})


@pytest.mark.parametrize(
    "before", ["{}", '{ target = "accuracy >= 0.9" }  # enough', "{ steps = 3 }"]
)
def test_an_inline_table_takes_a_further_key(before: str) -> None:
    text = rewritten(f"[job]\nstop = {before}\n", {"job.stop.epochs": 20})
    old, new = (tomllib.loads(each)["job"]["stop"] for each in (f"[job]\nstop = {before}", text))
    assert new == {**old, "epochs": 20}
    assert ("# enough" in text) == ("# enough" in before)
