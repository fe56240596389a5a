"""Only the k elements of largest magnitude are sent; all others accumulate in the worker.

This is TopK-SGD with error feedback: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018;
Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019. The selection
is exact, over the worker's whole slice for one server; a slice too small to be worth it is sent
uncompressed. For every u of d elements

    ||u - TopK(u)||^2 <= (1 - k/d) ||u||^2

and since the rest is not discarded, training converges nearly as with dense pushes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le

from dlctl.compress.base import Compressor, Delta
from dlctl.compress.plain import DENSE_BELOW, Least, expand_plain, take_chosen, take_whole
from dlctl.compress.values import Precision
from dlctl.job.config import STRICT
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, largest
from dlctl.wire.messages import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKOptions:
    __pydantic_config__ = STRICT

    density: Live[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Largest fraction of the elements in a push: 0.01 sends the largest 1 %, at least one."""
    values: Precision = "float32"
    """Precision of the sent values. "float16" and "bfloat16" halve their bytes; rounding errors go
    into a later push."""
    dense_below: Least = DENSE_BELOW
    """A server's slice with fewer elements than this is sent uncompressed."""
    feedback: bool = True
    """false: elements that are not sent are discarded. It converges worse, and is there to show how
    much: all published methods keep them."""


class TopK(Compressor):
    """Arrays on the wire: a plain form (`plain.py`), mostly "chosen".

    At most k = max(1, int(density * d)) are chosen: elements that are zero on the wire are not
    sent. The order of elements of equal magnitude is not specified. NaN counts as largest, then
    infinity; they are sent unchanged and leave 0; workers check for them before.
    """

    Options: ClassVar[type[Any]] = TopKOptions
    selects = True

    def __init__(self, options: TopKOptions) -> None:
        self.density = options.density
        self.precision = options.values
        self.dense_below = options.dense_below
        self.feedback = options.feedback

    def take(self, u: Vector, shard: int = 0) -> Packed:
        """Take the k largest elements of `u`; their rounding errors stay, as the others do if there
        is feedback.
        """
        size = len(u)
        if size < max(self.dense_below, 1):
            return take_whole("topk", u)
        where = largest(u, min(size, max(1, int(self.density * size))))
        packed = take_chosen("topk", u, where, self.precision)
        if not self.feedback:
            u[:] = 0
        return packed

    @staticmethod
    def expand(packed: Packed, size: int) -> Delta:
        """A sparse delta, or a dense one of a small shard; input that `indices.unpack` refuses is
        refused before anything is allocated.
        """
        return expand_plain(packed, size)
