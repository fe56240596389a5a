"""Split learning whose head dies while the run ends: the next one does what is still to be done."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import ACCOUNT, Watcher, job_file
from split_ledger import SplitChecker, SplitLedger

from dlctl.algorithms.methods.split import PREDICT, STEP
from dlctl.job.config import Party
from dlctl.optim.gathered import GATHERED
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import RunEvaluation
from dlctl.sim.checkers import Checker, LivenessChecker, NothingLeft
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.world import World
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Drain, Evaluated, Message, PeerRequest

HEAD = "worker-2"
GRACE_S, BROUGHT_UP_S = 60.0, 20.0
KILL_S = 0.02
"""From the message that the head is killed over to its death: a stop is known by then."""


class KilledOver(Checker):
    """The head is killed over a message of a kind, the `first` of them and later ones."""

    def __init__(
        self, what: str, *, first: int = 1, times: int = 1, after_s: tuple[float, ...] = (KILL_S,)
    ) -> None:
        """what: the operation of a question, or "drain". after_s: from each message to deaths."""
        self._what, self._first, self._left, self._after_s = what, first, times, after_s
        self.stops: Simulation | None = None
        """It is asked to stop with the first of these messages."""
        self.stopped_s = 0.0

    def at_start(self, world: World) -> None:
        self.world = world

    def on_message(self, process: Any, peer: Peer, message: Message) -> None:
        is_question = isinstance(message, PeerRequest) and message.op == self._what
        is_one = is_question or (isinstance(message, Drain) and self._what == "drain")
        if process.name != HEAD or not is_one or not self._left:
            return
        self._first -= 1
        if self._first > 0:
            return
        now = process.timeline.now
        if self.stops is not None:
            self.stopped_s = now
            self.stops.request(now, "stop", {"grace_s": GRACE_S, "checkpoint": True})
            self.stops = None
        self._left -= 1
        for after_s in self._after_s:
            self.world.timeline.at(now + after_s, lambda: self.world.kill(HEAD))

    def at_end(self, world: World) -> None:
        assert not self._left, f"the head has had no {self._what}"


class KilledInFinish(KilledOver):
    """The head is killed while a client runs the task's `finish`, before that asks it."""

    def __init__(self, *, coordinator_too: bool = False) -> None:
        """coordinator_too: it dies first."""
        super().__init__("finish")
        self.killed_s = 0.0
        self._coordinator_too = coordinator_too

    def on_message(self, process: Any, peer: Peer, message: Message) -> None:
        """It is not killed over a message."""

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, RunEvaluation) and effect.finish_with is not None and self._left:
            self._left = 0
            self.killed_s = process.timeline.now + KILL_S
            if self._coordinator_too:
                self.world.timeline.at(process.timeline.now, lambda: self.world.kill(COORDINATOR))
            self.world.timeline.at(self.killed_s, lambda: self.world.kill(HEAD))


def run(
    heads: str, killed: KilledOver, *more: Checker, is_stopped: bool = False,
    restarts_max: int = 20, **takes_s: float,
) -> Outcome:  # fmt: skip
    options = {"clients": "parallel", "heads": "each"} if heads == "each" else {}
    epochs = 8 if is_stopped else 1
    problem = SplitLedger(samples=64, portion_batches=2, batch_size=4, epochs=epochs)
    problem.is_in_turn = not options
    job = job_file(
        3, 2, algorithm=("split", options), optimizer=ACCOUNT, batch_size=4, portion_batches=2,
        restarts_max=restarts_max, epochs=float(epochs), evaluate_epochs=1.0, parties=(
            Party(name="clinic", role="client", task="a", host="local", workers=2),
            Party(name="lab", role="head", task="b", host="local"),
        ),
    )  # fmt: skip
    checkers = (killed, SplitChecker(problem, heads), LivenessChecker(60.0), NothingLeft(), *more)
    compute = ComputeOptions(**{"step_s": 0.1, "build_s": 0.1, **takes_s})
    simulation = Simulation(job, problem, seed=3, compute=compute, checkers=checkers)
    killed.stops = simulation if is_stopped else None
    outcome = simulation.run(200.0)
    assert outcome.state == ("stopped" if is_stopped else "finished"), outcome.reason
    assert [row["error"] for row in outcome.store.checkpoints.values()][-1] == ""
    return outcome


