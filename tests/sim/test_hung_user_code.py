"""User code that hangs does not hide: its process lives and reports, but its batch never ends."""

from typing import Any

import pytest
from simulated import Watcher, job_file

from dlctl.roles.coordinator.checkpointing import SAVE_S_MAX, STUCK_S_MAX
from dlctl.roles.coordinator.shutdown import EXIT_S
from dlctl.roles.protocol.effects import LocateTask
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.util.text import PLACE_CHARS_MAX, bounded_place
from dlctl.wire import messages as m

pytestmark = pytest.mark.long

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


def seen_at(when_s: float, compute: ComputeOptions, workers: int) -> Simulation:
    """A run as it was then; nothing is written of it afterwards."""
    job = job_file(workers=workers, seconds=1000.0)
    simulation = Simulation(job, LeastSquares(), compute=compute)
    simulation.run(when_s)
    return simulation


def test_a_worker_that_hangs_says_in_which_line_and_all_who_do_are_named() -> None:
    """The first of them was not the only one, and by then the run was called degraded."""
    hung = ComputeOptions(step_s=0.1, slow=dict.fromkeys(range(3), 1e6))
    store = seen_at(60.0, hung, 3).store
    for name in ("worker-0", "worker-1", "worker-2"):
        assert store.daemons[name]["metrics"]["stuck_at"] == "/home/me/train.py:51"
    assert store.run["state"] == "degraded"
    assert store.run["reason"] == "worker-0, worker-1, worker-2"
    assert [text for text in store.texts("state") if "degraded" in text] != []
    assert len([text for text in store.texts("state") if "degraded" in text]) == 1


def test_of_many_who_hang_the_first_are_named_and_the_others_counted() -> None:
    hung = ComputeOptions(step_s=0.1, slow=dict.fromkeys(range(10), 1e6))
    reason = seen_at(40.0, hung, 10).store.run["reason"]
    assert reason.startswith("worker-0, worker-1, ")
    assert reason.endswith("worker-7, and 2 more")


def test_a_batch_that_takes_longer_than_usual_is_told_of_before_it_counts_as_hanging() -> None:
    hung = ComputeOptions(step_s=0.1, slow={1: 1e6})
    rows = seen_at(8.0, hung, 2).store.daemons
    assert rows["worker-1"]["state"] == "running"
    assert rows["worker-1"]["metrics"]["in_batch_s"] > 2.0
    assert "in_batch_s" not in rows["worker-0"]["metrics"]
    assert "in_batch_s" not in seen_at(40.0, hung, 2).store.daemons["worker-1"]["metrics"]


def test_the_place_where_a_task_hangs_can_be_sent_whatever_its_name_is() -> None:
    assert bounded_place("/home/me/train.py:51") == "/home/me/train.py:51"
    assert bounded_place("/odd/\udcff.py:7") == "/odd/\\udcff.py:7"
    long = bounded_place(f"/{'x' * 5000}/train.py:51")
    assert len(long) == PLACE_CHARS_MAX
    assert (long[:4], long[-12:]) == ("...x", "/train.py:51")


TOPK = ("topk", {"density": 0.1})
HANGS_S = 5.0


def run_of_two(
    every: int, slow: dict[int, float], evaluate_s: float = 0.0, epochs: float = 0.0
) -> tuple[Simulation, Watcher]:
    """With what its coordinator answers. every: a worker pushes every so many steps. epochs: it
    evaluates every so many, for `evaluate_s` seconds.
    """
    watcher = Watcher(m.Reply)
    job = job_file(
        workers=2, seconds=300.0, portion_batches=100, compression=TOPK, evaluate_epochs=epochs,
        algorithm=("downpour", {"push_every_steps": every}),
    )  # fmt: skip
    compute = ComputeOptions(step_s=0.1, slow=slow, evaluate_s=evaluate_s)
    problem = LeastSquares(samples=8192)
    return Simulation(job, problem, compute=compute, checkers=(watcher,)), watcher


def asked(
    verb: str,
    when_s: float,
    every: int = 8,
    save_s: dict[str, float] | None = None,
    **arguments: Any,
) -> tuple[Any, list[Any]]:
    """A run of which worker-1 begins to hang, asked for `verb`; with what its coordinator has
    answered, and when; what it repeats only once. save_s: how long the files of some take.
    """
    slow = {1: 1.0}
    simulation, watcher = run_of_two(every, slow)
    simulation.world.disk.slow_s = save_s or {}
    simulation.at(HANGS_S, lambda: slow.update({1: 1e6}))
    simulation.request(when_s, verb, arguments)
    outcome = simulation.run()
    answers = [(seconds, reply) for seconds, _, _, reply in watcher.sent]
    before = [None, *(reply for _, reply in answers)]
    return outcome, [a for a, old in zip(answers, before, strict=False) if a[1] != old]


@pytest.mark.parametrize("when_s", [6.0, 30.0])
def test_who_was_given_up_while_draining_is_hardly_waited_for_again(when_s: float) -> None:
    outcome, answers = asked("stop", when_s, checkpoint=True, grace_s=5.0)
    assert outcome.state == "stopped"
    assert outcome.seconds < when_s + 5.0 + STUCK_S_MAX + EXIT_S + 1.0
    row = outcome.store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", ["worker-1"])
    states = [(reply.result["phase"], reply.result.get("waiting", [])) for _, reply in answers]
    saving = [name for phase, names in states if phase == "saving" for name in names]
    assert "worker-1" in {name.partition(" ")[0] for name in saving}


