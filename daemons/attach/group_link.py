"""The run, as each rank of a replica of several processes sees it: rank 0 has the link, and all get
what comes from there at the same points of their scripts.

Data that was leased is looked for only where the ranks have none left, so that nothing is exchanged
for each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import Empty
from typing import Any, NamedTuple

from daemons.attach.alone import Alone
from daemons.attach.exchange import FromRole, InUserThread
from daemons.attach.led import InAllRanks, LedCalls
from daemons.attach.model_vector import ModelVector
from daemons.attach.ranks import GroupRanks
from daemons.attach.session import AttachedWorker
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.job.config import JobFile
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.roles.protocol.loop_effects import GiveData, KeepModel, LendModel
from dlctl.roles.worker.stock import Stock
from dlctl.wire.machine import Event
from dlctl.wire.messages import ModelReady

BEAT_S = 60.0
"""While rank 0 waits for the run, it says so to the others: they would give it up."""

Leader = AttachedWorker | Alone


class _Facts(NamedTuple):
    job: JobFile
    slot: int
    is_restart: bool
    is_alone: bool
    cuts: bool


class _News(NamedTuple):
    """What rank 0 tells the others."""

    item: FromRole | None
    """Vectors are left out: only rank 0 has them. None: there is none yet, or a call to follow."""
    given: list[GiveData | None]
    follow: bool = False


class GroupLink:
    """A `run.RunLink`, in each rank."""

    def __init__(
        self,
        ranks: GroupRanks,
        model: ModelVector,
        own: UserOptimizer | None,
        link: Callable[[ModelVector, UserOptimizer | None], Leader],
    ) -> None:
        """link: makes that of rank 0, with views of the model and the optimizer by which the others
        take part in what is done with them.
        """
        self._ranks, self._model, self._own = ranks, model, own
        self._targets: dict[str, Any] = {"model": model, "own": own}
        self._calls = LedCalls(ranks, self._targets)
        self._leader: Leader | None = None
        if ranks.rank == 0:
            led: Any = InAllRanks(self._calls, "model", model)
            self._leader = link(led, self._led_own())
        leader = self._leader
        facts: _Facts = ranks.of_rank_0(partial(_facts, leader))
        self.job, self.slot, self.is_restart, self.is_alone, cuts = facts
        self.stock = GroupStock(ranks, leader, cuts=cuts)
        self.inbox = GroupInbox(ranks, leader, self._calls, self.stock)
        self._takes_gradients = False

    def _led_own(self) -> Any:
        return None if self._own is None else InAllRanks(self._calls, "own", self._own)

    @property
    def own(self) -> UserOptimizer | None:
        return self._own

    @own.setter
    def own(self, own: UserOptimizer | None) -> None:
        self._own = self._targets["own"] = own
        if self._leader is not None:
            self._leader.own = self._led_own()

    @property
    def takes_gradients(self) -> bool:
        return self._takes_gradients

    @takes_gradients.setter
    def takes_gradients(self, takes: bool) -> None:
        self._takes_gradients = takes
        if self._leader is not None:
            self._leader.takes_gradients = takes

    @property
    def recalled(self) -> bool:
        """Only rank 0 knows."""
        return self._leader is not None and self._leader.recalled

    def join(self, ready: ModelReady) -> None:
        _ = self._model.vector  # All ranks put it together.
        if self._leader is None:
            self._calls.follow()
        else:
            with self._calls.leading():
                self._leader.join(ready)

    def offer(self, event: Event) -> None:
        if self._leader is not None:
            self._leader.offer(event)


def _facts(leader: Leader | None) -> _Facts:
    assert leader is not None
    cuts = leader.stock.now().cuts
    return _Facts(leader.job, leader.slot, leader.is_restart, leader.is_alone, cuts)


class GroupStock:
    """A `stock.LoopStock`, the same in all ranks."""

    def __init__(self, ranks: GroupRanks, leader: Leader | None, *, cuts: bool) -> None:
        """cuts: see `Stock`."""
        self._ranks, self._leader = ranks, leader
        self._stock = Stock(cuts=cuts)

    def now(self, samples: int = 0) -> Stock:
        if not self._stock.has_batch(samples):
            self.take(self._ranks.of_rank_0(self.given))
        return self._stock

    def wait(self, timeout_s: float) -> bool:
        given = self._ranks.of_rank_0(lambda: self.given(timeout_s))
        self.take(given)
        return bool(given)

    def given(self, timeout_s: float = 0.0) -> list[GiveData | None]:
        """In rank 0."""
        assert self._leader is not None
        return self._leader.stock.given(timeout_s)

    def take(self, given: list[GiveData | None]) -> None:
        for effect in given:
            if effect is not None:
                self._stock.give(effect)


class GroupInbox:
    """An `exchange.Inbox`, the same in all ranks."""

    def __init__(
        self, ranks: GroupRanks, leader: Leader | None, calls: LedCalls, stock: GroupStock
    ) -> None:
        self._ranks, self._leader = ranks, leader
        self._calls, self._stock = calls, stock

    def empty(self) -> bool:
        return self._ranks.of_rank_0(lambda: self._leader is None or self._leader.inbox.empty())

    def get(self) -> FromRole:
        while True:
            mine: FromRole | None = None
            if self._leader is not None:
                try:
                    mine = self._leader.inbox.get(timeout=BEAT_S)
                except Empty:
                    mine = None
            news = self._ranks.of_rank_0(partial(self._news, mine))
            self._stock.take(news.given)
            if news.follow:
                return InUserThread(partial(self._do, mine))
            if news.item is not None:
                return news.item if mine is None else mine

    def _news(self, item: FromRole | None) -> _News:
        given = self._stock.given()
        match item:
            case InUserThread():
                return _News(None, given, follow=True)
            case LendModel() if item.pull is not None:
                pull = item.pull._replace(toward=item.pull.toward[:0])
                return _News(replace(item, pull=pull), given)
            case RunEvaluation() | KeepModel():
                return _News(replace(item, parameters=item.parameters[:0]), given)
        return _News(item, given)

    def _do(self, item: FromRole | None) -> Event | None:
        if not isinstance(item, InUserThread):
            self._calls.follow()
            return None
        with self._calls.leading():
            return item.do()
