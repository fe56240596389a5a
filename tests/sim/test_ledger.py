"""Whatever goes wrong: what was acknowledged is in the servers, once, and the run goes on.

The judge is the ledger: every gradient adds exactly 1.0 to a cell of its own, so the final
weights are the count of applications. `LedgerChecker` compares them with the acks.
"""

from itertools import pairwise

import pytest
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.roles.protocol.effects import Compute
from dlctl.sim.checkers import Book, Checker, LedgerChecker, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire import messages as m

POOR = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.05, duplicate=0.05, reorder=0.1))
SLOW_STEPS = ComputeOptions(step_s=0.05)
DENSE = ("none", {})
SPARSE = ("topk", {"density": 0.005})
SOMETIMES = ("downpour", {"fetch_every_steps": 3, "push_every_steps": 2})


def run_ledger(
    seed: int = 0,
    *,
    network: NetworkOptions | None = None,
    faults: Faults | None = None,
    servers: int = 2,
    once: bool = False,
    **options,
) -> Outcome:
    """Two epochs of the ledger problem under all checkers."""
    problem = Ledger(shards=servers, cells=300)
    options = {"workers": 2, "batch_size": 4, "portion_batches": 2, "seed": seed} | options
    job = job_file(servers=servers, optimizer=ACCOUNT, epochs=2.0, **options)
    return Simulation(
        job, problem, seed, network=network, faults=faults, compute=SLOW_STEPS,
        checkers=ledger_checkers(problem, epochs=2, once=once),
    ).run()  # fmt: skip


# ---------------------------------------------------------------- a poor network


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("compression", [DENSE, SPARSE], ids=["dense", "topk"])
@pytest.mark.parametrize("block", range(10))
def test_messages_that_are_lost_repeated_or_late_change_nothing(compression, block):
    for seed in range(100 * block, 100 * block + 5):
        outcome = run_ledger(
            seed, network=POOR, faults=Faults(heal_at_s=4.0), compression=compression, once=True
        )
        assert (outcome.state, outcome.seconds < 20) == ("finished", True), seed


def test_without_faults_every_gradient_is_applied_and_every_sample_seen_once():
    outcome = run_ledger(once=True)
    assert outcome.weights.sum() == 2 * len(outcome.world.objective.authors) == 64
    assert outcome.network.lost.keys() <= {"Members", "Heard"}, "to daemons that have left"


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("block", range(4))
def test_broken_connections_come_back_under_other_ids_and_nothing_stays_lost(block):
    for seed in range(5 * block, 5 * block + 5):
        faults = Faults(resets=10, from_s=0.3, heal_at_s=2.0)
        outcome = run_ledger(seed, faults=faults, once=True, algorithm=SOMETIMES)
        assert (outcome.state, outcome.seconds < 15) == ("finished", True), seed


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("block", range(4))
def test_links_that_are_cut_one_way_stop_nothing_for_good(block):
    for seed in range(5 * block, 5 * block + 5):
        faults = Faults(cuts=6, cut_s=3.0, from_s=0.3, heal_at_s=4.0)
        outcome = run_ledger(seed, faults=faults, once=True)
        assert (outcome.state, outcome.seconds < 20) == ("finished", True), seed


# ---------------------------------------------------------------- deaths


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("compression", [DENSE, SPARSE], ids=["dense", "topk"])
@pytest.mark.parametrize("block", range(4))
def test_workers_that_are_killed_at_any_time_are_replaced(block, compression):
    for seed in range(5 * block, 5 * block + 5):
        faults = Faults(kills=4, from_s=0.0, heal_at_s=2.5)
        outcome = run_ledger(seed, faults=faults, workers=3, compression=compression)
        assert (outcome.state, outcome.seconds < 20) == ("finished", True), seed


MOMENTS = [
    Moment(name="worker-0", kind="Register"),
    Moment(name="worker-0", kind="Welcome", direction="received"),
    Moment(name="worker-1", kind="ModelReady"),
    Moment(name="worker-0", kind="Topology", direction="received"),
    Moment(name="worker-0", kind="Join", before=True),
    Moment(name="worker-0", kind="Initialise", before=True),
    Moment(name="worker-0", kind="Initialise"),
    Moment(name="worker-0", kind="Initialise", count=2, before=True),
    Moment(name="worker-1", kind="LeaseRequest"),
    Moment(name="worker-1", kind="Lease", direction="received"),
    Moment(name="worker-1", kind="Lease", count=2, direction="received"),
    Moment(name="worker-1", kind="Parameters", count=3, direction="received"),
    Moment(name="worker-1", kind="Push", before=True),
    Moment(name="worker-1", kind="Push"),
    Moment(name="worker-1", kind="Push", count=4, before=True),
    Moment(name="worker-1", kind="Ack", count=3, direction="received"),
    Moment(name="worker-1", kind="PortionDone", before=True),
    Moment(name="worker-1", kind="PortionDone"),
    Moment(name="worker-1", kind="PortionNoted", direction="received"),
    Moment(name="worker-0", kind="Evaluate", direction="received"),
    Moment(name="worker-0", kind="Evaluated", before=True),
    Moment(name="worker-1", kind="Save", direction="received"),
    Moment(name="worker-1", kind="Drain", direction="received"),
    Moment(name="worker-1", kind="Drained"),
    Moment(name="worker-1", kind="Shutdown", direction="received"),
]


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: f"{m.name}-{m.kind}-{m.count}-{m.before}")
def test_a_worker_may_die_in_the_middle_of_anything(moment):
    outcome = run_ledger(faults=Faults(moments=(moment,)), checkpoint_s=0.5, evaluate_epochs=0.5)
    deaths = [t for t in outcome.store.texts("exit") if moment.name in t]
    assert len(deaths) == 1
    assert (outcome.state, outcome.seconds < 20) == ("finished", True)


