"""The supply of a run's data: portions that are leased to workers.

Each kind implements `DataPool`: a dataset of known length and its clients (`portions.py`), the
batches of a driven method (`batch_pool.py`), a stream (`streams.py`). No caller asks which it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from dlctl.roles.coordinator.pools.holders import Holders, Key
from dlctl.wire.messages import Json

RETURNED, DONE = -2, -1
"""Recorded in place of a slot: the portion waits to be leased again; the portion is done."""
UNKNOWN = -1
"""The end of a stream's shard that no worker has reached."""


class Range(NamedTuple):
    """A portion: samples [start, stop) in the shuffled order of `data_epoch`."""

    data_epoch: int
    portion: int
    start: int
    stop: int
    shard: int = -1
    """Number of the stream's shard or of the client, or -1. The samples are then those of the shard
    in its own order, or those of the client over all its passes."""


class DataPool(ABC):
    """All portions of a run: which slot has which, and what is done.

    It knows nothing of messages or of the loop that asks. A slot may take any number of portions,
    at any time, and finish them in any order.
    """

    keeps_waiting = False
    """Whether a worker for which there is nothing now waits until there is. Otherwise it gets an
    empty lease, and asks again."""
    failed = ""
    """Why the data has ended before the run; "" if it has not."""

    def __init__(self, portion_samples: int) -> None:
        self.portion_samples = portion_samples
        """The largest number of samples in a portion."""
        self.changed: dict[Key, None] = {}
        """What `take_changes` returns next, in order."""
        self.holders = Holders(self.changed)

    # ------------------------------------------------------------ who waits

    def wait(self, slot: int) -> None:
        """A slot waits for data; it keeps its place if it does already."""
        self.holders.wait(slot)

    def wait_no_more(self, slot: int) -> None:
        """Remove a slot from the queue for data: its request is answered, or it is gone."""
        self.holders.wait_no_more(slot)

    def count_waiting(self) -> int:
        return len(self.holders.waiting)

    def able(self) -> list[int]:
        """The slots that wait for data and may get some now, in order."""
        return list(self.holders.waiting)

    def idle(self) -> list[int]:
        """The slots that wait for data and have neither a portion nor a copy, in order."""
        return self.holders.idle()

    def is_dry(self, now: float) -> bool:
        """Whether nobody can get anything now, if workers are kept waiting."""
        return False

    # ------------------------------------------------------------ leases

    @abstractmethod
    def take(self, slot: int, now: float) -> Range | None:
        """Lease the next portion; None if none is free now (some may still be returned)."""

    def backup(self, slot: int, now: float) -> Range | None:
        """Lease a copy of a late portion that another slot has; None: none is late."""
        return None

    def backup_due(self) -> float | None:
        """When the next portion becomes late, of which an idle slot may get a copy."""
        return None

    @abstractmethod
    def may_prefetch(self, slot: int, slots: int) -> bool:
        """Whether `slot` may prefetch one more portion: it has at most its share of what is left.

        slots: number of workers that share the rest.
        """

    def holds(self, slot: int) -> bool:
        """Whether a portion is leased to this slot."""
        return self.holders.count(slot) > 0

    def may_finish(self, slot: int, data_epoch: int, portion: int) -> bool:
        """Whether `slot` may report a portion done: it has it, or the owner is uncertain."""
        return self.holders.may_finish(slot, (data_epoch, portion))

    @abstractmethod
    def finish(self, data_epoch: int, portion: int, now: float, end: int = UNKNOWN) -> bool:
        """A portion is done; end: of its shard, if a stream's shard ends in it. False if it was
        done before, or was never leased.
        """

    def give_back(self, slot: int, *, lives: bool = False) -> list[Key]:
        """A slot does not work on what it has: these portions are leased again, unless another slot
        has a copy, which becomes the lease. lives: its report that they are done still counts.
        """
        back = self.holders.give_back(slot)
        if lives:
            self.holders.mark_uncertain(back)
        return back

    @abstractmethod
    def bounds(self, portion: int) -> tuple[int, int]:
        """Bounds for the samples [start, stop) of a portion of any data epoch."""

    def most(self, portion: int) -> int:
        """An upper bound for the samples that are trained with a portion of any data epoch."""
        start, stop = self.bounds(portion)
        return stop - start

    # ------------------------------------------------------------ ends of a stream

    @abstractmethod
    def on_end(self, slot: int, data_epoch: int, number: int, end: int) -> None:
        """A worker has found the end of a stream's shard."""

    @abstractmethod
    def check_end(self, data_epoch: int, portion: int, end: int) -> None:
        """Raises RemoteProtocolError if a shard with `end` samples does not end in this portion."""

    def news(self) -> str:
        """What the user should know of the data, each once; "" if nothing is new."""
        return ""

    # ------------------------------------------------------------ figures

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether every portion up to the limits of the run is done."""

    @abstractmethod
    def epochs_done(self) -> float: ...

    @abstractmethod
    def amount_done(self) -> str:
        """How much is done, in words."""

    @abstractmethod
    def progress(self) -> float | None:
        """Progress of the run, 0..1; None without a limit."""

    @abstractmethod
    def samples_leased(self) -> int:
        """Samples of all portions that have ever been leased; a lower bound."""

    # ------------------------------------------------------------ persisted state

    @property
    @abstractmethod
    def next(self) -> Key:
        """The first portion in order that has never been leased, as far as that is one number."""

    def take_changes(self) -> list[tuple[int, int, Any]]:
        """[(data epoch, portion, its slot or RETURNED or DONE)] since the last call; None: forget
        the entry. Negative numbers of portions have other states.
        """
        changed = list(self.changed)
        self.changed.clear()
        return [(*key, self.standing_of(*key)) for key in changed]

    @abstractmethod
    def standing_of(self, data_epoch: int, portion: int) -> Any:
        """The JSON value that `take_changes` persists for a portion; None: its initial state."""

    @abstractmethod
    def resume(self, next_: Key, standing: dict[Key, Any]) -> None:
        """Rebuild the state from all that `take_changes` returned; `standing`: what is not None."""

    def recall_holders(self, standing: dict[Key, int]) -> None:
        """Portion -> its slot or RETURNED or DONE, as a predecessor has recorded it."""
        self.holders = Holders(self.changed)
        self.holders.recall(
            {key: slot for key, slot in standing.items() if slot >= 0},
            [key for key, slot in standing.items() if slot == RETURNED],
        )

    @abstractmethod
    def to_json(self) -> Json:
        """What is done, for a checkpoint."""

    @abstractmethod
    def restore(self, saved: Json) -> None:
        """Resume from a checkpoint: what is done stays so, everything else is leased (again).
        `saved`: from `to_json`, perhaps with portions of another size.
        """
