"""What a server optimiser is: a pure update rule. The vectors that it changes belong to the shard.

The slots (momentum, sums of squares) are element-wise vectors as long as the shard, so that a
checkpoint can be cut anew for another number of servers. A rule never sees a whole vector: it gets
blocks, of all elements or only of the pushed ones, and the shard keeps what it leaves in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from dlctl.messages import Json
from dlctl.optim.blocks import Rule


class Optimizer(Protocol):
    """`Options` is a frozen dataclass of this optimiser's keys in the job file; it has `lr`."""

    Options: ClassVar[type[Any]]
    lr: float
    """The rate; it may change between any two updates."""
    slots: Mapping[str, float]
    """Name -> what every element of the slot begins with. The vectors are the shard's."""
    counters: Json
    """Scalars that belong to the state, such as Adam's number of updates."""

    def __init__(self, options: Any) -> None: ...

    def begin_update(self) -> Rule:
        """One update begins: returns what is to be done to its blocks, for this update alone.

        The rule writes `w_next`, which may be `w` itself or hold anything, in full, and so each of
        `slots_next`, in the order of `slots`. It may be called in several threads, each with other
        blocks; nothing is kept of a block, and nothing of the shard's size is allocated. What an
        update does depends on the blocks, `lr` and `counters` alone, so that it can be repeated to
        the last bit. It computes with numpy, by which the shard hears of what is not finite.
        """
        ...
