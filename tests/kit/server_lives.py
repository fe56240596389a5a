"""A server's life after another: what one leaves in its storage, the next one resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from builders import even, handled, server

from dlctl import registry
from dlctl.algorithms.base import Method
from dlctl.job.config import Choice, Job, JobFile, Servers, Workers
from dlctl.model.flat import AVERAGED, TRAINED, Layout, TensorEntry
from dlctl.optim.adagrad import Adagrad
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.token import sign
from dlctl.shards.base import Spec, Storage, no_point
from dlctl.shards.errors import Unusable
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.sim.states import MemoryLog
from dlctl.wire import messages as m
from dlctl.wire.machine import Received, Send, Started
from dlctl.wire.messages import Packed

KEY, RUN, SIZE = b"the key", "run-1", 4
LAYOUT = Layout(
    (
        TensorEntry("w", TRAINED, (SIZE,), "float32"),
        TensorEntry("mean", AVERAGED, (2,), "float32"),
    )
).to_bytes()


class Keeping:
    """One state in memory, that servers of several generations open one after the other."""

    def __init__(self, durability: str = "process") -> None:
        self.durability = durability
        self.buffer = bytearray()
        self.log = MemoryLog()
        self.point: Callable[[str], None] = no_point
        self.tables: dict[str, Keeping] = {}

    def passes(self, name: str) -> None:
        self.point(name)

    def create(self, spec: Spec) -> Storage:
        if self.durability == "disk":
            return Journaled.create(self.log, spec, self.passes)
        self.buffer = bytearray(ImageForm.of(spec, "boot").total_bytes)
        return Mapped.create(self.buffer, spec, "boot", self.passes)

    def reopen(self, spec: Spec) -> Storage:
        if self.durability == "disk":
            return Journaled(self.log, spec, self.passes)
        if not self.buffer:
            raise Unusable("there is none", where="shard-0.state", hint="go back")
        return Mapped.reopen(self.buffer, spec, "boot", self.passes)

    def of_table(self, name: str) -> Keeping:
        other = self.tables.setdefault(name, Keeping(self.durability))
        other.passes = self.passes  # type: ignore[method-assign]
        return other

    def copy(self) -> Keeping:
        """What is on the disk now."""
        other = Keeping(self.durability)
        other.log = self.log.copy()
        other.tables = {name: table.copy() for name, table in self.tables.items()}
        return other

    def discard(self) -> None:
        self.buffer = bytearray()


class Killed(BaseException):
    pass


def make_job(
    optimizer: str = "sgd", durability: Any = "process", workers: int = 2, servers: int = 1
) -> JobFile:
    return JobFile(
        job=Job(name="restart", task="train.py:task"),
        optimizer=Choice(name=optimizer, options={"lr": 1.0}),
        compression=Choice(name="none", options={"values": "float32"}),
        workers=Workers(count=workers),
        servers=Servers(count=servers, durability=durability),
    )


class Life:
    """One incarnation of a server, and what the rest of the run says to it."""

    def __init__(
        self,
        keeping: Keeping,
        term: int = 1,
        *,
        keep: bool = False,
        algorithm: Method | None = None,
        optimizer: type = SGD,
        settings: dict[str, Any] | None = None,
        index: int = 0,
        servers: int = 1,
        restore: str = "",
        cut: int = 0,
    ) -> None:
        self.server = server(
            algorithm or registry.load("algorithms", "downpour"),
            make_job("adagrad" if optimizer is Adagrad else "sgd", servers=servers),
            index=index, term=term, run_id=RUN, optimizer=optimizer, storages=keeping,
        )  # fmt: skip
        self.term = term
        self.server.handle(Started(), 0.0)
        welcome = m.Welcome(f"server-{index}", index, term, KEY, settings or {})
        self.server.handle(Received(COORDINATOR, welcome), 0.0)
        bounds = even(SIZE, servers)
        assign = m.Assign(bounds, LAYOUT, restore, keep, step_samples=64, cut=cut)
        self.effects = self.tell(assign)

    def tell(self, message: m.Message, peer: Any = COORDINATOR) -> list[Any]:
        return handled(self.server, Received(peer, message))

    def ask(self, message: m.Message) -> list[Any]:
        """What is answered to a worker."""
        sends = self.tell(message, b"worker")
        return [e.message for e in sends if isinstance(e, Send) and e.peer == b"worker"]

    def join(self, slot: int = 0, term: int = 1) -> m.Joined:
        (joined,) = self.ask(m.Join(RUN, slot, term, sign(KEY, RUN, slot, term)))
        return joined

    def initialise(self, slot: int = 0, term: int = 1) -> None:
        values = np.zeros(SIZE, np.float32)
        self.ask(m.Initialise(slot, term, values, np.array([1.0, 2.0])))

    def push(
        self, seq: int, values: Any = (-1, 0, 0, 0), slot: int = 0, term: int = 1, clock: int = 0
    ) -> list[tuple[int, str]]:
        acks = self.ask(self.message(seq, values, slot, term, clock))
        return [(ack.seq, ack.outcome) for ack in acks]

    def message(
        self, seq: int, values: Any = (-1, 0, 0, 0), slot: int = 0, term: int = 1, clock: int = 0
    ) -> m.Push:
        delta = Packed("none", SIZE, (np.array(values, np.float32),))
        return m.Push(slot, term, self.term, seq, 0, 7, 9, 3, clock, delta)

    @property
    def w(self) -> list[float]:
        assert self.server.serving is not None
        return self.server.serving.shard.w.tolist()

    @property
    def version(self) -> int:
        assert self.server.serving is not None
        return self.server.serving.shard.version

    def answer(self) -> m.Message:
        """To `Assign`."""
        return next(e.message for e in self.effects if isinstance(e, Send))


def at_work(keeping: Keeping, **options: Any) -> Life:
    life = Life(keeping, **options)
    life.join()
    life.initialise()
    return life


class KillAt:
    """Kills the server at the n-th point that it passes; 0: never."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.passed = 0

    def __call__(self, name: str) -> None:
        self.passed += 1
        if self.passed == self.number:
            raise Killed(name)
