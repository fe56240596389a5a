"""User code that hangs does not hide: its process lives and reports, but its batch never ends."""

from typing import Any

import pytest
from simulated import Watcher, job_file

from dlctl import messages as m
from dlctl.roles.checkpointing import GIVEN_UP_S_MAX, STUCK_S_MAX
from dlctl.roles.effects import LocateTask
from dlctl.roles.ending import EXIT_S
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.problems import LeastSquares
from dlctl.sim.simulation import Simulation

HUNG = ComputeOptions(step_s=0.1, slow={1: 1e6})


def test_a_worker_that_hangs_in_one_batch_is_called_slow_and_the_others_go_on():
    seen: dict[float, Any] = {}
    job = job_file(workers=2, seconds=100.0)
    simulation = Simulation(job, LeastSquares(), compute=HUNG)

    def look() -> None:
        store = simulation.store
        rows = {name: (row["state"], row["phase"]) for name, row in store.daemons.items()}
        seen[simulation.world.timeline.now] = store.run["state"], store.run["step"], rows

    for when_s in (5.0, 80.0):
        simulation.at(when_s, look)
    simulation.run()
    (_, early_step, early), (state, step, late) = seen.values()
    assert early["worker-1"][0] == "running", "a batch may take ten seconds"
    assert late["worker-1"][0] == "slow"
    assert late["worker-1"][1].startswith("in one batch for ")
    assert late["worker-0"][0] == "running"
    assert state == "degraded"
    assert step > early_step


class Located(Checker):
    """Whose log says where its task is."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_effect(self, process, effect):
        if isinstance(effect, LocateTask):
            self.names.append(process.name)


def test_where_a_task_hangs_is_looked_for_once():
    located = Located()
    job = job_file(workers=2, seconds=100.0)
    Simulation(job, LeastSquares(), compute=HUNG, checkers=(located,)).run()
    assert located.names == ["worker-1"]


TOPK = ("topk", {"density": 0.1})
HANGS_S = 5.0


def asked(verb: str, when_s: float, every: int = 8, **arguments: Any) -> tuple[Any, list[Any]]:
    """A run of which worker-1 begins to hang, asked for `verb`; with what its coordinator has
    answered, and when; what it repeats only once. every: a worker pushes every so many steps.
    """
    told, slow = Watcher(m.Reply), {1: 1.0}
    method = ("downpour", {"push_every_steps": every})
    job = job_file(
        workers=2, seconds=300.0, portion_batches=100, compression=TOPK, algorithm=method
    )
    compute, problem = ComputeOptions(step_s=0.1, slow=slow), LeastSquares(samples=8192)
    simulation = Simulation(job, problem, compute=compute, checkers=(told,))
    simulation.at(HANGS_S, lambda: slow.update({1: 1e6}))
    simulation.request(when_s, verb, arguments)
    outcome = simulation.run()
    answers = [(seconds, reply) for seconds, _, _, reply in told.sent]
    before = [None, *(reply for _, reply in answers)]
    return outcome, [a for a, old in zip(answers, before, strict=False) if a[1] != old]


@pytest.mark.parametrize("when_s", [6.0, 30.0])
def test_who_was_given_up_while_draining_is_hardly_waited_for_again(when_s: float) -> None:
    outcome, told = asked("stop", when_s, checkpoint=True, grace_s=5.0)
    assert outcome.state == "stopped"
    assert outcome.seconds < when_s + 5.0 + GIVEN_UP_S_MAX + EXIT_S + 1.0
    row = outcome.store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", ["worker-1"])
    said = [(reply.result["phase"], reply.result.get("waiting", [])) for _, reply in told]
    saving = [name for phase, names in said if phase == "saving" for name in names]
    assert "worker-1" in {name.partition(" ")[0] for name in saving}


def test_a_worker_that_hangs_with_all_of_its_steps_pushed_saves_nevertheless() -> None:
    outcome, _ = asked("stop", 30.0, 1, checkpoint=True, grace_s=5.0)
    row = outcome.store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", [])


def test_a_checkpoint_waits_for_a_worker_that_is_stuck_for_a_short_time_and_names_it() -> None:
    _, told = asked("checkpoint", 30.0)
    replies = [(seconds, reply.result) for seconds, reply in told if not reply.done]
    named = [result for _, result in replies if result.get("waiting")]
    assert len(named) == 1, "for how long it is stuck is no news"
    assert named[0]["waiting"][0].startswith("worker-1 (in one batch for 2")
    assert 0.0 < named[0]["left_s"] < STUCK_S_MAX
    seconds, last = next((seconds, reply) for seconds, reply in told if reply.done)
    assert (last.error, last.result["without"]) == ("", ["worker-1"])
    assert seconds < 30.0 + STUCK_S_MAX + 1.0


def test_a_worker_that_is_not_stuck_yet_is_named_and_then_said_to_be_so() -> None:
    _, told = asked("checkpoint", HANGS_S + 2.0)
    named = [reply.result["waiting"] for _, reply in told if reply.result.get("waiting")]
    assert named[0] == ["worker-1"]
    assert named[1][0].startswith("worker-1 (in one batch for 1")
    assert len(named) == 2


def test_a_worker_that_is_to_leave_and_hangs_has_a_time_at_which_it_is_killed() -> None:
    """`status` shows it, so that whoever waits for the worker knows for how long at most."""
    rows: list[dict[str, Any]] = []
    job = job_file(workers=2, seconds=100.0, timeouts={"grace_s": 20.0})
    simulation = Simulation(job, LeastSquares(), compute=HUNG)
    simulation.request(30.0, "restart", {"names": ["worker-1"]})
    for when_s in (29.0, 40.0, 52.0):
        simulation.at(when_s, lambda: rows.append(dict(simulation.store.daemons["worker-1"])))
    simulation.run()
    before, leaving, after = rows
    assert (before["kill_at"], after["kill_at"]) == (None, None)
    assert leaving["kill_at"] - leaving["updated_at"] == pytest.approx(10.0, abs=2.0)
    assert after["incarnation"] == before["incarnation"] + 1
