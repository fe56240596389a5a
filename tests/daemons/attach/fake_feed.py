"""A thread that plays the role of a worker whose steps a loop of the user's own makes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

from torch.utils.data import Dataset

from daemons.attach.batch_source import BatchSource
from daemons.attach.ranks import OneRank
from daemons.attach.stock import SharedStock
from dlctl.roles.protocol.loop_effects import GiveData, PortionPart
from dlctl.roles.worker.stock import samples_of
from dlctl.wire.messages import Lease

DEADLINE_S = 30.0
"""Whoever waits longer waits for ever."""


class Numbers(Dataset):
    """A sample is its row."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, row: int) -> int:
        return row


def portions(samples: int, size: int, data_epoch: int = 0) -> list[Lease]:
    """A data epoch, cut into portions."""
    starts = range(0, samples, size)
    return [
        Lease(0, number, data_epoch, start, min(start + size, samples))
        for number, start in enumerate(starts)
    ]


class FakeFeed:
    """answers: to requests for data, in order; None: there is none now. The replica leaves when all
    is settled. refuses_ahead: data in advance is refused, so each lease comes when the loop waits.
    is_prompt: data in advance comes before the loop goes on; else whenever the thread gets to it.
    """

    def __init__(
        self,
        answers: Iterable[Lease | None],
        *,
        refuses_ahead: bool = False,
        is_prompt: bool = False,
    ) -> None:
        self.stock, self.source, self.ranks = SharedStock(), None, OneRank()
        self.is_over = self.must_evaluate = False
        self.begun: list[PortionPart] = []
        """Delivered since the last step."""
        self.settled: list[PortionPart] = []
        self.steps: list[int] = []
        """The batches of each."""
        self.wants: list[bool] = []
        self.returns = 0
        self.batches = 0
        self._answers, self._refuses_ahead = deque(answers), refuses_ahead
        self._is_prompt = is_prompt
        self._leased: list[Lease] = []
        self._is_draining = False
        self._events: SimpleQueue[str] = SimpleQueue()
        self._handled: SimpleQueue[None] = SimpleQueue()
        """One for each wish, if it is awaited."""
        self._lends: SimpleQueue[bool] = SimpleQueue()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the protocol

    source: BatchSource | None

    def want(self, *, now: bool) -> None:
        self.wants.append(now)
        self._events.put("now" if now else "ahead")
        if self._is_prompt:
            self._handled.get(timeout=DEADLINE_S)

    def wait(self, timeout_s: float) -> bool:
        self._assert_nothing_waits_in_torch()
        return self.stock.wait(min(timeout_s, DEADLINE_S))

    def hand_back(self) -> None:
        self._assert_nothing_waits_in_torch()
        assert not self.begun or self.stock.now().ends
        self.begun = []
        self.returns += 1
        self._events.put("dry")
        self.is_over = self._lends.get(timeout=DEADLINE_S)

    def has_begun(self) -> bool:
        return bool(self.begun)

    def delivered(self, pieces: tuple[PortionPart, ...]) -> None:
        self.begun += pieces
        self.batches += 1

    def _assert_nothing_waits_in_torch(self) -> None:
        """What is on its way would wait for a lease, and the lease perhaps for it."""
        assert self.source is not None
        assert not self.source.has_on_way()

    # ------------------------------------------------------------ the run

    def step(self) -> None:
        self.settled += self.begun
        self.steps.append(self.batches)
        self.begun, self.batches = [], 0

    def micro(self, of: int) -> bool:
        """As `run.micro`."""
        assert self.source is not None
        return self.batches >= of or not self.source.has_more()

    def end(self) -> None:
        """The replica leaves, whatever it has leased; returns when the loop is told so."""
        self._events.put("end")
        while not self.stock.now().ends:
            assert self.stock.wait(DEADLINE_S)

    def rows(self) -> list[int]:
        """The rows of what is settled, without a shuffle."""
        return [row for piece in self.settled for row in range(piece.start, piece.stop)]

    def close(self) -> None:
        self._events.put("close")
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        assert not self._failed

    # ------------------------------------------------------------ the role

    def _play(self) -> None:
        try:
            while (event := self._events.get()) != "close":
                self._on(event)
                if self._is_prompt and event in ("now", "ahead"):
                    self._handled.put(None)
        except BaseException as error:
            self._failed.append(error)
            raise

    def _on(self, event: str) -> None:
        match event:
            case "now" if not self._is_draining:
                self._answer(is_lent=True)
            case "ahead" if not self._refuses_ahead and self._answers and self._answers[0]:
                self._answer(is_lent=True)
            case "end":
                self._drain()
            case "dry":
                while not self._is_draining and not self._answer(is_lent=False):
                    pass
                self._lends.put(self._is_draining and not self._is_partly_delivered())

    def _answer(self, *, is_lent: bool) -> bool:
        """Whether the loop is to have the model."""
        lease = self._answers.popleft() if self._answers else None
        has_left = samples_of(tuple(self.settled)) < _samples(self._leased)
        if lease is not None:
            self._leased.append(lease)
            self.stock.give(GiveData(lease))
        elif is_lent or has_left:
            self.stock.give(GiveData(None))
        elif not self._answers:
            self._drain()
        else:
            return False
        return True

    def _drain(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self.stock.give(GiveData(None, ends=True))

    def _is_partly_delivered(self) -> bool:
        done = samples_of(tuple(self.settled))
        for lease in self._leased:
            size = lease.stop - lease.start
            if done < size:
                return done > 0
            done -= size
        return False


def _samples(leases: Iterable[Any]) -> int:
    return sum(lease.stop - lease.start for lease in leases)
