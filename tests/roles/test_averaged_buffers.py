"""The mean of the replicas' buffers, and which answer to a question for it counts."""

from __future__ import annotations

import numpy as np
import pytest

from dlctl.flat import AVERAGED, Entry, Layout
from dlctl.roles.buffers import AveragedBuffers

LAYOUT = Layout(
    (Entry("mean", AVERAGED, (1,), "float32"), Entry("batches", AVERAGED, (1,), "int64"))
)


@pytest.fixture
def buffers() -> AveragedBuffers:
    return AveragedBuffers(LAYOUT, np.array([4.0, 5.0]))


def test_who_has_computed_nothing_says_nothing(buffers: AveragedBuffers) -> None:
    assert buffers.push(0, 0, np.zeros(2))
    assert buffers.average().tolist() == [4.0, 5.0]
    buffers.push(1, 8, np.array([6.0, 7.0]))
    assert buffers.average().tolist() == [6.0, 7.0]
    assert buffers.push(1, 0, np.zeros(2))
    assert buffers.average().tolist() == [6.0, 7.0]


def test_a_single_sample_counts_as_one(buffers: AveragedBuffers) -> None:
    buffers.push(0, 1, np.array([8.0, 9.0]))
    buffers.push(1, 0, np.zeros(2))
    assert buffers.average().tolist() == [8.0, 9.0]
    buffers.push(1, 3, np.array([0.0, 1.0]))
    assert buffers.average().tolist() == [2.0, 1.0]
