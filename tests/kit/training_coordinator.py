"""A coordinator whose workers train: what they report, and what becomes of the run."""

from __future__ import annotations

from typing import Any

from dlctl import registry
from dlctl.job.config import Choice, Data, Job, JobFile, Launch, Servers, Stop, Workers
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.pools.data_pool import Range
from dlctl.roles.coordinator.records import AddEvent
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Effect, Note, Received, Send, Started

SAMPLES = 64
"""Of the dataset; in portions of 16."""
MAPPED = Dataset(SAMPLES)
OWN = Launch()


def layout(size: int) -> Layout:
    return Layout((TensorEntry("weight", TRAINED, (size,), "float32", ()),))


class AtWork:
    def __init__(
        self, workers: int = 3, method: str = "downpour", servers: int = 1,
        dataset: Dataset = MAPPED, launcher: Launch = OWN, **data: Any,
    ) -> None:  # fmt: skip
        stop = Stop(samples=1000) if dataset.shards else Stop(epochs=4)
        job = JobFile(
            job=Job(name="at-work", task="train.py:task", stop=stop),
            algorithm=Choice(name=method),
            servers=Servers(count=servers),
            workers=Workers(count=workers, batch_size=8),
            data=Data(portion_batches=2, **data),
            launcher=launcher,
        )
        algorithm = registry.load("algorithms", method)
        self.machine = Coordinator("run-1", job, Keyring(b"key"), algorithm, Past())
        self.now = 1.0
        self.machine.handle(Started(), self.now)
        for daemon in self.machine.members.daemons.values():
            if not daemon.alive:
                self.machine.start_daemon(daemon, self.now)
            self.joins(daemon)
        self.machine.take_dataset("worker-0", dataset)
        self.machine.registration.keep_layout(layout(2), dataset.samples)
        self.machine.change_state("running", "", self.now)
        self.machine.release(self.now)
        self.machine.context.clear()

    def joins(self, daemon: Daemon) -> None:
        daemon.registered, daemon.peer = True, daemon.name.encode()
        daemon.term = daemon.incarnation
        daemon.asked_for_data = daemon.role == "worker"
        daemon.change_state(daemon_states.RUNNING)

    def worker(self, slot: int) -> Daemon:
        return self.machine.members.daemons[f"worker-{slot}"]

    def hear(self, slot: int, message: m.Message) -> list[Effect]:
        """From a worker's process."""
        return self.machine.handle(Received(b"worker-%d" % slot, message), self.now)

    def fails(self, slot: int, error: str, *, fatal: bool = True) -> list[Effect]:
        return self.hear(slot, m.Failed(f"worker-{slot}", error, "the traceback", fatal))

    def exits(self, slot: int, status: int = 1) -> list[Effect]:
        worker = self.worker(slot)
        said = m.ProcessExited(worker.name, worker.incarnation, status, ())
        return self.machine.handle(Received(worker.agent.encode(), said), self.now)

    def wait(self, seconds: float) -> list[Effect]:
        """Time passes, and all daemons send heartbeats."""
        effects: list[Effect] = []
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            for daemon in self.machine.members.daemons.values():
                daemon.heard_at = self.now
            effects += self.machine.handle(DeadlineReached(), self.now)
        return effects

    def lease(self, slot: int) -> Range:
        taken = self.machine.data.pool.take(slot, self.now)
        assert taken is not None
        return taken

    @property
    def works(self) -> bool:
        return self.machine.run.is_working

    @property
    def state(self) -> str:
        """How the run ends, once it does."""
        end = self.machine.run.shutdown
        return end.state if end is not None else self.machine.run.state

    @property
    def reason(self) -> str:
        end = self.machine.run.shutdown
        return end.reason if end is not None else ""

    def problems(self) -> dict[str, dict[str, Any]]:
        """Daemon -> its problem, as `status` has it."""
        run, _ = self.machine.status.look(self.now)
        return {problem["daemon"]: problem for problem in run["problems"]}


def events(effects: list[Effect], kind: str) -> list[str]:
    found = (e for e in effects if isinstance(e, AddEvent) and e.kind == kind)
    return [f"{event.daemon}: {event.text}" for event in found]


def sent(effects: list[Effect], kind: type[m.Message]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def refused(effects: list[Effect]) -> list[str]:
    """What the log says of refused messages."""
    notes = (e.text for e in effects if isinstance(e, Note) and e.level == "warning")
    return [text for text in notes if text.startswith("refused ")]
