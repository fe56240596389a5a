"""Which methods are tried, and what is answered."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.study import advice, variants

MB = 10**6


def run(seconds: float | None, pushed: float = 1e6) -> dict[str, Any]:
    """One that reaches the target at this time; None: never."""
    metrics = {"accuracy": 0.5 if seconds is None else 0.99}
    row = {"metrics": metrics, "seconds": seconds or 9.0, "bytes": pushed, "samples": 10}
    return {"state": "finished", "evaluations": [row]}


def record(**runs: list[Any]) -> dict[str, Any]:
    plan = {"target": "accuracy >= 0.9"}
    return {"plan": plan, "runs": runs, "tuned": {name: {"inner.lr": 0.1} for name in runs}}


def test_links_that_are_slow_for_the_model_bring_methods_that_send_less() -> None:
    fast, slow = (advice.shortlist("easgd", 100 * MB, rate) for rate in (None, 10 * MB))
    assert fast[0] == slow[0] == "easgd"
    assert "downpour" in fast
    assert "downpour+topk" in slow
    assert "sparseloco" in slow
    assert advice.shortlist("sync", MB, 100 * MB) == advice.shortlist("sync", 0, None)
    assert len(set(advice.shortlist("sync", 0, None))) == len(advice.shortlist("sync", 0, None))


def test_the_fastest_is_taken_and_the_next_is_the_first_that_is_slower_for_sure() -> None:
    found = advice.of(
        record(
            sync=[run(2.0), run(2.1), run(2.2)],
            diloco=[run(1.0, 9e5), run(1.1, 9e5), run(1.2, 9e5)],
            downpour=[run(1.3), run(1.0), run(1.1)],
            ssp=[run(None), run(None), run(None)],
        )
    )
    assert found is not None
    assert found.best["method"] == "diloco"
    assert [row["method"] for row in found.rivals] == ["downpour"]
    assert found.next is not None
    assert found.next["method"] == "sync"
    assert found.next_costs == pytest.approx(2.1 / 1.1)
    assert found.cheapest["method"] == "diloco"
    assert "undecided" in found.sureness


def test_a_method_that_reaches_the_target_with_some_seeds_is_not_sure() -> None:
    found = advice.of(record(sync=[run(1.0), run(None), run(1.2)], ssp=[run(None)] * 3))
    assert found is not None
    assert found.next is None
    assert found.next_costs is None
    assert "2 of 3" in found.sureness


def test_it_is_faster_than_the_next_only_if_there_is_one() -> None:
    alone = advice.of(record(sync=[run(1.0), run(1.1), run(1.2)], ssp=[run(None)] * 3))
    two = advice.of(record(sync=[run(1.0), run(1.1), run(1.2)], ssp=[run(5.0)] * 3))
    assert alone is not None
    assert two is not None
    assert "3 of 3" in alone.sureness
    assert "next" not in alone.sureness
    assert "next" in two.sureness


def test_no_answer_where_none_reaches_the_target() -> None:
    assert advice.of(record(sync=[run(None)], ssp=[None])) is None


def test_a_variant_is_a_method_with_another_compression() -> None:
    document = {"algorithm": {"name": "sync"}, "compression": {"name": "none"}}
    changes = variants.overrides(document, "downpour+topk")
    assert changes["algorithm"] == {"name": "downpour"}
    assert changes["compression"] == {"name": "topk"}
    assert variants.overrides(document, "sync+int8")["compression"] == {"name": "int8"}
    with pytest.raises(Exception, match="topk"):
        variants.overrides(document, "downpour+topq")


def test_the_own_method_has_the_defaults_of_its_options():
    rounds = {"name": "split", "clients": "parallel", "local_steps": 2}
    changes = variants.overrides({"algorithm": rounds}, "split")
    assert (changes["optimizer"]["name"], changes["inner"]["name"]) == ("sgd", "sgd")
