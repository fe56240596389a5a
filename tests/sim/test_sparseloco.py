"""SparseLoCo in virtual time: it is the paper's loop, and the mean is that of its code."""

import dataclasses

import numpy as np
import pytest
import torch
from simulated import Noted, Watcher, job_file, rows_in_order

from dlctl.algorithms.methods.sparseloco import BLOCK, Even, Options, Shard, released
from dlctl.compress.base import Delta
from dlctl.compress.chunked import ChunkedTopK
from dlctl.job import config
from dlctl.optim.momentum import Momentum
from dlctl.optim.pending import PENDING, THRESHOLD, Pending, bits_of
from dlctl.optim.sgd import SGD
from dlctl.shards import base
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import in_memory
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.sim.states import MemoryLog
from dlctl.wire.messages import Parameters, SparseParameters

STEPS, RATE, DECAY, OUTER = 3, 0.05, 0.95, 0.9
CHUNK, KEEP = 40, 6
SPARSE = ("topk-chunked", {"chunk": CHUNK, "keep": KEEP})


def sent(e):
    """What one replica sends of `e`, in float64, written down chunk by chunk from the paper."""
    found = np.zeros_like(e)
    for start in range(0, len(e), CHUNK):
        chunk = e[start : start + CHUNK]
        keep = -(-KEEP * len(chunk) // CHUNK)
        where = np.argsort(-np.abs(chunk), kind="stable")[:keep]
        shift = chunk[where].mean()
        centred = chunk[where] - shift
        scale = 6 * np.sqrt((centred**2).sum() / (keep - 1)) / 4
        q = np.clip(np.round(centred / scale + 2), 0, 3)
        for level in set(q):
            found[start + where[q == level]] = shift + centred[q == level].mean()
    return found


@pytest.mark.oracle("sparseloco", "the loop of Sarfi 2025 in float64, one replica")
def test_one_replica_is_the_loop_of_the_paper(agree):
    problem = LeastSquares(samples=96, size=2 * CHUNK)
    job = job_file(
        batch_size=8,
        algorithm=("sparseloco", {"local_steps": STEPS, "inner_lr": RATE}),
        optimizer=("sgd", {"lr": OUTER}),
        compression=SPARSE,
    )
    outcome = Simulation(job, problem).run()
    theta, e = problem.initial().astype(float), np.zeros(2 * CHUNK)
    batches = list(enumerate(rows_in_order(job, problem.samples, epochs=2)))
    assert len(batches) % STEPS == 0
    for first in range(0, len(batches), STEPS):
        inner = theta.copy()
        for number, rows in batches[first : first + STEPS]:
            batch = Batch(rows, 0, 1, number)
            inner -= RATE * problem.gradient(inner.astype(np.float32), batch)[1]
        e = DECAY * e + theta - inner
        delta = sent(e)
        e -= delta
        theta -= OUTER * delta
    agree(outcome.weights, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle("sparseloco", "the loop of Sarfi 2025 in float64, 3 replicas")
def test_replicas_are_the_loop_of_the_paper(agree):
    """What is longer than the median is made as long: three replicas are as many as have one."""
    workers, problem = 3, Noted(samples=288, size=CHUNK)
    job = job_file(
        workers, batch_size=8, portion_batches=STEPS,
        algorithm=("sparseloco", {"local_steps": STEPS, "inner_lr": RATE}),
        optimizer=("sgd", {"lr": OUTER}), compression=SPARSE,
    )  # fmt: skip
    in_step = config.Data(portion_batches=STEPS, lease_ahead_s=0.0)
    outcome = Simulation(dataclasses.replace(job, data=in_step), problem).run()
    alone = LeastSquares(samples=288, size=CHUNK)
    theta, e = alone.initial().astype(float), np.zeros((workers, CHUNK))
    rows = np.array([problem.rows[slot] for slot in range(workers)])
    assert rows.shape == (workers, 8 * STEPS, 8)
    for of_round in np.split(rows, 8, axis=1):
        deltas = []
        for of_replica, batches in zip(e, of_round, strict=True):
            inner = theta.copy()
            for batch in batches:
                gradient = alone.gradient(inner.astype(np.float32), Batch(batch, 0, 1, 0))[1]
                inner -= RATE * gradient
            of_replica *= DECAY
            of_replica += theta - inner
            deltas.append(sent(of_replica))
            of_replica -= deltas[-1]
        norms = [np.linalg.norm(delta) for delta in deltas]
        clipped = [d * min(1, np.median(norms) / n) for d, n in zip(deltas, norms, strict=True)]
        theta -= OUTER * np.mean(clipped, axis=0)
    agree(outcome.weights, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_replicas_that_send_little_come_to_the_same_loss():
    problem = LeastSquares(samples=512, size=80)
    losses = {}
    for name, compression in (("local-sgd", ("none", {})), ("sparseloco", SPARSE)):
        job = job_file(
            workers=2, servers=2, batch_size=8, epochs=24,
            algorithm=(name, {"local_steps": STEPS, "inner_lr": RATE}),
            optimizer=("sgd", {"lr": 1.0}), compression=compression,
        )  # fmt: skip
        losses[name] = problem.evaluate(Simulation(job, problem).run().weights)["loss"]
    assert problem.evaluate(problem.initial())["loss"] > 10
    assert losses["sparseloco"] < 2 * losses["local-sgd"] < 1e-3


# ---------------------------------------------------------------- the mean of a round


def deltas(replicas: int, size: int) -> list[Delta]:
    rng = np.random.default_rng(replicas)
    made = []
    for number in range(replicas):
        where = np.sort(rng.choice(size, size // 20, replace=False))
        made.append(Delta((rng.standard_normal(where.size) * (1 + number)).astype("f4"), where))
    return made


def by_torch(pushes: list[Delta], size: int, mean: str) -> np.ndarray:
    """As the authors' code does it, block by block: norms against torch.median, then the mean over
    all, or by scatter_reduce over those that have sent an entry."""
    found = torch.zeros(size)
    for start in range(0, size, BLOCK):
        values, places = [], []
        for delta in pushes:
            here = (delta.indices >= start) & (delta.indices < start + BLOCK)
            values.append(torch.from_numpy(delta.values[here]))
            places.append(torch.from_numpy(delta.indices[here]))
        norms = torch.stack([v.norm() for v in values])
        factors = (norms.median() / (norms + 1e-8)).clamp(max=1)
        together = torch.cat([v * f for v, f in zip(values, factors, strict=True)])
        where = torch.cat(places)
        if mean == "senders":
            found.scatter_reduce_(0, where, together, reduce="mean", include_self=False)
        else:
            found.index_add_(0, where, together / len(pushes))
    return found.numpy()


@pytest.mark.oracle("sparseloco", "the authors' means, in torch")
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("mean", ["replicas", "senders"])
def test_the_mean_of_a_round_is_that_of_the_authors_code(replicas, mean, agree):
    size = 2 * BLOCK + 700
    shard = in_memory(SGD(SGD.Options(lr=1.0)), np.zeros(size, np.float32))
    pushes = deltas(replicas, size)
    shares = [np.float32(1 / replicas)] * replicas
    found = Even(Shard(Options(mean=mean), shard)).of(pushes, shares)
    assert found.indices is not None
    full = np.zeros(size, np.float32)
    full[found.indices] = found.values
    agree(full, by_torch(pushes, size, mean), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what waits in the servers

WHOLE, MOST, ROUNDS = 400, 12, 9


def means() -> list[Delta]:
    """Sparse, then a dense one, one of equal entries, and one of none."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(ROUNDS - 3):
        where = np.sort(rng.choice(WHOLE, 60, replace=False))
        found.append(Delta(rng.standard_normal(60).astype("f4"), where))
    equal = Delta(np.full(50, 3, np.float32), np.arange(50))
    none = Delta(np.zeros(0, np.float32), np.zeros(0, np.int64))
    return [*found, Delta(rng.standard_normal(WHOLE).astype("f4")), none, equal]


def spec(optimizer: Pending) -> base.Spec:
    return base.Spec("run", 0, 0, WHOLE, optimizer.slots)


@pytest.mark.parametrize("kind", ["mapped", "journaled"])
@pytest.mark.parametrize("outer", [SGD, Momentum])
def test_largest_of_what_waits_are_applied_and_a_fetch_brings_just_these(kind, outer):
    def optimizer() -> Pending:
        return Pending(outer(outer.Options(lr=0.5)))

    of = spec(optimizer())
    log, buffer = MemoryLog(), bytearray(ImageForm.of(of, "boot").total_bytes)
    is_mapped = kind == "mapped"
    storage = Mapped.create(buffer, of, "boot") if is_mapped else Journaled.create(log, of)
    shard = base.Shard(optimizer(), storage)
    plain = in_memory(outer(outer.Options(lr=0.5)), np.zeros(WHOLE, np.float32))
    seen, e = np.zeros(WHOLE, np.float32), np.zeros(WHOLE, np.float32)
    shard.apply(Delta(np.zeros(1, np.float32), np.array([0])))
    shard.commit({})
    for mean in means():
        delta, threshold, changes = released(mean, shard.slots[PENDING], MOST)
        told = {THRESHOLD: bits_of(threshold)}
        shard.apply(delta, 1, counters=told, changes=changes)
        e[mean.indices if mean.indices is not None else slice(None)] += mean.values
        where = np.sort(np.argsort(-np.abs(e), kind="stable")[:MOST])
        if changes is not None:
            found = shard.changes_since(shard.version - 1)
            assert found.values.size == len(changes) <= MOST
            seen[changes] = found.values
            assert np.array_equal(seen, shard.w)
            where = changes if len(changes) < MOST else where
            assert np.abs(e[changes]).min() >= np.delete(np.abs(e), changes).max()
        plain.apply(Delta(e[where].copy(), where))
        e[where] = 0
        np.testing.assert_allclose(shard.w, plain.w, rtol=1e-6)
        np.testing.assert_array_equal(shard.slots[PENDING], e)
        shard.commit({})
    reopened = Mapped.reopen(buffer, of, "boot") if is_mapped else Journaled(log, of)
    again = base.Shard(optimizer(), reopened)
    again.resume()
    assert np.array_equal(again.w, shard.w)
    assert np.array_equal(again.slots[PENDING], shard.slots[PENDING])


@pytest.mark.long
def test_sixteen_replicas_fetch_no_more_than_is_asked_for():
    """What all of them send is more than an eighth: without a limit on the way down all comes."""
    problem, losses = LeastSquares(samples=256, size=800), {}
    for density in (0.0, 0.05):
        job = job_file(
            workers=16, batch_size=8, epochs=6,
            algorithm=("sparseloco", {"local_steps": 2, "inner_lr": RATE, "density_down": density}),
            optimizer=("sgd", {"lr": 1.0}),
            compression=("topk-chunked", {"chunk": 400, "keep": 16}),
        )  # fmt: skip
        watcher = Watcher(Parameters, SparseParameters)
        outcome = Simulation(job, problem, checkers=(watcher,)).run()
        sparse = [m for m in watcher.messages() if isinstance(m, SparseParameters)]
        assert len(sparse) >= (0, 2 * 16)[density > 0]
        assert all(m.values.size == density * 800 for m in sparse)
        losses[density] = problem.evaluate(outcome.weights)["loss"]
    assert losses[0.0] < losses[0.05] < 0.6 * problem.evaluate(problem.initial())["loss"]


@pytest.mark.oracle("sparseloco", "the paper's two bits, chunk by chunk")
def test_two_bits_of_a_chunk_are_those_of_the_paper(agree):
    e = np.random.default_rng(3).standard_normal(3 * CHUNK).astype(np.float32)
    compressor = ChunkedTopK(ChunkedTopK.Options(chunk=CHUNK, keep=KEEP, dense_below=0))
    rest = e.copy()
    delta = ChunkedTopK.expand(compressor.take(rest), e.size)
    full = np.zeros(e.size)
    full[delta.indices] = delta.values
    agree(full, sent(e.astype(float)), rtol=1e-5)
    np.testing.assert_allclose(rest + full, e, rtol=1e-5, atol=1e-6)
