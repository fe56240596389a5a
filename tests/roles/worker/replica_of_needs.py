"""A worker whose method is a list of needs. Servers, and whoever computes, answer by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from builders import joined_tables, site, training

from dlctl.algorithms.base import (
    MODEL,
    Method,
    Needs,
    PushOutcome,
    ReplicaSide,
    Shape,
    ShardSide,
    Table,
)
from dlctl.algorithms.needs import Gradient, Need, Read
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import Computed, FailedSample
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send
from dlctl.wire.messages import APPLIED, REFUSED, Ack

SIZE, SERVERS = 6, 2
SHARD_TERM = 1
CELLS = 65
"""Of the second table: far more than the model has."""
SEEN = Table(name="seen", rule="add", size=lambda layout: CELLS)
TWO_TABLES = Shape(tables=(MODEL, SEEN))
ONES = np.ones(SIZE, np.float32)


class Plain(ShardSide):
    def push(self, push: m.Push, delta: object) -> list[PushOutcome]:
        raise NotImplementedError


class Replica:
    """A worker of two servers, whose method is a list of needs; nothing takes any time."""

    def __init__(
        self,
        needs: Sequence[Need],
        leave: Sequence[Need] = (),
        shape: Shape = TWO_TABLES,
        batch_size: int = 1,
        *,
        stops: bool = False,
    ) -> None:
        """It has these needs, and then gradients; as it leaves, those of `leave`."""
        self.log: list[Any] = []
        """What it was resumed with, but for those gradients."""

        class Side(ReplicaSide):
            def run(side) -> Needs:  # noqa: N805
                yield from self._each(needs)
                while True:
                    yield Gradient()

            def leave(side) -> Iterator[Need]:  # noqa: N805
                return self._each(leave)

        method = Method(
            Options=dict,
            replica=Side,
            shape=shape,
            shard=Plain if shape.tables else None,
        )
        self.context = Context(resend_s=1e6)
        self.model = np.zeros(SIZE, np.float32)
        self.side = Side(site({}, self.model))
        tables = joined_tables(method, self.context, SIZE, SERVERS)
        self.context.clear()
        self.training = training(
            self.context, tables, method, self.side, batch_size=batch_size,
            stops_between_batches=stops,
        )  # fmt: skip
        self.sent: list[m.Message] = []
        """All messages so far, and the effects for the driver."""
        self.effects: list[Effect] = []
        self._portion = 0

    def _each(self, needs: Sequence[Need]) -> Needs:
        for need in needs:
            self.log.append((yield need))

    def advance(self) -> Replica:
        self.training.advance(0.0)
        effects = [*self.context.clear(), *self.training.links.send_queue.flush(0.0)]
        self.sent += [effect.message for effect in effects if isinstance(effect, Send)]
        self.effects += [effect for effect in effects if not isinstance(effect, Send)]
        return self

    def of(self, kind: type[Any]) -> list[Any]:
        """The messages, or effects, of a kind."""
        return [each for each in [*self.sent, *self.effects] if isinstance(each, kind)]

    @property
    def need(self) -> Need | None:
        return self.training._need

    # ------------------------------------------------------------ what comes

    def lease(self, samples: int) -> None:
        """The next portion."""
        (*_, asked) = self.of(m.LeaseRequest)
        lease = m.Lease(asked.request, self._portion, 0, 0, samples)
        self._portion += 1
        self.training.on_message(lease, 0.0)
        self.advance()

    def stream_lease(self, samples: int, shard: int) -> None:
        (*_, asked) = self.of(m.LeaseRequest)
        lease = m.Lease(asked.request, shard, 0, 0, samples, 0, shard)
        self.training.on_message(lease, 0.0)
        self.advance()

    def computed(
        self,
        loss: float = 1.0,
        *,
        before: tuple[float, ...] = (),
        own: bool = False,
        failed: tuple[FailedSample, ...] = (),
    ) -> None:
        is_usable = bool(np.isfinite(loss))
        gradient = None if own else ONES.copy()
        event = Computed(
            loss, gradient, np.zeros(0), 1.0 if is_usable else np.nan, is_usable, before
        )
        self.training.on_event(replace(event, failed=failed), 0.0)
        self.advance()

    def ack(self, push: m.Push, shard: int, outcome: str = APPLIED) -> None:
        of = (1, 0, push.seq + 1, "too large" if outcome == REFUSED else "", push.table)
        self.training.on_message(Ack(shard, SHARD_TERM, push.seq, outcome, *of), 0.0)
        self.advance()

    def answer(
        self, shard: int, fetch: m.Fetch, values: m.Array | float, clock: int = 0, version: int = 1
    ) -> None:
        client = self.training.links.tables[fetch.table][shard]
        size = fetch.hi - fetch.lo if fetch.hi else client.hi - client.lo
        values = np.broadcast_to(np.asarray(values, np.float32), size)
        message = m.Parameters(
            shard, SHARD_TERM, fetch.request, version, values, table=fetch.table, clock=clock
        )
        self.training.on_message(message, 0.0)
        self.advance()

    def answer_all(self, fetches: list[m.Fetch], values: float, clock: int = 0) -> None:
        """The newest read of the whole model, by all shards."""
        for shard, fetch in enumerate(fetches[-SERVERS:]):
            self.answer(shard, fetch, values, clock)


def replica(*needs: Need, **more: Any) -> Replica:
    return Replica(needs, **more).advance()


READ = Read(wait=True)
