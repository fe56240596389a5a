"""Synchronous SGD in virtual time: a barrier in the servers that nobody's death can hold up."""

import numpy as np
import pytest
import torch
from simulated import Watcher, job_file, rows_in_order

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.methods.sync import Options
from dlctl.compress.base import Delta
from dlctl.job.config import Gradients, ParameterGroup, Schedule
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.roles.protocol.effects import Compute
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers import Checker, NothingLeft, SamplesChecker, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import Batch, LeastSquares, Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import APPLIED, HELD, LATE, Ack, Packed, Push

SYNC = ("sync", {})


class OneVersion(Checker):
    """Every gradient is of the same step on all shards."""

    def on_effect(self, process, effect):
        if isinstance(effect, Compute):
            versions = {
                channel.basis.version for channel in process.machine.training.links.channels
            }
            assert len(versions) == 1, f"{process} computes on steps {versions}"


# ---------------------------------------------------------------- what it computes


@pytest.mark.oracle("sync", "one worker, its batch four times as large")
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_four_workers_are_one_worker_with_a_batch_four_times_as_large(servers, optimizer, agree):
    problem = LeastSquares(samples=256)
    options = {"algorithm": SYNC, "optimizer": (optimizer, {"lr": 0.1}), "portion_batches": 1}
    four = job_file(workers=4, servers=servers, batch_size=8, epochs=3.0, **options)
    slow = ComputeOptions(slow={2: 3.0})
    outcome = Simulation(four, problem, compute=slow, checkers=(OneVersion(),)).run()
    one = Simulation(job_file(batch_size=32, epochs=3.0, **options), problem).run()
    agree(outcome.weights, one.weights, atol=1e-6)
    assert outcome.world.machine("server-0").serving.shard.version >= 24


def scheduled(workers, batch_size, victim=None, servers=2):
    job = job_file(
        workers, servers, batch_size=batch_size, epochs=6.0, portion_batches=1, algorithm=SYNC,
        optimizer=("adam", {"lr": 0.1, "weight_decay": 0.1}),
        schedule=Schedule(kind="cosine", warmup="10%", final=0.1),
    )  # fmt: skip
    slow = ComputeOptions(step_s=0.1)
    simulation = Simulation(job, LeastSquares(samples=256), compute=slow)
    if victim:
        simulation.at(3.0, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.long
@pytest.mark.oracle("sync", "one worker with a schedule, whoever dies")
def test_a_schedule_is_that_of_one_worker_whoever_dies(agree):
    one = scheduled(1, 32, servers=1)
    for victim in (None, "server-1", "coordinator"):
        four = scheduled(4, 8, victim)
        agree(four.weights, one.weights, atol=1e-6)
        shards = [four.world.machine(f"server-{i}").serving.shard for i in (0, 1)]
        assert [shard.samples for shard in shards] == [6 * 256] * 2
        assert [shard.optimizer.lr for shard in shards] == pytest.approx([0.01] * 2)


@pytest.mark.oracle("sync", "a script: torch.optim.AdamW, cosine, clipping")
@pytest.mark.parametrize(
    ("servers", "victim"), [(1, None), (3, None), (3, "server-1"), (3, "coordinator")]
)
def test_four_workers_are_a_script_with_adamw_schedule_and_clipping(servers, victim, agree):
    """Its batch is as large as all of theirs, and torch does the work, on one whole gradient."""
    problem, peak = LeastSquares(samples=256), 0.1
    job = job_file(
        4, servers, batch_size=8, epochs=7.0, portion_batches=1, algorithm=SYNC,
        optimizer=("adamw", {"lr": peak, "weight_decay": 0.1}),
        schedule=Schedule(kind="cosine", warmup="10%", final=0.1),
        gradient=Gradients(clip_norm=0.5, clip="global"),
    )  # fmt: skip
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.1))
    if victim:
        simulation.at(3.0, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    w = problem.initial()
    parameter = torch.nn.Parameter(torch.from_numpy(w))
    script = torch.optim.AdamW([parameter], lr=peak, weight_decay=0.1)
    steps = 7 * 256 // 32
    for step, rows in enumerate(rows_in_order(job_file(batch_size=32), 256, epochs=7)):
        cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (step / steps - 0.1) / 0.9)) / 2
        warm = step / (0.1 * steps)
        script.param_groups[0]["lr"] = peak * (warm if warm < 1 else cosine)
        gradient = problem.gradient(w, Batch(rows, 0, 1, step))[1]
        parameter.grad = torch.from_numpy(gradient.astype("f4"))
        torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        script.step()
    assert step == steps - 1 >= 50
    agree(outcome.weights, w, atol=2e-6)


