"""The interface of server optimisers: a pure update rule. The vectors belong to the shard.

The slots (momentum, sums of squares) are element-wise vectors as long as the shard, so that a
checkpoint can be resharded for another number of servers. A rule never sees a whole vector: it gets
blocks, of all elements or only of the pushed ones, and the shard stores the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from dlctl.errors import UsageError
from dlctl.job.settings import GROUPS, Setting, number_within
from dlctl.optim.blocks import Rule
from dlctl.util import hints, numeric_limits
from dlctl.wire.messages import Json


def _allows_decay(lr: float, options: Mapping[str, Any]) -> None:
    """Raises UsageError if weights would grow with this rate and the job's weight decay, that of a
    group of parameters included.
    """
    own = options.get("weight_decay", 0.0)
    for scale, decay in [(1.0, own), *_of_groups(options.get(GROUPS) or (), own)]:
        if fault := numeric_limits.decay_fault(lr * scale, decay):
            most = numeric_limits.most_with(scale * decay)
            raise UsageError(
                f"lr: {fault}",
                hint=hints.command(
                    f"dlctl set lr={most}", "that is the most with the job's weight_decay"
                ),
            )


def _of_groups(groups: Iterable[Mapping[str, Any]], own: float) -> Iterator[tuple[float, float]]:
    """(factor of the rate, decay) of each group that is trained; own: the optimiser's decay."""
    for group in groups:
        if group.get("train", True):
            decay = group.get("weight_decay")
            yield group.get("lr_scale", 1.0), own if decay is None else decay


LEARNING_RATE = Setting(
    help="learning rate of the servers' optimiser; that of the workers' own is inner_lr",
    parse=number_within(numeric_limits.LearningRate),
    roles=("server",),
    check=_allows_decay,
)


class Optimizer(Protocol):
    """`Options` is a frozen dataclass of this optimiser's keys in the job file; it has `lr`.

    Its attribute `live`, key -> `Setting`, declares that `lr` may change during a run.
    """

    Options: ClassVar[type[Any]]
    lr: float
    """The rate; it may change between any two updates."""
    slots: Mapping[str, float]
    """Name -> the initial value of the slot's elements. The vectors belong to the shard."""
    counters: Json
    """Scalars that belong to the state, such as Adam's number of updates."""

    def __init__(self, options: Any) -> None: ...

    def begin_update(self) -> Rule:
        """Begin one update: returns the rule for its blocks, for this update alone.

        The rule writes all of `w_next`, which may be `w` itself or uninitialised, and of each of
        `slots_next`, in the order of `slots`. It may be called in several threads, each with other
        blocks; it keeps no reference to a block, and allocates nothing of the shard's size. An
        update depends on the blocks, `lr` and `counters` alone, so that it can be replayed
        bit-exactly. It computes with numpy, so that the shard detects values that are not finite.
        """
        ...


@runtime_checkable
class Sweeping(Protocol):
    """An optimiser with some updates of all elements, whatever was pushed."""

    def sweeps_next(self) -> bool:
        """Whether the next update is of all elements: with zeros where nothing was pushed."""
        ...
