"""A push of several parts, of which each process of a cut replica has taken one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlctl import registry
from dlctl.compress.plain import expand, joined, nothing
from dlctl.errors import RemoteProtocolError
from dlctl.wire.messages import Packed

TOPK = registry.load("compressors", "topk")


def taken(values: np.ndarray[Any, Any], dense_below: int = 0) -> Packed:
    packed: Packed = TOPK(TOPK.Options(density=0.5, dense_below=dense_below)).take(values.copy())
    return packed


def test_sparse_and_dense_parts_come_to_what_they_are_together() -> None:
    values = np.arange(1, 13, dtype=np.float32)
    sparse = expand(TOPK, joined([taken(values[:4]), taken(values[4:])]), 12)
    assert sparse.indices is not None
    assert sparse.indices.tolist() == [2, 3, 8, 9, 10, 11]
    assert sparse.values.tolist() == [3, 4, 9, 10, 11, 12]
    mixed = joined([taken(values[:4]), nothing("topk", 2), taken(values[6:], dense_below=99)])
    dense = expand(TOPK, mixed, 12)
    assert dense.indices is None
    assert dense.values.tolist() == [0, 0, 3, 4, 0, 0, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("outline", "message"),
    [
        ([4, 2, 8], "parts that are not 12 elements together"),
        ([1] * 1000, "parts that are not 12 elements together"),
        ([], "parts that are not 12 elements together"),
        ([4, 2, 9, 2], "parts that are not 12 elements together"),
        ([-4, 2, 16, 2], "parts that are not 12 elements together"),
        ([4, 2, 8, 3], "4 arrays of parts that have 5"),
        ([4, 0, 8, 4], "parts that are not 12 elements together"),
        ([8, 2, 4, 2], "position"),
    ],
)
def test_what_is_not_made_of_parts_is_refused(outline: list[int], message: str) -> None:
    values = np.arange(1, 13, dtype=np.float32)
    whole = joined([taken(values[:4]), taken(values[4:])])
    arrays = (np.array(outline, np.int64), *whole.arrays[1:])
    with pytest.raises(RemoteProtocolError, match=message):
        expand(TOPK, Packed("topk", 12, arrays), 12)


def test_parts_are_not_made_of_parts() -> None:
    inner = joined([taken(np.ones(4, np.float32))] * 2)
    outer = Packed("topk", 8, (np.array([8, len(inner.arrays)], np.int64), *inner.arrays))
    with pytest.raises(RemoteProtocolError):
        expand(TOPK, outer, 8)
