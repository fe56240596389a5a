"""The mean of the replicas' buffers, and which answer to a question for it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlctl import registry
from dlctl.compress.none import Dense
from dlctl.job.config import Job, JobFile
from dlctl.model.flat import AVERAGED, TRAINED, Layout, TensorEntry
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import (
    BuffersLoaded,
    EvaluationRun,
    LoadBuffers,
    ModelBuilt,
    RunEvaluation,
)
from dlctl.roles.server.averaged_buffers import (
    FORGET_AFTER,
    AveragedBuffers,
    fit_their_dtypes,
)
from dlctl.roles.worker.worker import Worker
from dlctl.wire import messages as m
from dlctl.wire.machine import Event, Received, Send, Started
from dlctl.wire.messages import Register

LAYOUT = Layout(
    (
        TensorEntry("mean", AVERAGED, (1,), "float32"),
        TensorEntry("batches", AVERAGED, (1,), "int64"),
    )
)


@pytest.fixture
def buffers() -> AveragedBuffers:
    return AveragedBuffers(LAYOUT, np.array([4.0, 5.0]))


def test_who_has_computed_nothing_says_nothing(buffers: AveragedBuffers) -> None:
    assert buffers.push(0, 0, np.zeros(2))
    assert buffers.average().tolist() == [4.0, 5.0]
    buffers.push(1, 8, np.array([6.0, 7.0]))
    assert buffers.average().tolist() == [6.0, 7.0]
    assert buffers.push(1, 0, np.zeros(2))
    assert buffers.average().tolist() == [6.0, 7.0]


def test_a_single_sample_counts_as_one(buffers: AveragedBuffers) -> None:
    buffers.push(0, 1, np.array([8.0, 9.0]))
    buffers.push(1, 0, np.zeros(2))
    assert buffers.average().tolist() == [8.0, 9.0]
    buffers.push(1, 3, np.array([0.0, 1.0]))
    assert buffers.average().tolist() == [2.0, 1.0]


def test_who_is_gone_is_forgotten_when_the_others_have_gone_on_without_it(
    buffers: AveragedBuffers,
) -> None:
    for slot in range(3):
        buffers.push(slot, 8, np.full(2, float(slot)))
    for _ in range(3 * FORGET_AFTER):
        buffers.push(0, 8, np.full(2, 4.0))
        buffers.keep({0, 2})
    assert buffers.average()[0] == 3.0, "slot 2 is slow, and has its part"
    for _ in range(3 * FORGET_AFTER):
        buffers.push(0, 8, np.full(2, 4.0))
        buffers.keep(set())
    assert buffers.average()[0] == 3.0, "nobody has said yet who takes part"


def test_who_leaves_with_the_others_has_its_part_in_what_is_saved_last(
    buffers: AveragedBuffers,
) -> None:
    left = {0, 1, 2}
    for slot in range(3):
        buffers.push(slot, 8, np.full(2, float(slot)))
        left.discard(slot)
        buffers.keep(left)
    assert buffers.average()[0] == 1.0


@pytest.mark.parametrize(
    ("dtype", "largest", "too_large"),
    [
        ("float16", 65504.0, 65505.0),
        ("bfloat16", 3.3895313892515355e38, 3.39e38),
        ("float32", 3.4028234663852886e38, 3.403e38),
        ("float64", 1.7976931348623157e308, np.inf),
        ("int8", -127.0, 128.0),
        ("bool", 1.0, 2.0),
    ],
)
def test_what_would_be_infinite_in_the_buffer_s_dtype_is_refused(dtype, largest, too_large) -> None:
    layout = Layout(
        (TensorEntry("w", TRAINED, (4,), "float32"), TensorEntry("mean", AVERAGED, (2,), dtype))
    )
    buffers = AveragedBuffers(layout, np.array([0.0, -np.inf]))
    assert buffers.push(0, 8, np.array([largest, -np.inf]))
    assert not buffers.push(0, 8, np.array([too_large, -np.inf]))
    assert not buffers.push(0, 8, np.array([np.nan, -np.inf]))
    assert not buffers.push(0, 8, np.array([0.0, 0.0], np.float32))
    assert fit_their_dtypes(np.array([largest, np.inf]), layout), "a mask may begin so"
    assert fit_their_dtypes(np.array([too_large, 0.0]), layout) == (too_large == np.inf)


# ---------------------------------------------------------------- which answer counts


class Asking:
    """A worker of a model with one parameter and one buffer, and what others say to it."""

    def __init__(self) -> None:
        registration = Register("run-1", "worker", "worker-0", 1, 1, "here", "0")
        job = JobFile(job=Job(name="asking", task="train.py:task"))
        algorithm = registry.load("algorithms", "downpour")
        self.worker = Worker(registration, job, algorithm, Dense(Dense.Options()))
        self.sent: list[m.Message] = []
        self.loaded: list[list[float]] = []
        self.ran: list[list[float]] = []
        layout = Layout(
            (
                TensorEntry("w", TRAINED, (1,), "float32"),
                TensorEntry("mean", AVERAGED, (1,), "float32"),
            )
        )
        self.tell(Started())
        self.says(COORDINATOR, m.Welcome("worker-0", 0, 1, b"", {}))
        self.tell(
            ModelBuilt(m.ModelReady("", layout.to_bytes(), 8), np.zeros(1, "f4"), np.zeros(1))
        )
        self.says(COORDINATOR, m.Topology(("ipc://x",), ("key",), (0, 1), False, ""))
        self.says("server-0", m.Joined(0, 1, 5, 0, 1, True, 0))

    def tell(self, event: Event) -> None:
        for effect in self.worker.handle(event, 0.0):
            match effect:
                case Send(_, message):
                    self.sent.append(message)
                case LoadBuffers(averaged):
                    self.loaded.append(averaged.tolist())
                case RunEvaluation(averaged=averaged):
                    self.ran.append(averaged.tolist())

    def says(self, peer: str, message: m.Message) -> None:
        self.tell(Received(peer, message))

    def answer(self, request: int, mean: float) -> None:
        self.says("server-0", m.Buffers(request, np.array([mean])))

    def asked(self, kind: type) -> Any:
        """The newest question of this type."""
        return [message for message in self.sent if isinstance(message, kind)][-1]

    def evaluate(self, number: int) -> int:
        """Begin one, with its parameters there. Returns the number of its question for buffers."""
        self.says(COORDINATOR, m.Evaluate(number))
        request = self.asked(m.Fetch).request
        self.says("server-0", m.Parameters(0, 1, request, 5, np.ones(1, "f4")))
        return int(self.asked(m.FetchBuffers).request)


def test_an_answer_to_an_earlier_question_is_not_taken_for_that_of_a_later_one() -> None:
    """Every question is asked twice here, and its second answer comes late."""
    worker = Asking()
    joining = worker.asked(m.FetchBuffers).request
    worker.answer(joining, 1.0)
    worker.tell(BuffersLoaded())
    first = worker.evaluate(1)
    worker.answer(joining, 1.0)
    assert worker.ran == []
    worker.answer(first, 2.0)
    assert worker.ran == [[2.0]]
    worker.tell(EvaluationRun(1, {}))
    second = worker.evaluate(2)
    worker.answer(first, 2.0)
    worker.answer(second, 3.0)
    assert (worker.loaded, worker.ran) == ([[1.0]], [[2.0], [3.0]])
