"""The batches of a user's loop: cut from what is leased, and settled as they are delivered.

torch's DataLoader fetches ahead, so what it has asked for is not what the loop has. A batch is on
its way from the moment that torch takes it until it is delivered; whatever is lost on its way, by a
`break` or an exception, comes again, first.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from daemons.attach.ranks import ReplicaRanks
from daemons.attach.stock import LoopStock
from daemons.attach.user_line import user_line
from daemons.worker.data.sample_order import SampleOrder
from dlctl.errors import DlctlError
from dlctl.roles.protocol.loop_effects import PortionPart
from dlctl.roles.worker.stock import Stock, samples_of

ASK_AGAIN_S = 0.2
"""Interval between two requests for data while the loop waits with a step that has begun."""
ASKS_MAX = 150
"""So many such requests without data: the loop waits for a batch, and the run for its step."""
BATCHES_MAX = 10_000
"""A step of more batches is none: the loop never calls `run.step`."""
SPARE_BATCHES = 2
"""Data is asked for when fewer batches are left than torch fetches ahead, and these."""

IN_ORDER = "batches are settled in the order in which they were cut"


class Feed(Protocol):
    """What gives data to a loop; all of it is called in the user's thread. Any method may raise
    what ends the user's script.
    """

    stock: LoopStock
    ranks: ReplicaRanks
    """The processes of this replica, which share each batch that is taken here."""
    source: BatchSource | None
    """Whose batches come next; the others' iterations have ended."""

    @property
    def is_over(self) -> bool:
        """The loop gets no more data, whatever is in the stock."""
        ...

    def want(self, *, now: bool) -> None:
        """Ask for data. now: nothing is left, and the loop waits for it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait with the model in hand until something comes, as `SharedStock.wait`, or the run is
        over."""

    def hand_back(self) -> None:
        """Return the model, with a report of all steps, as there is no data; back when the loop has
        it again, or is over. What has begun is lost: that happens only where the stock ends."""

    def has_begun(self) -> bool:
        """Whether something was delivered that no step has settled."""

    @property
    def must_evaluate(self) -> bool:
        """The script was asked for an evaluation, and has not made it."""
        ...

    @property
    def batches(self) -> int:
        """Delivered since the last step."""
        ...

    def delivered(self, pieces: tuple[PortionPart, ...]) -> None:
        """The loop has this batch now."""


