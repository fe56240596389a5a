"""Split learning in virtual time: as one process learns, and SplitFed as its loop, whoever dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import Watcher, job_file, rows_in_order

from dlctl.algorithms.methods.split import BACKWARD, STEP, BatchKey, clock_of, part_of
from dlctl.job.config import JobFile, Party
from dlctl.model.flat import TRAINED, slice_bounds
from dlctl.sim.divided import INPUTS, DividedLeastSquares, running_means
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.objectives import batch_rows
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire.messages import Array, PeerRequest, Push, PushBuffers

LR, BATCH, EPOCHS = 0.02, 4, 2
PROCESSES = 7
"""Of a run with two clients in which nobody dies."""


def parties_of(clients: int) -> tuple[Party, ...]:
    clinic = Party(name="clinic", role="client", task="a", host="local", workers=clients)
    return clinic, Party(name="lab", role="head", task="b", host="local")


def job_of(
    count: int = 2, durability: str = "process", epochs: int = EPOCHS, **options: Any
) -> JobFile:
    return job_file(
        count + 1, 2, algorithm=("split", options), optimizer=("momentum", {"lr": LR}),
        batch_size=BATCH, portion_batches=2, restarts_max=20, parties=parties_of(count),
        epochs=float(epochs), durability=durability,
    )  # fmt: skip


def run(job: JobFile, problem: DividedLeastSquares, **circumstances: Any) -> Outcome:
    outcome = Simulation(job, problem, seed=3, **circumstances).run(200.0)
    assert outcome.state == "finished", outcome.reason
    assert not outcome.left_behind
    return outcome


def gradient(problem: DividedLeastSquares, w: Array, rows: Array) -> Array:
    """Of the whole model, float64."""
    shapes = [e.shape for e in problem.layout.entries if e.kind == TRAINED]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    cut = [p.reshape(s) for p, s in zip(np.split(w, ends[:-1]), shapes, strict=True)]
    f, h = cut[0], cut[-1]
    t = cut[1] if problem.is_u else np.eye(h.shape[1])
    x, y = problem.x[rows].astype(float), problem.y[rows].astype(float)
    error = (x @ f @ h @ t - y) / len(rows)
    of = [x.T @ error @ t.T @ h.T, *([(x @ f @ h).T @ error] * problem.is_u)]
    return np.concatenate([g.ravel() for g in (*of, (x @ f).T @ error @ t.T)])


def in_one_process(problem: DividedLeastSquares, batches: list[Array]) -> Array:
    w, velocity = problem.initial().astype(float), 0.0
    for rows in batches:
        velocity = 0.9 * velocity + gradient(problem, w, rows)
        w = w - LR * velocity
    return w


@pytest.mark.oracle("split", "one process, in numpy, and kills of clients and the coordinator")
@pytest.mark.parametrize("shape", ["vanilla", "u"])
@pytest.mark.parametrize("kills", [0, 3])
def test_clients_in_turn_are_one_process(shape, kills, agree):
    problem = DividedLeastSquares(is_u=shape == "u")
    job = job_of(2, shape=shape)
    faults = Faults(kills=kills, coordinator_kills=kills and 1, from_s=0.4, heal_at_s=2.0)
    outcome = run(job, problem, faults=faults if kills else None)
    batches = rows_in_order(job, problem.samples, EPOCHS)
    agree(outcome.weights, in_one_process(problem, batches), atol=1e-6)


def rounds_of(watcher: Watcher, job: JobFile) -> list[list[BatchKey]]:
    """The batches of each step of the clients, in the order in which the head has had them."""
    order: dict[int, list[BatchKey]] = {}
    for message in watcher.messages():
        if isinstance(message, PeerRequest) and message.op in (STEP, BACKWARD):
            batch = BatchKey.of_array(message.payload.arrays[0])
            known = order.setdefault(batch.round, [])
            known += [] if batch in known else [batch]
    head = job.workers.count - 1
    pushed = [m for m in watcher.messages(f"worker-{head}") if isinstance(m, Push) and m.samples]
    at = {(push.clock, push.portion): number for number, push in reversed([*enumerate(pushed)])}
    key = lambda b: at[clock_of(b.data_epoch, b.portion), part_of(b.number, b.slot)]  # noqa: E731
    return [sorted(order[number], key=key) for number in sorted(order)]


def rows_of(problem: DividedLeastSquares, job: JobFile, batch: BatchKey) -> Array:
    per_epoch = -(-problem.samples // (job.data.portion_batches * BATCH))
    portion = slice_bounds(problem.samples, per_epoch, batch.portion)
    return batch_rows(
        problem.samples, job.job.seed, batch.data_epoch, portion, (batch.number, BATCH)
    )


def split_fed(problem: DividedLeastSquares, job: JobFile, rounds: list[list[BatchKey]]) -> Array:
    """SplitFed as a loop: V1 with an h for each client, or V2 with one."""
    w, ends = problem.initial().astype(float), problem.parts[0].layout.size()
    velocity = np.zeros_like(w)
    for batches in rounds:
        mean, total = np.zeros_like(w), 0
        for batch in batches:
            rows = rows_of(problem, job, batch)
            found = gradient(problem, w, rows)
            mean, total = mean + len(rows) * found, total + len(rows)
            if job.algorithm.options["heads"] == "one":
                velocity[ends:] = 0.9 * velocity[ends:] + found[ends:]
                w[ends:] -= LR * velocity[ends:]
        last = ends if job.algorithm.options["heads"] == "one" else len(w)
        velocity[:last] = 0.9 * velocity[:last] + mean[:last] / total
        w[:last] -= LR * velocity[:last]
    return w


@pytest.mark.oracle("split", "the loop of SplitFed V1 or V2, in numpy")
@pytest.mark.per_commit(3)
@pytest.mark.parametrize(
    ("heads", "shape"), [("each", "vanilla"), ("one", "vanilla"), ("each", "u")]
)
def test_parallel_clients_are_the_loop_of_splitfed(heads, shape, agree):
    problem = DividedLeastSquares(samples=60, is_u=shape == "u")
    job = job_of(3, clients="parallel", heads=heads, shape=shape)
    watcher = Watcher(PeerRequest, Push)
    outcome = run(job, problem, checkers=(watcher,))
    rounds = rounds_of(watcher, job)
    assert any(len(batches) == 3 for batches in rounds)
    agree(outcome.weights, split_fed(problem, job, rounds), atol=1e-6)


def split_fed_of_rounds(
    problem: DividedLeastSquares, job: JobFile, rounds: list[list[BatchKey]]
) -> Array:
    """SplitFed as in the paper: clients step f, and the head h, or an h for each of them, and what
    they have come to is averaged by samples."""
    w, ends = problem.initial().astype(float), problem.parts[0].layout.size()
    lr, has_each = job.inner.options["lr"], job.algorithm.options["heads"] == "each"
    for batches in rounds:
        own, samples = {b.slot: w.copy() for b in batches}, dict.fromkeys(own_slots(batches), 0)
        h = w[ends:].copy()
        for batch in batches:
            rows = rows_of(problem, job, batch)
            at = own[batch.slot]
            at[ends:] = at[ends:] if has_each else h
            at -= lr * gradient(problem, at, rows)
            h = at[ends:].copy()
            samples[batch.slot] += len(rows)
        w = sum(n * own[slot] for slot, n in samples.items()) / sum(samples.values())
        w[ends:] = w[ends:] if has_each else h
    return w


def own_slots(batches: list[BatchKey]) -> list[int]:
    return sorted({batch.slot for batch in batches})


def job_of_rounds(count: int, epochs: int = EPOCHS, **options: Any) -> JobFile:
    return job_file(
        count + 1, 2, algorithm=("split", {"clients": "parallel", **options}),
        optimizer=("sgd", {"lr": 1.0}), inner=("sgd", {"lr": LR}), batch_size=BATCH,
        portion_batches=4, restarts_max=20, parties=parties_of(count), epochs=float(epochs),
    )  # fmt: skip


@pytest.mark.oracle("split", "the loop of SplitFed with rounds of several steps, in numpy")
@pytest.mark.per_commit(2)
@pytest.mark.parametrize(
    ("shape", "heads", "steps"),
    [
        ("vanilla", "each", 3), ("vanilla", "one", 3), ("vanilla", "each", 100), ("u", "each", 3),
        ("u", "each", 100),  # With one head others may step h between the halves of a batch.
    ],
)  # fmt: skip
def test_rounds_of_several_steps_are_the_loop_of_splitfed(heads, steps, shape, agree):
    problem = DividedLeastSquares(samples=90, is_u=shape == "u")
    job = job_of_rounds(3, heads=heads, shape=shape, local_steps=steps)
    watcher = Watcher(PeerRequest, Push)
    outcome = run(job, problem, checkers=(watcher,))
    rounds = rounds_of(watcher, job)
    most = max(sum(b.slot == slot for b in batches) for batches in rounds for slot in range(3))
    assert most == min(steps, 4), "no round is longer than a portion"
    sizes = {len(rows_of(problem, job, b)) for batches in rounds for b in batches}
    assert len(sizes) > 1, "weights matter"
    agree(outcome.weights, split_fed_of_rounds(problem, job, rounds), atol=1e-6)


def test_the_buffers_of_parallel_clients_are_averaged_by_samples():
    problem, watcher = DividedLeastSquares(keeps="count"), Watcher(PushBuffers)
    outcome = run(job_of(2, clients="parallel"), problem, checkers=(watcher,))
    newest = {message.slot: message for message in watcher.messages()}
    assert set(newest) == {0, 1}
    total = sum(message.samples for message in newest.values())
    assert total == problem.samples * EPOCHS
    expected = sum(m.samples / total * (1 + m.samples) for m in newest.values())
    found = buffers_of(outcome)
    assert found == pytest.approx([expected])


KILLED = {
    "nobody": (),
    "over a push": (Moment(name="worker-0", kind="Push", count=6),),
    "before a push": (Moment(name="worker-1", kind="Push", count=5, before=True),),
    "over an ack": (Moment(name="worker-0", kind="Ack", direction="received", count=7),),
    "over the buffers": (Moment(name="worker-1", kind="Buffers", direction="received", count=8),),
    "server over an ack": (Moment(name="server-0", kind="Ack", count=9, before=True),),
    "server after it": (Moment(name="server-0", kind="Ack", count=12),),
    "server and client": (
        Moment(name="server-0", kind="Ack", count=9, before=True),
        Moment(name="worker-0", kind="Push", count=5),
    ),
    "coordinator": (Moment(name="coordinator", kind="Lease", count=8),),
}


@pytest.mark.oracle("split", "running means of one process, in numpy, and kills over each message")
@pytest.mark.per_commit(3)
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("killed", KILLED)
def test_clients_in_turn_hand_on_the_buffers_of_one_process(killed, durability, agree):
    problem, job = DividedLeastSquares(keeps="means"), job_of(2, durability=durability)
    outcome = run(job, problem, faults=Faults(moments=KILLED[killed]))
    assert len(outcome.world.processes) - PROCESSES == len(KILLED[killed])
    means, batches = np.ones(INPUTS), rows_in_order(job, problem.samples, EPOCHS)
    for rows in batches:
        means = running_means(means, problem.x[rows])
    agree(buffers_of(outcome), means, atol=1e-12)
    agree(outcome.weights, in_one_process(problem, batches), atol=1e-6)


def buffers_of(outcome: Outcome) -> Array:
    found: Array = outcome.world.machine("server-0").serving.buffers.average()
    return found


@pytest.mark.oracle("split", "the loop of SplitFed over a stop, in numpy")
@pytest.mark.parametrize("heads", ["each", "one"])
def test_rounds_go_on_after_a_stop_as_the_loop_of_splitfed(heads, agree):
    problem, rounds, store = DividedLeastSquares(samples=90), [], None
    for epochs in (1, 2):
        job = job_of_rounds(2, epochs, heads=heads, local_steps=3)
        watcher = Watcher(PeerRequest, Push)
        outcome = run(job, problem, checkers=(watcher,), store=store)
        rounds += rounds_of(watcher, job)
        store = outcome.store
    assert {batch.data_epoch for batches in rounds for batch in batches} == {0, 1}
    agree(outcome.weights, split_fed_of_rounds(problem, job, rounds), atol=1e-6)


@pytest.mark.oracle("split", "running means of one process over a stop, in numpy")
def test_buffers_that_are_handed_on_are_in_the_checkpoint(agree):
    problem, store = DividedLeastSquares(keeps="means"), None
    for epochs in (1, 2):
        outcome = run(job_of(2, epochs=epochs), problem, store=store)
        store = outcome.store
        means = np.ones(INPUTS)
        for rows in rows_in_order(job_of(2), problem.samples, epochs):
            means = running_means(means, problem.x[rows])
        agree(buffers_of(outcome), means, atol=1e-12)