def test_when_a_worker_dies_the_others_do_not_stop():
    class Computing(Checker):
        """When each worker began a step."""

        def __init__(self) -> None:
            self.times: dict[str, list[float]] = {}

        def on_effect(self, process, effect):
            if isinstance(effect, Compute):
                self.times.setdefault(process.name, []).append(process.timeline.now)

    computing = Computing()
    job = job_file(workers=3, epochs=8.0)
    simulation = Simulation(
        job, LeastSquares(), compute=ComputeOptions(step_s=0.05, spread=0.0), checkers=(computing,)
    )
    simulation.at(1.5, lambda: simulation.world.kill("worker-2"))
    outcome = simulation.run()
    assert outcome.state == "finished"
    for name in ("worker-0", "worker-1"):
        times = computing.times[name]
        pauses = [b - a for a, b in pairwise(times)]
        assert max(pauses) < 0.06, f"{name} was held up"
    assert max(computing.times["worker-2"]) > 2.0, "it was replaced"


def test_what_a_dead_worker_had_not_pushed_is_done_again_by_others():
    moment = Moment(name="worker-1", kind="Lease", count=2, direction="received")
    outcome = run_ledger(faults=Faults(moments=(moment,)))
    (lost,) = outcome.store.texts("lost")
    assert [text in lost for text in ("worker-1 ", " 2 portions")] == [True, True]


@pytest.mark.parametrize("also", [(), ("worker-0",)], ids=["one", "all"])
def test_workers_that_die_again_and_again_end_the_run_if_no_other_is_left(also):
    job = job_file(workers=2, restarts_max=2, epochs=10000.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS, checkers=(TermsChecker(),))
    for name in ("worker-1", *also):
        for when in (1.0, 3.0, 6.0):
            simulation.at(when, lambda name=name: simulation.world.kill(name))
    simulation.request(20.0, "stop", {})
    outcome = simulation.run()
    died = "it died 3 times before or soon after it was ready: killed by SIGKILL"
    assert outcome.store.texts("quarantine")[0] == f"worker-1 is quarantined: {died}"
    assert outcome.left_behind == []
    if also:
        assert (outcome.state, outcome.reason) == (
            "failed", f"no worker is left: worker-0: {died}"
        )  # fmt: skip
    else:
        assert outcome.state == "stopped"
        assert outcome.store.daemons["worker-0"]["restarts"] == 0


@pytest.mark.long
def test_deaths_after_a_long_life_do_not_add_up():
    job = job_file(workers=2, restarts_max=2, epochs=4000.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS, checkers=(TermsChecker(),))
    for when in (15.0, 30.0, 45.0, 60.0):
        simulation.at(when, lambda: simulation.world.kill("worker-1"))
    simulation.request(75.0, "stop", {})
    outcome = simulation.run()
    assert outcome.state == "stopped"
    assert outcome.store.daemons["worker-1"]["restarts"] == 4


def test_without_durability_the_death_of_a_server_ends_the_run_and_leaves_nothing_running():
    job = job_file(workers=2, servers=2, durability="none", epochs=100.0)
    simulation = Simulation(job, LeastSquares())
    simulation.at(2.0, lambda: simulation.world.kill("server-1"))
    outcome = simulation.run()
    assert outcome.state == "failed"
    assert outcome.reason.startswith("server-1 ended: killed")
    assert outcome.left_behind == []
    assert outcome.seconds < 20


@pytest.mark.long
def test_a_server_that_dies_again_and_again_fails_the_run_and_its_shard_is_kept():
    job = job_file(workers=2, epochs=10000.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS)

    def kill() -> None:
        if simulation.store.run["state"] != "failed":
            simulation.world.kill("server-0")
            simulation.world.timeline.after(0.5, kill)

    simulation.at(2.0, kill)
    outcome = simulation.run()
    reason = "server-0 ended: killed by SIGKILL; it has died 21 times in a row, and the state of"
    assert (outcome.state, outcome.reason) == ("failed", f"{reason} its shard is kept")
    assert outcome.left_behind == []
    assert outcome.store.daemons["server-0"]["restarts"] == 20
    assert sorted(outcome.store.states) == [0], "for `dlctl recover`"


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("name", ["server-0", "server-1", "agent-0", "coordinator", "worker-1"])
@pytest.mark.parametrize("when", [0.55, 0.7, 0.85, 1.0])
def test_whoever_dies_the_run_goes_on_and_its_account_is_right(name, when):
    problem = Ledger(2, cells=160)
    job = job_file(workers=2, servers=2, optimizer=ACCOUNT, epochs=3.0)
    checkers = ledger_checkers(problem, epochs=3, once=name != "worker-1")
    simulation = Simulation(job, problem, compute=SLOW_STEPS, checkers=checkers)
    simulation.at(when, lambda: simulation.world.kill(name))
    outcome = simulation.run()
    assert (outcome.state, outcome.left_behind) == ("finished", []), outcome.reason
    assert len([p for p in outcome.world.processes if p.name == name]) == 2


