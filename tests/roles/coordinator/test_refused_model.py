"""What a worker builds and the coordinator refuses leaves nothing behind: with the model put right,
the run goes on.
"""

from __future__ import annotations

from typing import Any

import pytest

from dlctl import registry
from dlctl.job.config import Data, Job, JobFile, Stop, Workers
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.records import Remember
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Received, Started

JOB = JobFile(
    job=Job(name="refused", task="train.py:task", stop=Stop(epochs=4)),
    workers=Workers(count=2, batch_size=8),
    data=Data(portion_batches=2),
)
SAVED = {"dataset_samples": 64, "portion_samples": 16, "complete_epochs": [0], "portions": []}


def layout(size: int) -> Layout:
    return Layout((TensorEntry("weight", TRAINED, (size,), "float32", ()),))


class Led:
    """A coordinator whose run goes on from a checkpoint of `layout(3)`."""

    def __init__(self, memory: dict[str, Any] | None = None) -> None:
        past = Past(
            restore="checkpoints/1",
            manifest={"layout": layout(3).to_rows(), "data": SAVED},
            memory=memory or {},
        )
        method = registry.load("algorithms", JOB.algorithm.name)
        self.machine = Coordinator("run-1", JOB, Keyring(b"key"), method, past)
        self.memory: dict[str, Any] = memory or {}
        self._keep(self.machine.handle(Started(), 1.0))
        self.reason = ""
        for name in ("worker-0", "worker-1"):
            worker = self.machine.members.daemons[name]
            if not worker.alive:
                self.machine.start_daemon(worker, 1.0)
            worker.registered, worker.peer = True, name.encode()

    def _keep(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Remember):
                self.memory[effect.key] = effect.value

    def builds(self, size: int, samples: int = 64, name: str = "worker-0", order: str = "") -> str:
        """The state of the run when that is told."""
        ready = m.ModelReady(name, layout(size).to_bytes(), samples, order=order)
        self._keep(self.machine.handle(Received(name.encode(), ready), 2.0))
        end = self.machine.run.shutdown
        self.reason = end.reason if end is not None else ""
        return end.state if end is not None else self.machine.run.state


@pytest.mark.parametrize(
    ("size", "samples", "why"),
    [
        (4, 64, 'another model than this run has had: "weight" is float32[4], was float32[3]'),
        (3, 63, "the dataset of worker-0 has 63 samples; in this run it has 64"),
        (4, 63, "worker-0 builds another model than this run has had"),
    ],
)
def test_a_refused_model_or_dataset_is_forgotten_and_the_run_goes_on(
    size: int, samples: int, why: str
) -> None:
    refused = Led()
    assert refused.builds(size, samples) == "failed"
    assert why in refused.reason
    assert "layout" not in refused.memory
    corrected = Led({**refused.memory, "run": ["failed", why, None]})
    assert corrected.builds(3) == "starting", corrected.reason
    assert corrected.machine.progress.epochs_done() == 1.0, "what the checkpoint has is done"
    assert corrected.memory["layout"] == layout(3).to_rows()


@pytest.mark.parametrize(
    ("size", "samples", "order", "why"),
    [
        (4, 64, "ab", "worker-1 builds another model than this run has had"),
        (3, 65, "ab", "the dataset of worker-1 has 65 samples; in this run it has 64"),
        (3, 64, "cd", "the samples of worker-1 come in another order than those of the other"),
    ],
)
def test_all_workers_have_one_model_one_dataset_and_one_order(
    size: int, samples: int, order: str, why: str
) -> None:
    led = Led()
    assert led.builds(3, order="ab") == "starting"
    assert led.builds(size, samples, "worker-1", order) == "failed"
    assert why in led.reason


def test_a_run_that_was_not_at_work_yet_says_that_it_had_another_model() -> None:
    first = Led()
    first.builds(3)
    changed = Led({**first.memory, "run": ["failed", "the task failed", None]})
    assert changed.builds(4) == "failed"
    assert "worker-0 builds another" in changed.reason