@pytest.mark.long
def test_the_gradient_noise_scale_is_told_of_all_shards_together():
    found = {}
    for servers in (1, 3):
        job = job_file(
            4, servers, batch_size=8, epochs=10.0, portion_batches=1, algorithm=SYNC,
            optimizer=("sgd", {"lr": 0.01}),
        )  # fmt: skip
        slow = ComputeOptions(step_s=0.1)
        outcome = Simulation(job, LeastSquares(samples=256), compute=slow).run()
        machines = [outcome.world.machine(f"server-{i}") for i in range(servers)]
        parts = [machine.serving.side.figures()["noise_parts"] for machine in machines]
        found[servers] = np.sum(parts, axis=0)
        assert outcome.store.run["noise_scale"] > 0
    assert found[3] == pytest.approx(found[1], rel=1e-4)


class OfLayers(LeastSquares):
    """The same, its parameters in three tensors, none of which ends where a shard of three does."""

    def __init__(self, samples):
        super().__init__(samples)
        sizes = {"0.weight": 5, "0.bias": 2, "1.weight": 5}
        self.layout = Layout(
            tuple(TensorEntry(n, TRAINED, (d,), "float32") for n, d in sizes.items())
        )


@pytest.mark.oracle("sync", "a script: groups of torch.optim.AdamW")
@pytest.mark.parametrize(("servers", "victim"), [(1, None), (3, None), (3, "server-1")])
def test_groups_of_parameters_are_those_of_a_script_with_adamw(servers, victim, agree):
    """Each has a rate and a decay of its own, on whatever shards it is, whoever dies."""
    problem, peak = OfLayers(samples=256), 0.05
    biases = ParameterGroup(match=("*.bias",), weight_decay=0.0)
    last = ParameterGroup(match=("1.*",), lr_scale=0.25, weight_decay=0.5)
    job = job_file(
        4, servers, batch_size=8, epochs=7.0, portion_batches=1, algorithm=SYNC,
        optimizer=("adamw", {"lr": peak, "weight_decay": 0.1}), parameters=(biases, last),
    )  # fmt: skip
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.1))
    if victim:
        simulation.at(3.0, lambda: simulation.world.kill(victim))
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    w = problem.initial()
    parts = [torch.nn.Parameter(torch.from_numpy(part)) for part in np.split(w, [5, 7])]
    groups = [
        {"params": [parts[0]]},
        {"params": [parts[1]], "weight_decay": 0.0},
        {"params": [parts[2]], "lr": 0.25 * peak, "weight_decay": 0.5},
    ]
    script = torch.optim.AdamW(groups, lr=peak, weight_decay=0.1)
    for step, rows in enumerate(rows_in_order(job_file(batch_size=32), 256, epochs=7)):
        gradient = problem.gradient(w, Batch(rows, 0, 1, step))[1].astype("f4")
        for part, of_part in zip(parts, np.split(gradient, [5, 7]), strict=True):
            part.grad = torch.from_numpy(of_part)
        script.step()
    assert step >= 50
    agree(outcome.weights, w, atol=2e-6)


@pytest.mark.oracle("sync", "the servers' optimiser on one machine")
def test_one_worker_is_the_optimiser_on_one_machine_to_the_last_bit(agree):
    problem = LeastSquares(samples=128)
    job = job_file(servers=2, algorithm=SYNC)
    outcome = Simulation(job, problem).run()
    w = problem.initial()
    shard = in_memory(SGD(SGDOptions(lr=0.1)), w)
    for number, rows in enumerate(rows_in_order(job, problem.samples, epochs=2)):
        shard.apply(Delta(problem.gradient(w, Batch(rows, 0, 1, number))[1]))
    agree(outcome.weights, w)


def test_a_step_counts_its_samples_not_its_workers():
    """One worker has 8 samples, the other 24: its gradient counts three times as much."""
    shard = in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(2, np.float32))
    barrier = Barrier(Options(), shard)
    barrier.members(frozenset({0, 1}))
    barrier.push(*_push(0, clock=0, samples=8, values=(4.0, 0.0)))
    barrier.push(*_push(1, clock=0, samples=24, values=(0.0, 4.0)))
    assert shard.w.tolist() == [-1.0, -3.0]


