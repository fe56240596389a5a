"""Commits that take their time, for every method: what a server sends is the same, in the same
order, only later; and its successor has all that has left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from server_lives import Keeping
from test_extreme_messages import HONEST, LIAR, METHODS, Life

from dlctl.roles.server.commits import Commit, Committed
from dlctl.shards.log import perform_first
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Received, Send
from dlctl.wire.messages import APPLIED, BUFFERED, DUPLICATE, LATE

TURNS = 40
PEERS = {slot: b"of worker-%d" % slot for slot in (HONEST, LIAR)}


class Slow(Life):
    """A server whose commits wait, and what has left it."""

    def __init__(self, name: str, keeping: Keeping, patience: float, term: int = 1) -> None:
        """patience: the probability that a commit is not durable yet when a message comes."""
        self.queue: list[Commit] = []
        self.left: list[Send] = []
        self.overtaken = 0
        """Messages that came while a commit was under way."""
        self.patience, self.rng = patience, np.random.default_rng(1)
        super().__init__(name, keeping, term)

    def tell(self, peer: Any, message: m.Message, identity: str = "") -> list[Effect]:
        self.overtaken += bool(self.queue)
        self.take(self.server.handle(Received(peer, message, identity), 0.0))
        while self.queue and self.rng.random() >= self.patience:
            self.sync()
        return []

    def take(self, effects: list[Effect]) -> None:
        self.queue += [effect for effect in effects if isinstance(effect, Commit)]
        self.left += [
            # As the transport does: the arrays of a message are the server's.
            Send(e.peer, codec.decode([bytes(frame) for frame in codec.encode(e.message)]))
            for e in effects
            if isinstance(e, Send)
        ]

    def sync(self) -> None:
        count = perform_first([commit.write for commit in self.queue])
        done, self.queue = self.queue[:count], self.queue[count:]
        self.take(self.server.handle(Committed(done[-1].number), 0.0))

    def of_rank_0(self) -> list[tuple[Any, list[bytes]]]:
        return [(e.peer, [bytes(f) for f in codec.encode(e.message)]) for e in self.left]


def play(life: Slow, turn: int) -> None:
    """Two workers push, push again what they have pushed, and read."""
    slot = turn % 2
    for table in life.tables:
        if not table.side.takes_pushes:
            continue
        push = life.next_push(slot, table.table, 1e-3)
        life.tell(PEERS[slot], push)
        if turn % 3 == 0:
            life.tell(PEERS[slot], push)
    life.tell(PEERS[slot], m.Fetch(slot, 1, turn, 0))
    if turn % 7 == 0:
        life.tell(PEERS[slot], m.FetchBuffers(slot, 1, turn))
        life.tell(PEERS[slot], m.PushBuffers(slot, 1, turn, np.full(1, float(turn))))


@pytest.mark.parametrize("name", METHODS)
def test_what_leaves_is_the_same_in_the_same_order(name: str) -> None:
    lives = [Slow(name, Keeping("disk"), patience) for patience in (0.0, 0.25, 0.5)]
    for life in lives:
        for turn in range(TURNS):
            play(life, turn)
        while life.queue:
            life.sync()
    at_once, *slow = (life.of_rank_0() for life in lives)
    assert len(at_once) > TURNS
    assert slow == [at_once, at_once]


@pytest.mark.parametrize("name", METHODS)
def test_the_successor_has_all_that_has_left(name: str) -> None:
    """Whenever the power fails: only what was synced is found."""
    keeping = Keeping("disk")
    life = Slow(name, keeping, 0.7)
    for turn in range(TURNS):
        play(life, turn)
        successor = Slow(name, keeping.copy(), 0.0, term=2)
        for sent in life.left:
            check(successor, sent)
    assert life.overtaken > 2


def check(successor: Slow, sent: Send) -> None:
    message = sent.message
    slots = [slot for slot, peer in PEERS.items() if peer == sent.peer]
    if isinstance(message, m.Ack) and message.outcome in (APPLIED, BUFFERED, DUPLICATE, LATE):
        (slot,), table = slots, successor.tables[message.table]
        numbers = (1, 2, message.seq, 0, 0, 1, 8, 0)
        push = m.Push(slot, *numbers, m.Packed("none", 0, ()), table=message.table)
        assert table.dedup.judge(push) == DUPLICATE, message
    if isinstance(message, m.Parameters):
        assert successor.tables[message.table].shard.version >= message.version, message