class BatchSource:
    """Cuts batches of `batch_size` samples for one loader. `ahead`: batches that it fetches ahead.

    order: of the samples of a data epoch. drops: a batch on its way can be dropped.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        feed: Feed,
        order: SampleOrder,
        drops: bool,
    ) -> None:
        """Raises TypeError, ValueError, DlctlError."""
        length_of(dataset)
        self.batch_size = _checked_size(batch_size)
        self._samples = self.batch_size * feed.ranks.count
        """Of the batches of all processes, which are cut as one."""
        self.ahead = 0
        self._feed, self._order, self._drops = feed, order, drops
        self._iterations = 0
        self._has_ended = False
        self._on_way: deque[tuple[PortionPart, ...]] = deque()

    def begin(self) -> int:
        """Begin an iteration; returns its number. Any other one has ended, and what is on its way
        there comes again here.
        """
        self._feed.source = self
        self._iterations += 1
        self.take_back()
        return self._iterations

    def is_current(self, iteration: int) -> bool:
        return self._feed.source is self and iteration == self._iterations

    def is_over(self) -> bool:
        return self._feed.is_over

    def await_batch(self) -> bool:
        """Wait until a batch can be taken; nothing may be on its way. False: no more come."""
        feed, asks = self._feed, 0
        while not feed.is_over:
            stock = feed.stock.now(self._samples)
            if stock.has_batch(self._samples):
                return True
            if not feed.has_begun():
                feed.want(now=True)
                stock.none_now = False
                feed.hand_back()
            elif stock.ends and not self._has_ended:
                self._has_ended = True  # The script may still make a step of what has begun.
                return False
            elif stock.ends:
                feed.hand_back()
            elif stock.none_now:  # The loop does not use `run.micro`, and its step wants more.
                if (asks := asks + 1) > ASKS_MAX:
                    raise _without_step(feed.batches, "and the run has no more data without it")
                feed.wait(ASK_AGAIN_S)
                stock.none_now = False
            else:
                self._wait()
        return False

    def await_behind_step(self) -> None:
        """Wait where the loop has made a step, and not where it asks for the next batch: so it can
        make an evaluation that it is asked for meanwhile.
        """
        feed = self._feed
        while not (feed.is_over or feed.must_evaluate):
            stock = feed.stock.now(self._samples)
            comes = self._on_way and not (stock.ends and self._drops)
            if comes or stock.has_batch(self._samples):
                return
            feed.want(now=True)
            stock.none_now = False
            feed.hand_back()

    def has_more(self) -> bool:
        """Whether the step that has begun gets another batch; waits until that is known."""
        while not self._feed.is_over:
            stock = self._feed.stock.now(self._samples)
            if stock.cuts:
                return stock.is_within_portion()
            comes = self._on_way and not (stock.ends and self._drops)
            if comes or stock.has_batch(self._samples):
                return True
            if stock.none_now or stock.ends:
                return False
            self._wait()
        return False

    def _wait(self) -> None:
        self._feed.want(now=True)
        self._feed.wait(ASK_AGAIN_S)

    def take(self) -> list[int]:
        """The rows of the next batch; []: it would have to wait."""
        stock = self._feed.stock.now(self._samples)
        pieces = stock.take(self._samples) if stock.has_batch(self._samples) else ()
        self._look_ahead(stock)
        if not pieces:
            return []
        self._on_way.append(pieces)
        rows: list[int] = []
        for data_epoch, _, start, stop in pieces:
            rows += self._order.rows(data_epoch, start, stop).tolist()
        return _part(rows, self._feed.ranks)

    def deliver(self) -> bool:
        """The loop gets what was taken first. False: nothing is to be delivered, as the replica
        leaves, and this would begin a portion.
        """
        if not self._on_way:
            return False
        stock, pieces = self._feed.stock.now(), self._on_way[0]
        if self._drops and samples_of(pieces) > stock.undelivered():
            return False
        if self._feed.batches >= BATCHES_MAX:
            raise _without_step(self._feed.batches, "")
        stock.deliver(self._on_way.popleft())
        self._feed.delivered(pieces)
        self._look_ahead(stock)
        return True

    def has_on_way(self) -> bool:
        return bool(self._on_way)

    def take_back(self) -> None:
        """What is on its way is lost, and is taken again."""
        self._on_way.clear()
        self._feed.stock.now().take_back()

    def _look_ahead(self, stock: Stock) -> None:
        if stock.asks_below((self.ahead + SPARE_BATCHES) * self._samples):
            self._feed.want(now=False)


def _without_step(batches: int, why: str) -> DlctlError:
    return DlctlError(
        f"{batches} batches were delivered, no run.step() was called{why and ', '}{why}",
        hint="call run.step() once after each optimizer.step(); where a step accumulates batches "
        "write `if not run.micro(of=N): continue` before it, which ends the step where data ends",
    )


def _part(rows: list[int], ranks: ReplicaRanks) -> list[int]:
    """Of one of the processes: equally many for each, give or take one. Where data ends there may
    be fewer rows than processes; then some have a row that another one has as well, as with torch's
    DistributedSampler.
    """
    if len(rows) < ranks.count:
        return [rows[ranks.rank % len(rows)]]
    first, last = (len(rows) * n // ranks.count for n in (ranks.rank, ranks.rank + 1))
    return rows[first:last]


def length_of(dataset: Any) -> int:
    """The samples of a dataset of which portions can be leased. Raises DlctlError."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise _not_leasable(f"{kind} is an IterableDataset, of which no range can be leased")
    if not hasattr(dataset, "__getitem__"):
        raise _not_leasable(f"{kind} has no __getitem__")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise _not_leasable(f"{kind} has no length: {error}") from error


def _not_leasable(why: str) -> DlctlError:
    return DlctlError(
        why,
        where=user_line(),
        hint="give a dataset with __len__ and __getitem__, or use a loader of your own with "
        "run.step(samples=n), and run.worker and run.workers to choose this worker's part",
    )


def _checked_size(batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__"):
        raise TypeError(
            f"batch_size={batch_size!r}: give the number of samples of a batch, as in "
            "run.loader(dataset, 16)"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: a batch has at least one sample")
    return int(batch_size)