# ---------------------------------------------------------------- the barrier itself


def _push(slot: int, clock: int, samples: int = 8, values=(1.0, 1.0), seq: int = 0):
    delta = Packed("none", 2, (np.array(values, np.float32),))
    push = Push(slot, 1, 1, seq, clock, clock, clock, samples, clock, delta, 0)
    return push, Delta(delta.arrays[0])


@pytest.fixture
def barrier() -> Barrier:
    barrier = Barrier(Options(), in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(2, np.float32)))
    barrier.members(frozenset({0, 1}))
    return barrier


def kinds(outcomes) -> list[tuple[int, str]]:
    return [(outcome.slot, outcome.kind) for outcome in outcomes]


def test_a_push_is_held_until_the_last_member_has_pushed(barrier):
    assert kinds(barrier.push(*_push(0, clock=0))) == [(0, HELD)]
    assert barrier.clock() == 0
    assert kinds(barrier.push(*_push(1, clock=0))) == [(1, HELD), (0, APPLIED), (1, APPLIED)]
    assert barrier.clock() == 1


def test_a_push_for_a_step_that_is_over_is_late_and_changes_nothing(barrier):
    barrier.push(*_push(0, clock=0))
    barrier.push(*_push(1, clock=0))
    before = barrier.shard.w.copy()
    assert kinds(barrier.push(*_push(0, clock=0, seq=1))) == [(0, LATE)]
    assert np.array_equal(barrier.shard.w, before)
    assert kinds(barrier.push(*_push(1, clock=1, seq=1))) == [(1, HELD)]


def test_a_second_push_for_the_same_step_does_not_take_the_first_one_s_place(barrier):
    """No replica of ours makes one; but what is held must be answered in the end."""
    assert kinds(barrier.push(*_push(0, clock=0, values=(1.0, 0.0)))) == [(0, HELD)]
    assert kinds(barrier.push(*_push(0, clock=0, values=(9.0, 0.0), seq=1))) == [(0, LATE)]
    settled = barrier.push(*_push(1, clock=0, values=(3.0, 0.0)))
    assert kinds(settled) == [(1, HELD), (0, APPLIED), (1, APPLIED)]
    assert barrier.shard.w.tolist() == [-2.0, 0.0]


def test_the_death_of_the_member_that_all_wait_for_completes_the_step(barrier):
    barrier.push(*_push(0, clock=0))
    assert kinds(barrier.members(frozenset({0}))) == [(0, APPLIED)]


def test_one_who_joins_is_not_waited_for_before_its_first_push(barrier):
    for clock in (0, 1):
        barrier.push(*_push(0, clock, seq=clock))
        barrier.push(*_push(1, clock, seq=clock))
    barrier.joined(2)
    barrier.members(frozenset({0, 1, 2}))
    barrier.push(*_push(0, clock=2))
    assert (1, APPLIED) in kinds(barrier.push(*_push(1, clock=2)))
    barrier.push(*_push(2, clock=3))
    barrier.push(*_push(0, clock=3))
    assert kinds(barrier.push(*_push(1, clock=3)))[1:] == [(0, APPLIED), (1, APPLIED), (2, APPLIED)]
    barrier.push(*_push(0, clock=4))
    assert kinds(barrier.push(*_push(1, clock=4))) == [(1, HELD)], "now it counts"


def test_who_has_pushed_for_a_later_step_is_not_waited_for_at_this_one(barrier):
    """Another shard was ahead when all workers had died and new ones came."""
    barrier.members(frozenset())
    barrier.joined(0)
    barrier.joined(1)
    barrier.members(frozenset({0, 1}))
    barrier.push(*_push(0, clock=1))
    outcomes = barrier.push(*_push(1, clock=1))
    assert kinds(outcomes) == [(1, HELD), (0, APPLIED), (1, APPLIED)]
    assert barrier.clock() == 2


def test_the_order_of_arrival_makes_no_difference_to_the_last_bit():
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((3, 2)).astype("f4")

    def run(order: tuple[int, ...]) -> bytes:
        barrier = Barrier(Options(), in_memory(SGD(SGDOptions(lr=0.1)), np.zeros(2, np.float32)))
        barrier.members(frozenset({0, 1, 2}))
        for slot in order:
            barrier.push(*_push(slot, clock=0, samples=5 + slot, values=gradients[slot]))
        return barrier.shard.w.tobytes()

    assert run((0, 1, 2)) == run((2, 0, 1)) == run((1, 2, 0))