@pytest.mark.parametrize("heads", ["one", "each"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_stop_waits_for_the_batch_that_the_head_died_over(heads: str, times: int):
    killed = KilledOver(STEP, first=9, times=times)
    outcome = run(heads, killed, is_stopped=True)
    assert not outcome.store.texts("late")
    assert outcome.seconds < killed.stopped_s + BROUGHT_UP_S
    f, h = (outcome.world.machine(f"server-{shard}").serving.shard for shard in range(2))
    assert f.samples == h.samples


def test_the_last_step_of_all_heads_is_made_by_the_next_head():
    outcome = run("each", KilledOver("drain", times=2))
    assert not outcome.store.texts("late")
    h = outcome.world.machine("server-1").serving.shard
    assert h.optimizer.counters[GATHERED] == 0


@pytest.mark.parametrize("heads", ["one", "each"])
def test_a_head_that_dies_over_the_last_evaluation_is_replaced(heads: str):
    evaluated = Watcher(Evaluated)
    outcome = run(heads, KilledOver(PREDICT, times=2), evaluated)
    assert not outcome.store.texts("late")
    assert "applied" in outcome.store.run["evaluation"]


def test_a_finish_that_asks_a_head_that_is_gone_is_given_up_at_once():
    """The last checkpoint is behind it, so no head comes any more."""
    killed = KilledInFinish()
    outcome = run("one", killed, finish_s=5.0)
    error = outcome.store.run["finish"]["error"]
    assert error.startswith(f"{HEAD}, which it asks, is gone (")
    assert "dlctl checkpoint export" in error
    assert outcome.seconds < killed.killed_s + BROUGHT_UP_S


@pytest.mark.parametrize("after_s", [(2.0,), (0.5, 2.8)], ids=["starting", "in backoff"])
def test_a_head_that_has_not_come_before_the_last_checkpoint_does_not_come(
    after_s: tuple[float, ...],
) -> None:
    """The servers are closed to it, or nobody starts it: `finish` would wait for its whole time."""
    killed = KilledOver(PREDICT, after_s=after_s)
    outcome = run("one", killed, evaluate_s=3.0, build_s=1.5, finish_s=0.5)
    assert f"{HEAD}, which it asks, is gone (" in outcome.store.run["finish"]["error"]
    assert outcome.seconds < BROUGHT_UP_S


def test_the_next_coordinator_does_not_replace_a_head_once_the_servers_are_closed() -> None:
    """It begins the shutdown anew, with the last evaluation."""
    killed = KilledInFinish(coordinator_too=True)
    outcome = run("one", killed, finish_s=5.0)
    assert any("the coordinator is back" in text for text in outcome.store.texts("recover"))
    starts = [text for text in outcome.store.texts("start") if HEAD in text]
    assert len(starts) == 1, "only its first process"
    assert f"{HEAD}, which it asks, is gone (" in outcome.store.run["finish"]["error"]
    assert outcome.seconds < killed.killed_s + BROUGHT_UP_S


def test_a_finish_is_not_given_up_over_a_head_that_is_there():
    outcome = run("one", KilledOver(PREDICT), finish_s=5.0)
    assert outcome.store.run["finish"]["error"] == ""
    assert "applied" in outcome.store.run["finish"]["text"]


def test_nobody_waits_for_a_last_evaluation_by_a_head_that_dies_again_and_again():
    outcome = run("one", KilledOver(PREDICT, times=3), restarts_max=2)
    assert any(HEAD in text for text in outcome.store.texts("late"))
    assert outcome.seconds < 60.0
