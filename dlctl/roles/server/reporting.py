"""State that a server reports to the coordinator until it is acted on: the pushes that it holds,
for the lead to decide on, and its part of a norm by which all shards clip.

Each message contains the whole state, and is resent until the state changes. This also covers a new
coordinator, and one that waits for the other shards.
"""

from __future__ import annotations

from typing import Any

from dlctl.algorithms.base import Decision
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.rows import packed, rows_in
from dlctl.roles.server.shard_protocol import Pause, ShardProtocol
from dlctl.wire import messages as m


class Reporting:
    def __init__(self, context: Context, serving: ShardProtocol) -> None:
        self.context = context
        self.serving = serving
        self._sent: dict[str, Any] = {}
        """The reported states, by their keys in `Retries`."""
        self._number = 0
        """The number of the newest change of a reported state."""

    def report_changes(self, now: float) -> None:
        states = self._states()
        for key in self._sent.keys() - states.keys():
            self.context.retries.drop(key)
        for key, state in states.items():
            if state != self._sent.get(key):
                self._number += 1
                self.context.ask(key, COORDINATOR, self._message(key, state), now)
        self._sent = states

    def end(self) -> None:
        """Report nothing any more."""
        for key in self._sent:
            self.context.retries.drop(key)
        self._sent = {}

    def _states(self) -> dict[str, Any]:
        serving, states = self.serving, dict[str, Any]()
        if serving.is_open and serving.side.asks_lead:
            # The step shows the coordinator that a decision was executed.
            states["holding"] = serving.shard.version, serving.side.held()
        norm = serving.side.shared_norm if serving.is_open else None
        if norm is not None and (part := norm.part()):
            states["norm"] = part
        return states

    def _message(self, key: str, state: Any) -> m.Message:
        of = self.serving.index, self.serving.term
        if key == "norm":
            return m.NormPart(*of, *state)
        clock, pushes = state
        return m.Holding(*of, self._number, clock, packed(pushes))

    def on_decided(self, message: m.Decided) -> None:
        """Execute a decision of the lead. Raises RemoteProtocolError."""
        if self.serving.is_open:
            used, gone = (
                frozenset((slot, term) for slot, term in rows_in(numbers, 2))
                for numbers in (message.used, message.gone)
            )
            if message.cut and message.clock >= self.serving.shard.version:
                # Before the step, which answers the reads that wait for it.
                self.serving.pause = Pause(message.cut, message.clock)
            outcomes = self.serving.side.decided(Decision(message.clock, used, gone))
            self.serving.parameters.settle(outcomes)

    def on_total(self, message: m.NormTotal) -> None:
        norm = self.serving.side.shared_norm
        if self.serving.is_open and norm is not None:
            self.serving.parameters.settle(norm.hear(message.clock, message.squared))
