"""DGC and DeMo in virtual time: with sparse pushes they are the loops of their papers."""

import dataclasses

import numpy as np
import pytest
from scipy.fft import dctn, idctn
from simulated import Noted, job_file, rows_in_order

from dlctl.job import config
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.simulation import Simulation

DENSITY, RATE, SIZE = 0.1, 0.02, 80


def dgc(epochs: float) -> config.JobFile:
    job = job_file(
        1, 2, batch_size=8, epochs=epochs, optimizer=("sgd", {"lr": RATE}),
        algorithm=("dgc", {"momentum": 0.8, "warmup_density": [0.5]}),
        compression=("topk", {"density": DENSITY}),
    )  # fmt: skip
    return dataclasses.replace(job, data=config.Data(portion_batches=4, lease_ahead_s=0.0))


@pytest.mark.oracle("dgc", "its loop, sparse pushes, one replica")
def test_dgc_with_sparse_pushes_is_the_loop_of_the_paper(agree):
    problem, job = LeastSquares(samples=64, size=SIZE), dgc(3)
    outcome = Simulation(job, problem).run()
    w, u, v = problem.initial().astype(float), np.zeros(SIZE), np.zeros(SIZE)
    for number, rows in enumerate(rows_in_order(job, problem.samples, epochs=3)):
        g = problem.gradient(w.astype(np.float32), Batch(rows, 0, 1, number))[1]
        u = 0.8 * u + g
        v += u
        k = int((0.5 if number < 8 else DENSITY) * SIZE / 2)
        for lo in (0, SIZE // 2):
            where = lo + np.argsort(-np.abs(v[lo : lo + SIZE // 2]))[:k]
            w[where] -= RATE * v[where]
            u[where] = v[where] = 0
    agree(outcome.weights, w, rtol=1e-5, atol=1e-6)


def test_momentum_and_what_was_not_sent_outlast_a_stop():
    """One replica: of two, each would have to get the same data again."""
    whole = Simulation(dgc(3), LeastSquares(samples=64, size=SIZE)).run()
    stopped = Simulation(dgc(1), LeastSquares(samples=64, size=SIZE)).run()
    resumed = Simulation(dgc(3), LeastSquares(samples=64, size=SIZE), store=stopped.store).run()
    assert resumed.weights.tolist() == whole.weights.tolist()
    assert not np.array_equal(stopped.weights, whole.weights)


# ---------------------------------------------------------------- DeMo

SIDE, KEEP, DECAY = 8, 4, 0.9


def largest_frequencies(d):
    """What a replica sends of `d`, float64[n], block by block: 64 elements, then 16."""
    sent = np.zeros_like(d)
    for lo in range(0, len(d), SIDE**2):
        q = dctn(d[lo : lo + SIDE**2].reshape(-1, SIDE), norm="ortho")
        keep = -(-KEEP * q.size // SIDE**2)
        q.reshape(-1)[np.argsort(np.abs(q), axis=None)[:-keep]] = 0
        sent[lo : lo + SIDE**2] = idctn(q, norm="ortho").reshape(-1)
    return sent


@pytest.mark.oracle("demo", "the loop of Peng 2024 with signs, scipy's DCT")
@pytest.mark.parametrize("workers", [1, 3])
def test_demo_is_the_loop_of_the_paper_with_signs(workers, agree):
    problem = Noted(samples=96, size=SIZE)
    job = job_file(
        workers, batch_size=8, portion_batches=1, algorithm=("demo", {"momentum_decay": DECAY}),
        optimizer=("lion", {"lr": RATE, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.1}),
        compression=("dct", {"side": SIDE, "keep": KEEP}),
    )  # fmt: skip
    outcome = Simulation(job, problem).run()
    alone = LeastSquares(samples=96, size=SIZE)
    w, d = alone.initial().astype(float), np.zeros((workers, SIZE))
    for batches in zip(*(problem.rows[slot] for slot in range(workers)), strict=True):
        sent = np.zeros(SIZE)
        for of_replica, rows in zip(d, batches, strict=True):
            of_replica *= DECAY
            of_replica += alone.gradient(w.astype(np.float32), Batch(rows, 0, 1, 0))[1]
            q = largest_frequencies(of_replica)
            of_replica -= q
            sent += q / workers
        w *= 1 - RATE * 0.1
        w -= RATE * np.sign(sent)
    agree(outcome.weights, w, rtol=1e-5, atol=1e-6)
