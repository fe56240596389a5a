"""Which examples of a matrix run for every commit. The others get the marker `long`."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

MARK = "per_commit"


def leave_the_others(items: Sequence[pytest.Item]) -> None:
    """Of a test with the marker `per_commit(count)` as many examples stay as that says, from the
    first to the last at equal distances. With `per_commit("name")` one stays for each value of that
    parameter, and the values of the others come in turn: a diagonal. In the simulator, whose runs
    take longest, one stays where nothing is said.
    """
    examples: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_matrix = item.get_closest_marker(MARK) or item.nodeid.startswith("tests/sim/")
        if is_matrix and item.get_closest_marker("long") is None:
            examples[item.nodeid.partition("[")[0]].append(item)
    for matrix in examples.values():
        marker = matrix[0].get_closest_marker(MARK)
        wanted = marker.args[0] if marker is not None else 1
        is_count = isinstance(wanted, int)
        staying = _spread(len(matrix), wanted) if is_count else _diagonal(matrix, wanted)
        for number, item in enumerate(matrix):
            if number not in staying:
                item.add_marker("long")


def _spread(size: int, count: int) -> set[int]:
    step = (size - 1) / max(1, count - 1)
    return {round(step * number) for number in range(count)}


def _diagonal(matrix: Sequence[pytest.Item], each: str) -> set[int]:
    """For every value of the parameter `each` the example whose other values, and pairs of them,
    are rarest so far. Raises KeyError if the test has no such parameter.
    """
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for number, item in enumerate(matrix):
        rows[_values(item)[each]].append(number)
    seen: Counter[Hashable] = Counter()
    staying = set()
    for row in rows.values():
        rarest = min(row, key=lambda n: sum(seen[value] for value in _combined(matrix[n])))
        seen.update(_combined(matrix[rarest]))
        staying.add(rarest)
    return staying


def _combined(item: pytest.Item) -> list[Hashable]:
    """The values of its parameters, and all pairs of them."""
    values = _values(item).items()
    return [*values, *itertools.combinations(values, 2)]


def _values(item: pytest.Item) -> dict[str, Hashable]:
    """Parameter -> its value, if it is a word or number, else the identity of that."""
    parameters: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    return {
        name: value if isinstance(value, str | int) else id(value)
        for name, value in parameters.items()
    }