# ---------------------------------------------------------------- deaths and ends


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("workers", [4, 1])
@pytest.mark.parametrize("block", range(5))
def test_deaths_do_not_hold_the_others_up_for_ever(block, workers):
    for seed in range(2 * block, 2 * block + 2):
        problem = LeastSquares(samples=128)
        job = job_file(
            workers=workers, servers=3, algorithm=SYNC, batch_size=4, portion_batches=1,
            epochs=3.0, seed=seed,
        )  # fmt: skip
        outcome = Simulation(
            job, problem, seed,
            network=NetworkOptions(link=SimLink(jitter_s=0.004)),
            compute=ComputeOptions(step_s=0.02),
            faults=Faults(kills=5, from_s=0.2, heal_at_s=3.0),
            checkers=(OneVersion(), TermsChecker(), SamplesChecker(128, 3, once=False),
                      NothingLeft()),
        ).run()  # fmt: skip
        assert (outcome.state, outcome.seconds < 20) == ("finished", True), seed
        assert np.isfinite(outcome.weights).all()


@pytest.mark.parametrize("count", range(1, 7))
def test_a_lonely_worker_may_die_between_its_pushes_to_two_servers(count):
    moment = Moment(name="worker-0", kind="Push", count=count, before=True)
    job = job_file(servers=2, algorithm=SYNC)
    outcome = Simulation(job, LeastSquares(samples=64), faults=Faults(moments=(moment,))).run(60.0)
    assert (outcome.state, outcome.left_behind) == ("finished", [])


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("block", range(5))
def test_on_a_poor_network_every_gradient_counts_exactly_once(block):
    """The cells of one step add up to 1: all cells together are the steps that had samples."""
    for seed in range(2 * block, 2 * block + 2):
        problem = Ledger(shards=2)
        poor = NetworkOptions(link=SimLink(jitter_s=0.002, loss=0.05, duplicate=0.05, reorder=0.1))
        job = job_file(
            workers=3, servers=2, algorithm=SYNC, optimizer=("sgd", {"lr": 1.0}), batch_size=4
        )
        outcome = Simulation(
            job, problem, seed, network=poor, faults=Faults(heal_at_s=5.0),
            checkers=(OneVersion(), SamplesChecker(problem.samples, 2, once=True), NothingLeft()),
        ).run()  # fmt: skip
        assert outcome.state == "finished"
        cells = outcome.weights.reshape(2, -1)
        made = len(problem.authors)
        assert (cells[:, :made] > 0.1).all(), "one was lost"
        assert not cells[:, made:].any()
        assert np.allclose(cells.sum(axis=1), cells.sum(axis=1).round(), atol=1e-4)
        assert np.array_equal(cells[0], cells[1])


def test_a_worker_without_data_takes_part_with_0_samples_until_all_is_done():
    """Five portions for four workers: three of them have nothing to do in the second round."""
    pushes = Watcher(Push)
    job = job_file(workers=4, algorithm=SYNC, batch_size=8, portion_batches=2, epochs=1.0)
    checkers = (pushes, SamplesChecker(80, 1, once=True), NothingLeft())
    outcome = Simulation(job, LeastSquares(samples=80), checkers=checkers).run(60.0)
    assert outcome.state == "finished"
    assert {push.samples for push in pushes.messages()} == {0, 8}


def test_a_run_that_is_stopped_drains_and_goes_on_from_its_checkpoint():
    acks = Watcher(Ack)
    job = job_file(workers=3, servers=2, algorithm=SYNC, epochs=6.0)
    first = Simulation(job, LeastSquares(), checkers=(acks, NothingLeft()))
    first.request(0.8, "stop", {})
    stopped = first.run(60.0)
    assert stopped.state == "stopped"
    assert 0 < stopped.store.run["step"] < 192
    assert {ack.outcome for ack in acks.messages()} == {HELD, APPLIED}
    resumed = Simulation(job, LeastSquares(), store=stopped.store, checkers=(OneVersion(),))
    outcome = resumed.run(120.0)
    assert (outcome.state, outcome.store.run["step"]) == ("finished", 192)
