"""How a comparison tunes and judges, without any run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from dlctl import jobfile, registry
from dlctl.job.config import JobFile
from dlctl.records.best import Target
from dlctl.study import judging, table, tuning, variants
from dlctl.study.judging import Middle, is_better, reached, score
from dlctl.study.tuning import PatternSearch, TunedKey

TARGET = Target.parse("accuracy >= 0.9")


def outcome(*accuracies: float, state: str = "finished") -> dict[str, Any]:
    rows = [
        {
            "seconds": float(n),
            "bytes": 10.0 * n,
            "samples": 100.0 * n,
            "metrics": {"accuracy": each},
        }
        for n, each in enumerate(accuracies)
    ]
    return {"state": state, "evaluations": rows}


def test_the_target_is_reached_at_the_first_crossing() -> None:
    found = reached(outcome(0.5, 0.91, 0.8, 0.95), TARGET)
    assert found is not None
    assert (found.seconds, found.bytes, found.samples) == (1.0, 10.0, 100.0)
    assert reached(outcome(0.5, 0.89), TARGET) is None


def test_a_run_that_reached_it_beats_one_that_did_not_and_both_a_failed_one() -> None:
    good, bad = outcome(0.5, 0.95), outcome(0.5, 0.89)
    order = [good, outcome(0.5, 0.6, 0.95), bad, outcome(0.5), outcome(0.99, state="failed"), None]
    scores = [score(each, TARGET) for each in order]
    assert scores == sorted(scores)


def test_smaller_is_better_where_the_target_says_so() -> None:
    target = Target.parse("accuracy <= 0.1")
    assert score(outcome(0.5, 0.2), target) < score(outcome(0.5, 0.4), target)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.0], [2.0, 2.2, 1.9, 2.1, 2.0], True),
        ([2.0, 2.2, 1.9, 2.1, 2.0], [1.0, 1.1, 0.9, 1.0, 1.0], False),
        ([1.0, 2.0, 3.0], [2.0, 1.0, 3.5], None),
        ([1.0, 5.0, 9.0, 1.0, 9.0], [1.1, 5.1, 9.1, 4.0, 19.0], None),
        ([1.0, 1.0, 1.0], [None, None, None], True),
        ([None, None], [None, None], None),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, None, None], True),
        ([1.0, 5.0, 9.0, 1.0, 9.0], [1.1, 5.1, 9.1, 4.0, None], None),
        ([1.0, 5.0, 9.0, 1.0, 9.0], [1.1, 8.0, None, None, None], True),
    ],
)
def test_who_is_better_is_decided_by_seeds_and_spread(
    first: list[float | None], second: list[float | None], verdict: bool | None
) -> None:
    assert is_better(first, second) is verdict


def test_the_search_finds_a_minimum_far_from_the_middle_and_spends_no_more() -> None:
    keys = [TunedKey("inner.lr", 0.01, 10.0), TunedKey("algorithm.local_steps", 9, 3.0, True)]
    search = PatternSearch(keys, trials=40)
    while points := search.ask():
        values = [search.values(point) for point in points]
        distances = [
            abs(point[0] - 4) + abs(point[1] + 2) for point in points
        ]  # best: lr 100, one local step
        assert len({tuple(each.items()) for each in values}) == len(points)
        search.tell({point: (1, float(d)) for point, d in zip(points, distances, strict=True)})
    assert search.values(search.best) == {"inner.lr": 100.0, "algorithm.local_steps": 1}
    assert len(search.scores) <= 40


def a_job(method: str) -> JobFile:
    own = Path(__file__).parents[2] / "examples/digits/job.toml"
    text = tomllib.loads(own.read_text())
    return jobfile.load(own, variants.overrides(text, method))


@pytest.mark.parametrize("name", ["easgd", "eamsgd", "easgd-atomic"])
def test_a_rate_that_the_method_does_not_let_vary_is_not_tuned(name: str) -> None:
    names = [key.name for key in tuning.keys_of(a_job(name), None)]
    assert names == ["inner.lr", "algorithm.exchange_every_steps"]


@pytest.mark.parametrize("name", ["streaming-diloco", "decoupled-diloco"])
@pytest.mark.parametrize("steps", [None, 40.0, 1000.0])
def test_an_interval_stays_where_the_method_accepts_it(name: str, steps: float | None) -> None:
    job = a_job(name)
    options, check = job.algorithm.options, registry.load("algorithms", name).check
    key = tuning.keys_of(job, steps)[-1]
    for place in range(-8, 9):
        options["local_steps"] = key.value(place)
        assert check(job) == []
    options["local_steps"] = key.low - 1
    assert check(job) != []


def test_without_keys_there_is_one_trial() -> None:
    search = PatternSearch((), trials=8)
    search.tell(dict.fromkeys(search.ask(), (0, 1.0)))
    assert search.ask() == []
    assert search.best == ()


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN["algorithms"]))
def test_a_variant_has_the_method_s_own_defaults(name: str) -> None:
    document = {"algorithm": {"name": "downpour"}, "servers": {"count": 2}, "inner": {"lr": 1.0}}
    method, changes = registry.load("algorithms", name), variants.overrides(document, name)
    if name == "downpour":
        assert "algorithm" not in changes
        assert "inner" not in changes
        return
    assert changes["inner"]["name"] == method.inner.name
    if not method.shape.needs_servers:
        assert changes["servers"] == {"count": 0}


def test_the_table_is_ordered_and_compares_neighbours() -> None:
    runs = {
        "slow": [outcome(0.1, 0.1, 0.1, 0.95)] * 3,
        "fast": [outcome(0.1, 0.95)] * 3,
        "never": [outcome(0.1, 0.2), None, outcome(0.3, state="failed")],
    }
    tuned = {name: {"inner.lr": 0.1} for name in runs}
    found = table.rows({"plan": {"target": str(TARGET)}, "runs": runs, "tuned": tuned})
    assert [row["method"] for row in found] == ["fast", "slow", "never"]
    assert [row["verdict"] for row in found] == ["", "slower", "never"]
    assert found[2]["failed"] == 2
    assert found[1]["seconds"]["median"] == 3.0


def test_of_those_that_never_reach_the_target_the_closest_is_first() -> None:
    runs = {"far": [outcome(0.1, 0.2)], "dead": [None], "near": [outcome(0.8, 0.7)]}
    tuned = {name: {} for name in runs}
    found = table.rows({"plan": {"target": str(TARGET)}, "runs": runs, "tuned": tuned})
    assert [row["method"] for row in found] == ["near", "far", "dead"]


def test_quartiles() -> None:
    assert Middle.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Middle(3.0, 2.0, 4.0)
    assert Middle.of([]) is None
    assert judging.best_value(outcome(), "accuracy", is_more_better=True) is None


@pytest.mark.parametrize(("name", "count"), [(variants.ALONE, 1), (variants.DDP, 4)])
def test_rows_beside_the_methods_have_an_optimiser_and_no_servers(name: str, count: int) -> None:
    document = {"algorithm": {"name": "downpour"}, "workers": {"count": 4, "batch_size": 8}}
    changes = variants.overrides(document, name)
    assert changes["servers"] == {"count": 0}
    assert changes["inner"]["name"] != "none"
    workers = {**document["workers"], **changes.get("workers", {})}
    assert workers == {"count": count, "batch_size": 8}
