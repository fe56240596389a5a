"""A worker's live settings: the newest ones hold, and a limit only from its change on."""

from __future__ import annotations

import pytest

from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.compress.none import Dense
from dlctl.job import config
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.worker.worker import Worker
from dlctl.wire import messages as m
from dlctl.wire.machine import Received, Send, Started
from dlctl.wire.messages import Register

JOB = config.JobFile(
    job=config.Job(name="alone", task="none", seed=0, stop=config.Stop(epochs=1.0)),
    algorithm=config.Choice(name="downpour"),
)


def answers_to(worker: Worker, message: m.Message, now: float) -> list[m.Message]:
    effects = worker.handle(Received(COORDINATOR, message), now)
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_what_has_overtaken_the_welcome_holds_and_a_new_rate_is_for_what_is_still_owed() -> None:
    registration = Register("run", "worker", "worker-0", 1, 1, "host", "1")
    worker = Worker(registration, JOB, DOWNPOUR, Dense(Dense.Options()))
    worker.handle(Started(), 0.0)
    (changed,) = answers_to(worker, m.ChangeSettings(1, {"push": 10.0}), 0.0)
    assert changed == m.Changed(1, "worker-0", {"push": None}, {"push": 10.0})
    answers_to(worker, m.Welcome("worker-0", 0, 1, b"", {"push": None, "fetch": 5.0}), 0.0)
    assert worker.settings.values().items() >= {"push": 10.0, "fetch": 5.0}.items()

    limiter = worker.send_queue.limiters["push"]
    limiter.spend(100, 0.0)
    answers_to(worker, m.ChangeSettings(2, {"push": 1.0}), 9.0)
    assert limiter.free_at == pytest.approx(9.0 + 10.0)