def test_a_server_that_dies_while_the_run_is_ending_makes_it_fail_if_nothing_was_kept():
    job = job_file(workers=2, durability="none", epochs=2.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS)

    def kill() -> None:
        if simulation.store.run["state"] == "stopping":
            simulation.world.kill("server-0")
        else:
            simulation.world.timeline.after(0.01, kill)

    simulation.at(1.0, kill)
    outcome = simulation.run()
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    assert outcome.seconds < 20


@pytest.mark.long
def test_without_a_coordinator_the_agent_ends_everything_after_ten_minutes():
    job = job_file(workers=2, epochs=1000.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS)
    simulation.world.restart_coordinator = lambda *_: (
        None
    )  # As if it could not be started any more.
    simulation.at(2.0, lambda: simulation.world.kill("coordinator"))
    outcome = simulation.run()
    assert outcome.left_behind == []
    assert 600.0 < outcome.seconds < 620.0


# ---------------------------------------------------------------- the living dead


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("block", range(2))
def test_frozen_workers_and_servers_are_waited_for(block):
    for seed in range(5 * block, 5 * block + 5):
        faults = Faults(freezes=4, freeze_s=4.0, from_s=0.3, heal_at_s=6.0)
        outcome = run_ledger(seed, faults=faults, once=True)
        assert (outcome.state, outcome.seconds < 25) == ("finished", True), seed


def test_a_worker_that_stays_frozen_is_killed_and_replaced():
    job = job_file(workers=2, timeouts={"silent_s": 3.0}, seconds=10.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS)
    simulation.at(2.0, lambda: simulation.world.freeze("worker-1"))
    outcome = simulation.run()
    assert outcome.store.texts("silent") == ["worker-1: no heartbeat for 3 s: it is killed"]
    assert outcome.world.process("worker-1").incarnation == 2
    assert outcome.state == "finished"


@pytest.mark.long
def test_a_coordinator_that_was_stopped_for_long_blames_nobody_and_goes_on():
    """The data plane went on meanwhile; everybody's reports are still to be read."""
    job = job_file(workers=2, servers=2, seconds=60.0)
    simulation = Simulation(job, LeastSquares(), compute=SLOW_STEPS)
    simulation.at(2.0, lambda: simulation.world.freeze("coordinator"))
    simulation.at(30.0, lambda: simulation.world.thaw("coordinator"))
    outcome = simulation.run(40.0)
    assert outcome.store.texts("silent") == []
    assert outcome.store.run["state"] == "running"


@pytest.mark.parametrize("kind", ["Push", "LeaseRequest"])
def test_a_worker_that_was_given_up_and_comes_back_is_fenced(kind):
    """Its host was away: another process has its slot, and nothing of the old one gets in."""
    problem = Ledger(cells=400)
    book, pushes = Book(problem), Watcher(m.Push)
    job = job_file(workers=2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=8.0)
    simulation = Simulation(
        job, problem, compute=SLOW_STEPS, checkers=(book, LedgerChecker(book), pushes)
    )
    world, ghosts = simulation.world, []

    def give_up() -> None:
        ghost = world.process("worker-1")
        ghost.freeze()
        ghost.ended(-9)  # This is what its agent hears; the process is only frozen.
        ghosts.append(ghost)

    simulation.at(1.5 if kind == "Push" else 1.53, give_up)
    simulation.at(4.0, lambda: ghosts[0].thaw())
    outcome = simulation.run()
    (ghost,) = ghosts
    assert ghost.status == 75
    assert outcome.state == "finished"
    late = [p for at, _, _, p in pushes.sent if at >= 4.0 and (p.slot, p.term) == (1, 1)]
    assert not any((p.slot, p.term, 0, p.seq) in book.acknowledged for p in late)


# ---------------------------------------------------------------- everything at once


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("block", range(8))
def test_everything_at_once(block):
    for seed in range(100 * block, 100 * block + 4):
        faults = Faults(kills=3, freezes=2, cuts=3, resets=3, save_errors=0.3, heal_at_s=4.0)
        outcome = run_ledger(
            seed, network=POOR, faults=faults, workers=3, checkpoint_s=0.7, evaluate_epochs=0.5,
            algorithm=SOMETIMES if seed % 2 else ("downpour", {"warmstart_steps": 6}),
            compression=SPARSE if seed % 3 else DENSE,
        )  # fmt: skip
        assert (outcome.state, outcome.seconds < 25) == ("finished", True), seed
