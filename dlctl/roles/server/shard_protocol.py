"""A running server: workers join, send initial values and buffers; pushes and reads go to tables.

The sender of a message is verified here, for all tables: only the connection that has presented the
token of a slot's newest term is accepted. `TableShard` handles pushes and reads. An ended run is
defined by its last checkpoint: once a server is saved for that, it accepts no more changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlctl.errors import RemoteProtocolError
from dlctl.model.flat import AVERAGED, Layout
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.token import is_genuine
from dlctl.roles.server.averaged_buffers import AveragedBuffers, fit_their_dtypes
from dlctl.roles.server.dedup import NEW
from dlctl.roles.server.table_shard import TableShard
from dlctl.roles.server.vectors import ShardVectors
from dlctl.shards.base import Extras
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import FENCED, Json


@dataclass
class Pause:
    """Behind this step a server takes and answers nothing until it has another part of the model,
    or the coordinator has given that up. The acks of the step itself still leave.
    """

    cut: int = 0
    """The number of the coming cut; 0: there is none."""
    clock: int = 0

    def is_on(self, version: int) -> bool:
        """Whether the server has paused. version: of its parameters."""
        return self.cut > 0 and version > self.clock


@dataclass(eq=False)
class ShardProtocol:
    context: Context
    run_id: str
    key: bytes
    assigned: m.Assign
    tables: Sequence[TableShard]
    """The shards of all tables of the method, that of the parameters first."""
    hands_on: bool = False
    """Replicas hand on the buffers (`ReplicaSide.hands_on_buffers`)."""

    def __post_init__(self) -> None:
        self.initialised = False
        self.last_checkpoint = 0
        """The run ends with it: later updates would be in no checkpoint, so none are applied."""
        self.buffers: AveragedBuffers | None = None
        self._logged: dict[int, int] = {}
        """Slot -> its last term for which refused buffers were logged."""
        self._members: frozenset[int] = frozenset()
        self._peers: dict[int, Peer] = {}
        """Slot -> the connection on which its newest term joined last."""
        self.parameters = self.tables[0]
        self.parameters.more_state = self._own_state
        self.parameters.take_buffers = self._take_buffers
        self.index, self.term = self.parameters.index, self.parameters.term
        self.rates = self.parameters.rates
        self.pause = Pause()
        for table in self.tables:
            table.peers, table.rates = self._peers, self.rates
            table.is_paused = self.is_paused
        self.shard, self.side = self.parameters.shard, self.parameters.side
        """The state of the parameters' shard, and the method's side that decides about its pushes.
        """
        self.vectors = ShardVectors(self.tables)

    def metrics(self, now: float) -> dict[str, Any]:
        refused = sum((table.refused for table in self.tables), Counter())
        poison = {f"worker-{slot}": count for slot, count in sorted(refused.items())}
        return {
            "version": self.shard.version,
            **self.rates.report(now),
            **self.parameters.staleness.report(),
            **({"poison": poison} if poison else {}),
            **({"method": figures} if (figures := self.side.figures()) else {}),
            **({"lr": lr} if (lr := self.shard.scheduled_lr) is not None else {}),
            **({"last_checkpoint": self.last_checkpoint} if self.last_checkpoint else {}),
            **({"paused": self.pause.cut} if self.is_paused() else {}),
        }

    @property
    def is_open(self) -> bool:
        """False for a shard that is closed, or has no values yet: it takes part in nothing."""
        return self.initialised and not self.last_checkpoint

    def is_paused(self) -> bool:
        """Whether it waits for another cut of the model."""
        return self.pause.is_on(self.shard.version)

    def end_pause(self, cut: int) -> None:
        """That cut was given up: go on."""
        if cut == self.pause.cut:
            self.pause = Pause()
            for table in self.tables:
                table.resume_reads()

    # ------------------------------------------------------------ what survives

    def _own_state(self) -> Json:
        """The durable state besides the tables, stored with the parameters."""
        return {
            "initialised": self.initialised,
            "last_checkpoint": self.last_checkpoint,
            "tables": [table.declared.name for table in self.tables[1:]],
            **self._handed_on(),
        }

    def _handed_on(self) -> Json:
        if self.buffers is None or not self.hands_on:
            return {}
        return {"averaged": self.buffers.average().tolist()}

    def resume(self) -> None:
        """Resume from the last commit of the server before this one. Raises Unusable."""
        metas = [table.resume() for table in self.tables]
        if not (meta := metas[0]):
            return
        self.initialised = meta["initialised"]
        self.last_checkpoint = meta.get("last_checkpoint", 0)
        if self.initialised:
            self._take_extras(self.shard.storage.extras)
        if self.buffers is not None and "averaged" in meta:
            self.buffers.replace(np.array(meta["averaged"], np.float64))

    def begin_with(self, vectors: Mapping[str, m.Array], extras: Extras | None) -> None:
        """Take initial values, the model's or a checkpoint's: the shard is initialised."""
        self.shard.storage.fill(vectors, extras)
        if extras is not None:
            self._take_extras(extras)
        self.initialised = True
        self.commit()

    def _take_extras(self, extras: Extras) -> None:
        """Shard 0 also stores the averaged buffers.

        Only these initial ones are durable: replicas push theirs again. Those that are handed on
        are in each commit, with the push that they came with.
        """
        if self.index == 0:
            layout = Layout.from_bytes(self.assigned.layout)
            self.buffers = AveragedBuffers(layout, np.array(extras.averaged, np.float64))

    def commit(self) -> None:
        """Commit all tables. The parameters come last: the state that is stored with them, such as
        `initialised`, then holds for all tables.
        """
        for table in reversed(self.tables):
            table.commit(in_order=True)

    def close(self, last_checkpoint: int) -> None:
        """Apply no more updates, neither here nor in a server that replaces this one."""
        self.last_checkpoint = last_checkpoint
        self.commit()

    def reopen(self, last_checkpoint: int) -> None:
        """The run continues: that checkpoint failed, or could not be recorded as the last one."""
        if last_checkpoint == self.last_checkpoint:
            self.last_checkpoint = 0
            self.commit()

    # ------------------------------------------------------------ workers join

    def on_join(self, peer: Peer, message: m.Join) -> None:
        if message.run_id != self.run_id:
            self.context.send(peer, m.Dismiss(f"this server belongs to run {self.run_id}"))
            return
        if not is_genuine(self.key, message.run_id, message.slot, message.term, message.token):
            self.context.note(
                "warning", f"worker-{message.slot}: the token of its term is not genuine"
            )
            return
        if self.parameters.dedup.is_fenced(message.slot, message.term):
            self.context.send(peer, m.Dismiss(f"worker-{message.slot} has been replaced"))
            return
        is_new = not self.parameters.dedup.is_current(message.slot, message.term)
        if is_new and self.last_checkpoint:
            return  # Barriers would release the pushes that they hold.
        self._peers[message.slot] = peer  # before acks of what the join settles
        for table in self.tables:
            table.join(message.slot, message.term)
        self._answer_join(peer, message.slot)

    def _answer_join(self, peer: Peer, slot: int) -> None:
        self.context.send(
            peer,
            m.Joined(
                self.index, self.term, self.shard.version, self.parameters.lo,
                self.parameters.hi, self.initialised, self.parameters.dedup.next_seq(slot),
                self.assigned.cut,
            ),
        )  # fmt: skip

    def on_initialise(self, peer: Peer, message: m.Initialise) -> None:
        if not self._is_joined(peer, message.slot, message.term):
            return
        if not self.initialised:
            if not self._fits(message):
                self.context.note(
                    "error", "the model's initial values do not fit or are not finite"
                )
                return
            extras = Extras(message.averaged) if self.index == 0 else None
            for table in self.tables:
                table.begin_rows()
            self.begin_with(self.shard.begins_with(message.values), extras)
        self._answer_join(peer, message.slot)

    def _fits(self, message: m.Initialise) -> bool:
        layout = Layout.from_bytes(self.assigned.layout)
        averaged = layout.size(AVERAGED) if self.index == 0 else 0
        sizes = (message.values.size, message.averaged.size)
        arrays = (message.values, message.averaged)
        is_typed = [array.dtype for array in arrays] == [np.float32, np.float64]
        if sizes != (self.shard.size, averaged) or not is_typed:
            return False
        fits = self.index > 0 or fit_their_dtypes(message.averaged, layout)
        return fits and bool(np.isfinite(message.values).all())

    def _is_joined(self, peer: Peer, slot: int, term: int) -> bool:
        """Whether a connection is that worker's; if not, it is asked to join again."""
        known = self.parameters.dedup.is_current(slot, term) and self._peers.get(slot) == peer
        if not known:
            self._ask_to_join(peer)
        return known

    def _is_ready(self, peer: Peer, slot: int, term: int) -> bool:
        """Whether that worker has joined on this connection and the shard is initialised."""
        if not self.initialised:
            self._ask_to_join(peer)
        return self.initialised and self._is_joined(peer, slot, term)

    def _ask_to_join(self, peer: Peer) -> None:
        self.context.send(peer, m.JoinAgain(self.index, self.term))

    # ------------------------------------------------------------ pushes and reads

    def _table(self, number: int) -> TableShard:
        """The shard of this table. Raises RemoteProtocolError if the method has no such table."""
        if number >= len(self.tables):
            raise RemoteProtocolError(f"there is no table {number}")
        return self.tables[number]

    def on_push(self, peer: Peer, push: m.Push) -> bool:
        """Handle a push; returns whether it was useless, such as a duplicate."""
        self.rates.add("push_bytes", push.delta.nbytes)
        table = self._table(push.table)
        if self.last_checkpoint:
            return False
        verdict = table.dedup.judge(push)
        if verdict != FENCED and push.shard_term != self.term:
            self._ask_to_join(peer)
        elif verdict == FENCED or self._is_ready(peer, push.slot, push.term):
            table.on_push(peer, push, verdict)
        return verdict != NEW

    def on_push_coming(self, peer: Peer, push: m.Push, come: Sequence[int]) -> None:
        """`come` bytes of each array of a push have arrived."""
        is_theirs = self.initialised and self._peers.get(push.slot) == peer
        is_ours = push.shard_term == self.term and push.table < len(self.tables)
        if is_theirs and is_ours and not self.last_checkpoint:
            self.tables[push.table].on_push_coming(push, come)

    def on_fetch(self, peer: Peer, fetch: m.Fetch | m.FetchRows) -> None:
        table = self._table(fetch.table)
        if self._is_ready(peer, fetch.slot, fetch.term):
            table.on_fetch(peer, fetch)

    # ------------------------------------------------------------ buffers and members

    def on_push_buffers(self, peer: Peer, message: m.PushBuffers) -> None:
        if self.buffers is not None and self._is_ready(peer, message.slot, message.term):
            taken = self.buffers.push(message.slot, message.samples, message.values)
            self.buffers.keep(self._members)
            self._log_refused(message.slot, message.term, taken)

    def _take_buffers(self, push: m.Push) -> None:
        """Take the buffers that are handed on with a push."""
        if self.buffers is not None and self.hands_on:
            taken = len(push.buffers.arrays) == 1 and self.buffers.replace(push.buffers.arrays[0])
            self._log_refused(push.slot, push.term, taken)

    def _log_refused(self, slot: int, term: int, taken: bool) -> None:
        if not taken and self._logged.get(slot) != term:
            self._logged[slot] = term
            what = "its buffers do not fit or are not finite; earlier ones are retained"
            self.context.note("warning", f"worker-{slot}: {what}")

    def on_fetch_buffers(self, peer: Peer, message: m.FetchBuffers) -> None:
        if self.buffers is not None and self._is_ready(peer, message.slot, message.term):
            self.context.send(peer, m.Buffers(message.request, self.buffers.average()))

    def on_members(self, slots: frozenset[int]) -> None:
        if slots != self._members and not self.last_checkpoint:
            self._members = slots
            for table in self.tables:
                table.members(slots)