def test_a_worker_that_hangs_with_all_of_its_steps_pushed_saves_nevertheless() -> None:
    outcome, _ = asked("stop", 30.0, 1, checkpoint=True, grace_s=5.0)
    row = outcome.store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", [])


@pytest.mark.parametrize("server_s", [0.1, 12.0])
def test_a_last_checkpoint_waits_for_a_worker_that_is_writing(server_s: float) -> None:
    """It hangs, and is given up while draining; but it saves, and its file is a large one."""
    save_s = {"server-0": server_s, "worker-1": server_s + 15.0}
    outcome, _ = asked("stop", 30.0, 1, save_s, checkpoint=True, grace_s=5.0)
    row = outcome.store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", [])
    assert row["seconds"] > server_s + 15.0 > STUCK_S_MAX


@pytest.mark.long
def test_a_checkpoint_waits_for_a_worker_that_is_writing() -> None:
    _, answers = asked("checkpoint", 30.0, 1, {"worker-1": 2 * STUCK_S_MAX})
    last = next(reply for _, reply in answers if reply.done)
    assert (last.error, last.result["without"]) == ("", [])
    assert last.result["seconds"] > 2 * STUCK_S_MAX


def test_the_short_limit_counts_from_the_last_answer() -> None:
    """While a server is waited for, nobody is given up; then who hangs has its time."""
    outcome, _ = asked("stop", 30.0, 8, {"server-0": 12.0}, checkpoint=True, grace_s=5.0)
    row = outcome.store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", ["worker-1"])
    assert row["seconds"] == pytest.approx(12.0 + STUCK_S_MAX, abs=1.0)


def test_a_last_checkpoint_waits_for_a_worker_whose_batches_are_only_slow() -> None:
    """It is given up while draining, and saves after its next push."""
    simulation, _ = run_of_two(8, {1: 30.0})
    simulation.request(30.0, "stop", {"checkpoint": True, "grace_s": 5.0})
    row = simulation.run().store.run["checkpoint"]
    assert (row["error"], row["without"]) == ("", [])
    assert row["seconds"] > STUCK_S_MAX


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("evaluate_s", [60.0, SAVE_S_MAX + 80.0])
@pytest.mark.parametrize(
    ("verb", "arguments"), [("checkpoint", {}), ("stop", {"checkpoint": True, "grace_s": 5.0})]
)
def test_a_checkpoint_waits_for_a_worker_that_evaluates(
    verb: str, arguments: dict[str, Any], evaluate_s: float
) -> None:
    simulation, watcher = run_of_two(8, {}, evaluate_s, epochs=0.2)
    simulation.request(30.0, verb, arguments)
    rows: list[dict[str, Any]] = []
    simulation.at(40.0, lambda: rows.append(dict(simulation.store.run)))
    outcome = simulation.run()
    left_s = rows[0]["saving"]["gives_up_at"] - rows[0]["updated_at"]
    assert 0.0 < EVALUATE_S_MAX + SAVE_S_MAX - left_s < 11.0
    waits = [reply.result.get("waiting", []) for reply in watcher.messages()]
    waited_for = {name for names in waits for name in names}
    assert any(name.startswith("worker-0 (in one evaluation for ") for name in waited_for)
    row = outcome.store.checkpoints[1]
    assert (row["error"], row["without"]) == ("", [])
    manifest = outcome.store.manifests[row["path"]]
    assert [part["name"] for part in manifest["workers"]] == ["worker-0", "worker-1"]
    assert row["seconds"] > STUCK_S_MAX
    assert row["seconds"] < evaluate_s + 5.0, "no longer than it has to"


def test_a_worker_that_hangs_before_its_evaluation_is_called_slow_nevertheless() -> None:
    slow = {0: 1.0, 1: 1.0}
    simulation, _ = run_of_two(8, slow, epochs=0.2)
    simulation.at(HANGS_S, lambda: slow.update({0: 1e6}))
    rows: list[dict[str, Any]] = []
    simulation.at(80.0, lambda: rows.append(dict(simulation.store.daemons["worker-0"])))
    simulation.run()
    assert rows[0]["state"] == "slow"
    assert rows[0]["phase"].startswith("in one batch for 7")


def test_a_checkpoint_waits_for_a_worker_that_is_stuck_for_a_short_time_and_names_it() -> None:
    _, answers = asked("checkpoint", 30.0)
    replies = [(seconds, reply.result) for seconds, reply in answers if not reply.done]
    named = [result for _, result in replies if result.get("waiting")]
    assert len(named) == 1, "for how long it is stuck is no news"
    assert named[0]["waiting"][0].startswith("worker-1 (in one batch for 2")
    assert 0.0 < named[0]["left_s"] < STUCK_S_MAX
    seconds, last = next((seconds, reply) for seconds, reply in answers if reply.done)
    assert (last.error, last.result["without"]) == ("", ["worker-1"])
    assert seconds < 30.0 + STUCK_S_MAX + 1.0


def test_a_worker_that_is_not_stuck_yet_is_named_and_then_said_to_be_so() -> None:
    _, answers = asked("checkpoint", HANGS_S + 2.0)
    named = [reply.result["waiting"] for _, reply in answers if reply.result.get("waiting")]
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
