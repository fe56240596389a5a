"""Histograms of how long work took."""

from __future__ import annotations

import numpy as np
import pytest

from dlctl.records.work_times import WorkTimes


def test_quantiles_are_within_a_bucket_of_the_true_ones() -> None:
    rng = np.random.default_rng(1)
    samples = np.exp(rng.normal(-6, 0.5, 5000))
    times = WorkTimes()
    for sample in samples:
        times.add(float(sample), float(sample))
    for share in (0.1, 0.5, 0.9):
        assert times.quantile(share) == pytest.approx(np.quantile(samples, share), rel=0.05)
    assert times.mean_s == pytest.approx(samples.mean())


def test_what_is_stored_is_read_and_added_up() -> None:
    first, second = WorkTimes(), WorkTimes()
    first.add(0.004, 0.003, count=4)
    second.add(1.0, 0.5)
    whole = WorkTimes.together([WorkTimes.of_json(first.to_json()), second, WorkTimes()])
    assert whole.count == sum(whole.histogram) == 5
    assert whole.wall_s == pytest.approx(1.004)
    assert whole.cpu_s == pytest.approx(0.503)
    assert WorkTimes().quantile(0.5) == 0.0
