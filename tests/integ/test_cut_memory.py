"""No process of a cut replica has a whole vector: neither the model nor a gradient, what is left of
pushes, or a push. The model is of 101 MB; a vector too many in one of four would be 76 MB there.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.cut_memory import DOWNPOUR, WIDTHS, peaks_of

PARAMETERS_BYTES = 101e6
METHODS = {
    "downpour": (DOWNPOUR, 2.6),
    "topk": (f'{DOWNPOUR}\n[compression]\nname = "topk"', 3.2),
    "diloco": ('[algorithm]\nname = "diloco"\nlocal_steps = 2', 2.6),
}
"""With the limit in such vectors: the values, their gradient twice, what AdamW keeps, what was
accrued, its way to the server and from there; and what the selection looks through. One process has
7.5 of them at its peak without that.
"""


@cache
def without_model() -> list[int]:
    """What each process has beside."""
    return peaks_of(WIDTHS[0], "fsdp = 4")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_each_of_four_processes_has_its_part_of_all_memory(method: str) -> None:
    text, limit = METHODS[method]
    found = peaks_of(WIDTHS[1], "fsdp = 4", text)
    grown = [(b - a) / PARAMETERS_BYTES for a, b in zip(without_model(), found, strict=True)]
    assert max(grown) < limit, grown
