"""Numbers as extreme as the wire lets through, in every message that a server takes from a worker,
for every method: after each of them the server's successor reads the same state, everything that is
answered can be sent, and another worker's push is not lost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
from builders import handled
from server_lives import Keeping
from simulated import job_file
from stolen_key import FIXED, extremes, numbers_of

from dlctl import registry
from dlctl.compress.plain import nothing
from dlctl.model.flat import AVERAGED, ROWS, TRAINED, Layout, TensorEntry
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.server import Server
from dlctl.roles.server.table_shard import TableShard
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Exit, Received, Send, Started
from dlctl.wire.messages import DUPLICATE, Array, Register

KEY, RUN, SIZE, STEP_SAMPLES = b"the key", "run-1", 12, 8
HONEST, LIAR = 0, 1
TABLE_ROWS = TensorEntry("table", ROWS, (8, 3), "float32", init=("constant", 0.0, 0.0))
PARAMETERS = (
    TensorEntry("w", TRAINED, (SIZE,), "float32"),
    TensorEntry("seen", AVERAGED, (1,), "float32"),
)
METHODS = [
    name for name in registry.names("algorithms") if registry.load("algorithms", name).shape.tables
]


class Life:
    """One incarnation of a server with two workers, one of which lies."""

    def __init__(self, name: str, keeping: Keeping, term: int) -> None:
        method = registry.load("algorithms", name)
        choice = method.optimizer
        job = job_file(2, 1, algorithm=(name, {}), optimizer=(choice.name, dict(choice.options)))
        kinds = [registry.load("optimizers", choice.name), registry.load("compressors", "none")]
        rows = (TABLE_ROWS,) if name == "rows" else ()
        layout = Layout((*PARAMETERS, *rows)).to_bytes()
        registration = Register(RUN, "server", "server-0", term, 1, "here", "0")
        self.term = term
        self.server = Server(registration, job, "ipc://x", method, *kinds, keeping)
        self.server.handle(Started(), 0.0)
        keep = term > 1
        self.tell(COORDINATOR, m.Welcome("server-0", 0, term, KEY, {}))
        self.tell(COORDINATOR, m.Assign((0, SIZE), layout, "", keep, 64, STEP_SAMPLES))
        assert self.server.serving is not None
        self.tell(COORDINATOR, m.Members((HONEST, LIAR)))
        for slot in (HONEST, LIAR):
            self.say(m.Join(RUN, slot, 1, sign(KEY, RUN, slot, 1)))
        if not keep:
            self.say(m.Initialise(HONEST, 1, np.zeros(SIZE, np.float32), np.ones(1)))

    @property
    def tables(self) -> Sequence[TableShard]:
        assert self.server.serving is not None
        return self.server.serving.tables

    def tell(self, peer: Any, message: m.Message, identity: str = "") -> list[Effect]:
        """Over the wire, there and back: what is sent has to be readable, too."""
        decoded = codec.decode([bytes(frame) for frame in codec.encode(message)])
        effects = handled(self.server, Received(peer, decoded, identity))
        for effect in effects:
            assert not isinstance(effect, Exit), effect
            if isinstance(effect, Send):
                codec.decode([bytes(frame) for frame in codec.encode(effect.message)])
        return effects

    def say(self, message: Any) -> list[m.Message]:
        """From the worker of its slot; returns what it is answered."""
        peer = f"of worker-{message.slot}".encode()
        effects = self.tell(peer, message)
        return [e.message for e in effects if isinstance(e, Send) and e.peer == peer]

    def next_push(self, slot: int, table: int, value: float = 0.0) -> m.Push:
        of = self.tables[table]
        delta = nothing("none", of.shard.size)
        if value:
            delta = m.Packed("none", of.shard.size, (np.full(of.shard.size, value, np.float32),))
        if of.rows is not None:
            values = np.full(3, value, np.float32)
            delta = m.Packed("rows", of.shard.size, (np.zeros(1, np.int32), values))
        numbers = (of.dedup.next_seq(slot), of.shard.version, 0, 1, 8, of.side.clock())
        return m.Push(
            slot, 1, self.term, *numbers, delta, table=table, weight=0.5, portion=1 + slot
        )

    def state(self) -> list[Any]:
        """All that is committed, as text and bytes."""
        return [
            (
                [array.tobytes() for array in (t.shard.w, *t.shard.slots.values())],
                (t.shard.version, t.shard.samples, t.dedup.to_json(), t.dedup.outcomes()),
                repr(t.side.state()), t.newest_op, sorted(t.refused.items()),
            )
            for t in self.tables
        ]  # fmt: skip


def lies(life: Life) -> Iterator[tuple[m.Message, dict[str, Any]]]:
    """Messages, and what of each is a lie: one number at a time, then the largest at once."""
    rows: Array = np.zeros(1, np.int32)
    honest: list[m.Message] = [
        m.Join(RUN, LIAR, 1, sign(KEY, RUN, LIAR, 1)),
        m.Initialise(LIAR, 1, np.zeros(SIZE, np.float32), np.ones(1)),
        *(life.next_push(LIAR, t.table) for t in life.tables if t.side.takes_pushes),
        m.Fetch(LIAR, 1, 1, 0), m.FetchRows(LIAR, 1, 1, 0, 1, rows),
        m.PushBuffers(LIAR, 1, 8, np.ones(1)), m.FetchBuffers(LIAR, 1, 1),
    ]  # fmt: skip
    for message in honest:
        found = {n: of for n, of in numbers_of(type(message)).items() if n not in FIXED}
        for name, (limits, _) in found.items():
            for value in extremes(limits, getattr(message, name)):
                yield message, {name: value}
        yield message, {name: limits.most for name, (limits, _) in found.items()}


@pytest.mark.per_commit(len(METHODS))
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("name", METHODS)
def test_a_server_s_successor_reads_the_same_after_any_message_of_a_worker(name, durability):
    keeping = Keeping(durability)
    life = Life(name, keeping, 1)
    takes = [t.table for t in life.tables if t.side.takes_pushes]
    assert life.say(life.next_push(HONEST, takes[0], 1e-3)), "it gets an answer"
    for number, (honest, lie) in enumerate(list(lies(life)), 2):
        message = honest
        if isinstance(honest, m.Push):
            message = life.next_push(LIAR, honest.table)
        life.say(replace(message, **lie))
        life.server.serving.commit()
        before = life.state()
        life = Life(name, keeping, number)
        assert life.state() == before, (type(honest).__name__, lie)
    push = life.next_push(HONEST, takes[0], 1e-3)
    (ack,) = [a for a in life.say(push) if isinstance(a, m.Ack) and a.seq == push.seq]
    assert ack.outcome not in (DUPLICATE, m.REFUSED, m.GAP, m.FENCED)
