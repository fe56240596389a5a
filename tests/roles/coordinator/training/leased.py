"""The coordinator's parts that lease the data, without the rest of it: workers are numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from dlctl import registry
from dlctl.job.config import Choice, Data, Evaluation, Job, JobFile, Stop, Workers
from dlctl.records.memory import Memory, MemoryRecord
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.records import AddEvent, EventContext
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.coordinator.training.run_progress import RunProgress
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

BATCH, PORTION = 8, 16
MAPPED = Dataset(64)
"""Four portions of two steps each."""


@dataclass
class Live:
    """The live workers, which is all that is asked for."""

    slots: list[int] = field(default_factory=lambda: [0, 1, 2])
    asked: int = 0

    def live_slots(self) -> tuple[int, ...]:
        self.asked += 1
        return tuple(self.slots)


class Leased:
    """memory: what a predecessor has recorded."""

    def __init__(
        self, dataset: Dataset = MAPPED, method: str = "downpour",
        memory: dict[str, Any] | None = None, options: dict[str, Any] | None = None,
        evaluation: Evaluation | None = None, **stop: Any,
    ) -> None:  # fmt: skip
        stop = stop or ({"samples": 1000} if dataset.shards else {"epochs": 4.0})
        job = JobFile(
            job=Job(name="leased", task="none", stop=Stop(**stop)),
            algorithm=Choice(name=method, options=options or {}),
            workers=Workers(count=3, batch_size=BATCH),
            data=Data(portion_batches=PORTION // BATCH),
            evaluation=evaluation or Evaluation(),
        )
        self.context, self.members = EventContext(1.0), Live()
        algorithm = registry.load("algorithms", method)
        self.run = RunState(
            "run-1", job, algorithm, Keyring(b"key"), self.context,
            cast("Membership", self.members),
        )  # fmt: skip
        self.lead = MethodLead(self.run)
        self.data = DataSupply(self.run, self.lead)
        self.progress = RunProgress(self.run, self.data, self.lead)
        self.leases = Leases(self.run, self.data, self.lead, self.progress)
        self.now, self._asked = 0.0, 0
        if memory is None:
            self.data.take_dataset("worker-0", dataset)
            self.progress.begin()
        else:
            for part in (self.progress, self.lead, self.data, self.leases):
                part.recall(Memory(memory), 0.0)

    def release(self) -> None:
        """As the coordinator does it when all workers are ready."""
        self.run.released_at = self.now
        self.lead.begin()
        self.drive()

    def drive(self) -> None:
        self.lead.advance(self.now)
        self.leases.grant(self.now)

    def ends(self) -> None:
        self.run.shutdown = cast("RunShutdown", object())
        self.leases.grant(self.now)

    def sent(self) -> dict[int, list[m.Lease]]:
        """What has been leased since the last call: slot -> answers."""
        found: dict[int, list[m.Lease]] = {}
        for effect in self.context.clear():
            if isinstance(effect, Send) and isinstance(effect.message, m.Lease):
                slot = int(str(effect.peer).removeprefix("worker-"))
                found.setdefault(slot, []).append(effect.message)
        return found

    def events(self) -> list[str]:
        return [effect.text for effect in self.context.clear() if isinstance(effect, AddEvent)]

    def ask(
        self, slot: int, *, request: int = 0, ahead: bool = False, ends: tuple[int, ...] = ()
    ) -> m.Lease | None:
        """A worker asks for data; its answer, if there is one at once."""
        self._asked = request or self._asked + 1
        self.leases.on_request(m.LeaseRequest(slot, 1, self._asked, ahead, ends), self.now)
        answers = self.sent().get(slot, [None])
        assert len(answers) == 1
        return answers[0]

    def asks(self, slot: int, **more: Any) -> m.Lease:
        """The same, if there is one."""
        lease = self.ask(slot, **more)
        assert lease is not None
        assert lease.start < lease.stop
        return lease

    def done(self, slot: int, lease: m.Lease, **said: Any) -> None:
        self.leases.settle(portion_done(slot, lease, **said), self.now)

    def report(self, slot: int, **metrics: Any) -> None:
        worker = Daemon(f"worker-{slot}", "worker", slot, "agent-0", 1)
        worker.metrics = metrics
        self.leases.on_report(worker, self.now)

    def memory(self) -> dict[str, Any]:
        """What is on record for the next coordinator, if everything is recorded for the first time
        now.
        """
        parts = (self.progress, self.lead, self.data, self.leases)
        memory = MemoryRecord().changes(piece for part in parts for piece in part.changes())
        return cast("dict[str, Any]", json.loads(json.dumps(memory)))


def portion_done(slot: int, lease: m.Lease, **said: Any) -> m.PortionDone:
    samples = lease.stop - lease.start
    row = {"steps": 2, "samples": samples, "loss_sum": float(samples)} | said
    return m.PortionDone(slot, 1, lease.data_epoch, lease.portion, **row)
