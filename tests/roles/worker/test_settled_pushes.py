"""What a worker puts on record when a server settles its pushes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import client, identity, joined, training
from builders import replica as a_side

from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import Computed, Settled
from dlctl.roles.worker.shard_client import WINDOW
from dlctl.wire import messages as m
from dlctl.wire.messages import APPLIED, DUPLICATE, GAP, HELD, Ack

TERM = 6


class Replica:
    """A worker of a two-shard run at work, which computes as soon as it can."""

    def __init__(self, batches: int = 100, **options: Any) -> None:
        self.context = Context(resend_s=1.0)
        me = identity(term=TERM)
        self.channels = [
            joined(client(self.context, me, shard, 2 * shard, 2 * shard + 2)) for shard in (0, 1)
        ]
        side = a_side(DOWNPOUR, np.zeros(4, np.float32), DOWNPOUR.Options(**options))
        self.training = training(self.context, [self.channels], DOWNPOUR, side, me=me)
        self._advance()
        self.leased(1, 0, batches)
        self.fetched(1)
        self.context.clear()

    def _advance(self) -> None:
        self.training.advance(0.0)
        self.context.do(*self.training.links.send_queue.flush(0.0))

    def leased(self, request: int, start: int, stop: int) -> None:
        self.training.on_message(m.Lease(request, request - 1, 0, start, stop), 0.0)
        self._advance()

    def fetched(self, request: int) -> None:
        """What was asked for has come from both shards."""
        for channel in self.channels:
            values = np.zeros(2, np.float32)
            answer = m.Parameters(channel.shard, 1, request, 0, values)
            self.training.on_message(answer, 0.0)
        self._advance()

    def push(self, value: float = 1.0) -> None:
        """One more step, which is one more push."""
        gradient = np.full(4, value, np.float32)
        self.training.on_event(Computed(1.0, gradient, np.zeros(0), 1.0, True), 0.0)
        self._advance()

    def ack(self, shard: int, seq: int, outcome: str = APPLIED) -> list[tuple[int, int, int]]:
        """What an ack has put on record: (term, shard, count) each."""
        self.context.clear()
        self.training.on_message(Ack(shard, 1, seq, outcome, 1, 0, seq + 1), 0.0)
        effects = [e for e in self.context.clear() if isinstance(e, Settled)]
        return [(e.term, e.shard, e.count) for e in effects]


@pytest.fixture
def replica() -> Replica:
    return Replica()


def test_each_shard_counts_for_itself(replica: Replica) -> None:
    replica.push()
    replica.push()
    assert replica.ack(0, 0) == [(TERM, 0, 1)]
    assert replica.ack(0, 1) == [(TERM, 0, 2)]
    assert replica.ack(1, 0) == [(TERM, 1, 1)]


def test_a_push_behind_one_that_is_not_settled_does_not_count_yet(replica: Replica) -> None:
    for _ in range(3):
        replica.push()
    assert replica.ack(0, 2) == [(TERM, 0, 0)]
    assert replica.ack(0, 0) == [(TERM, 0, 1)]
    assert replica.ack(0, 1) == [(TERM, 0, 3)], "and with it the one that was settled before"


def test_only_what_settles_a_push_counts_and_only_once(replica: Replica) -> None:
    replica.push()
    assert replica.ack(0, 0, HELD) == []
    assert replica.ack(0, 0, GAP) == []
    assert replica.ack(0, 0, DUPLICATE) == [(TERM, 0, 1)]
    assert replica.ack(0, 0, DUPLICATE) == []


PUSH_BYTES = 16
"""Of both slices."""


@pytest.mark.parametrize(
    ("window_bytes", "pushes"),
    [(1, 1), (PUSH_BYTES, 1), (PUSH_BYTES + 1, 2), (3 * PUSH_BYTES, 3), (None, WINDOW)],
)
def test_a_push_is_made_while_fewer_bytes_than_the_window_are_on_their_way(
    replica: Replica, window_bytes: float | None, pushes: int
) -> None:
    """One of any size, so that nobody waits for ever."""
    replica.training.links.send_queue.push_window_bytes = window_bytes
    for _ in range(WINDOW + 1):
        if replica.training.phase().what != "pushing":
            replica.push()
    assert [len(c._unsettled) for c in replica.channels] == [pushes, pushes]
    assert replica.training.phase().what == "pushing"
    replica.ack(0, 0)
    assert len(replica.channels[0]._unsettled) == pushes - 1, "the other shard has its half to come"
    replica.ack(1, 0)
    replica.training.advance(0.0)
    assert len(replica.channels[0]._unsettled) == pushes


def test_what_a_shard_has_and_holds_is_on_its_way_no_more(replica: Replica) -> None:
    replica.training.links.send_queue.push_window_bytes = 1
    replica.push()
    replica.push()
    assert len(replica.channels[0]._unsettled) == 1
    for shard in (0, 1):
        replica.ack(shard, 0, HELD)
    replica.training.advance(0.0)
    assert len(replica.channels[0]._unsettled) == 2


def test_a_window_that_is_opened_live_lets_the_next_push_go(replica: Replica) -> None:
    replica.training.links.send_queue.push_window_bytes = 1
    replica.push()
    replica.push()
    replica.training.links.send_queue.push_window_bytes = None
    replica.training.advance(0.0)
    assert len(replica.channels[0]._unsettled) == 2


def test_the_nth_push_holds_the_nth_gradient(replica: Replica) -> None:
    """With push_every_steps = 1 and no compression: what the fault tests' ledger relies on."""
    for number in range(WINDOW):
        replica.push(value=number + 1.0)
        for channel in replica.channels:
            push = replica.context.retries.message(channel.push_key(number))
            assert isinstance(push, m.Push)
            assert push.delta.arrays[0].tolist() == [number + 1.0] * 2
    assert replica.training.writing.steps == WINDOW


def test_an_end_that_comes_while_a_fetch_is_waited_for_leaves_nothing_unpushed() -> None:
    """The batch behind the fetch was named already; it would be the first of its portion."""
    replica = Replica(
        batches=2, overlap=False, fetch_every_steps=2, push_every_steps=8, push_before_fetch=True
    )
    for _ in range(2):
        replica.push()
    replica.leased(2, 2, 4)
    assert replica.training.phase().what == "fetching"
    assert replica.training.writing.has_unpushed_steps()
    replica.training.steps.draining = True
    replica.fetched(2)
    assert [len(c._unsettled) for c in replica.channels] == [1, 1]
    assert not replica.training.writing.has_unpushed_steps()
    for shard in (0, 1):
        replica.ack(shard, 0)
    assert replica.training.parked
