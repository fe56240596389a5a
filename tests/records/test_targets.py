"""The target of a run: a metric and a bound."""

from __future__ import annotations

import pytest

from dlctl.records.best import Target


@pytest.mark.parametrize(
    ("text", "metrics", "reached"),
    [
        ("accuracy >= 0.85", {"accuracy": 0.85}, True),
        ("accuracy >= 0.85", {"accuracy": 0.84}, False),
        ("loss<1e-3", {"loss": 0.0001}, True),
        ("test/loss < -0.5", {"test/loss": -1.0}, True),
        ("accuracy > 0.5", {"loss": 1.0}, False),
    ],
)
def test_a_target_is_a_metric_and_a_bound(
    text: str, metrics: dict[str, float], reached: bool
) -> None:
    assert Target.parse(text).is_reached(metrics) is reached


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy = 1", ">= 1", "a >= b", "a >= 1 2"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="metric"):
        Target.parse(text)
