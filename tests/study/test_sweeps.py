"""What a sweep varies, which points it tries, and what it writes into a job file."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from dlctl.errors import DlctlError, UsageError
from dlctl.jobfile.rewriting import rewritten
from dlctl.study import space
from dlctl.study.samplers import SAMPLERS, Known, Random, Tpe, importances
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
    points = Random(SPACE, 1).ask(0, 200, [])
    assert all(1e-4 <= p["inner.lr"] <= 1e-2 for p in points)
    assert {p["algorithm.local_steps"] for p in points} <= set(range(5, 51))
    assert sum(p["inner.lr"] < 1e-3 for p in points) == pytest.approx(100, abs=25)


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
    while points := sampler.ask(len(found), 4, known):
        found += points
        known += [Known(point, 0.0) for point in points]
    assert len(found) == 6
    assert len({(p["a"], p["b"]) for p in found}) == 6
    with pytest.raises(UsageError):
        SAMPLERS["grid"](SPACE, 0)


def test_a_generation_depends_on_its_number_and_seed_alone() -> None:
    first, second = Random(SPACE, 7).ask(3, 4, []), Random(SPACE, 7).ask(3, 4, [])
    assert first == second
    assert first != Random(SPACE, 8).ask(3, 4, [])
    assert first != Random(SPACE, 7).ask(4, 4, [])


def test_without_optuna_its_sampler_names_the_package() -> None:
    if extras.is_there("sweep"):
        known = [Known(point, point["inner.lr"]) for point in Random(SPACE, 0).ask(0, 30, [])]
        points = Tpe(SPACE, 0).ask(1, 8, known)
        assert points == Tpe(SPACE, 0).ask(1, 8, known)
        assert sum(point["inner.lr"] for point in points) / 8 < 2e-3
    else:
        with pytest.raises(DlctlError, match="optuna"):
            Tpe(SPACE, 0)


def test_the_key_that_matters_has_the_largest_share() -> None:
    points = Random(SPACE, 0).ask(0, 100, [])
    shares = importances(SPACE, [Known(p, p["inner.lr"] ** 2) for p in points])
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
