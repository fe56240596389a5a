"""What a server optimiser is: an update rule, in place, on one shard.

The slots (momentum, sums of squares) are element-wise vectors as long as the shard, so that a
checkpoint can be cut anew for another number of servers. Only pushed elements are touched: for a
sparse push all others keep their slots as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from dlctl.compress.base import Delta
from dlctl.messages import Array, Json


class Optimizer(Protocol):
    """`Options` is a frozen dataclass of this optimiser's keys in the job file; it has `lr`."""

    Options: ClassVar[type[Any]]
    lr: float
    """The rate; it may change between any two updates."""
    slots: dict[str, Array]
    """Name -> float32[size], saved with the shard and restored by assignment into the arrays."""
    counters: Json
    """Scalars that belong to the state, such as Adam's number of updates."""

    def __init__(self, options: Any, size: int) -> None: ...

    def apply(self, w: Array, delta: Delta) -> None:
        """w[float32, size] -= the step for gradient `delta`, in place.

        Allocates no vector of the shard's size; a sparse delta costs O(its length).
        """
        ...
