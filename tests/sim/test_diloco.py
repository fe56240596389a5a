"""DiLoCo on servers is DiLoCo on torch.distributed, replica for replica."""

from __future__ import annotations

import dataclasses
import multiprocessing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from diloco_loop import replica
from oracles import Agree
from simulated import Noted, job_file
from test_goes_on_exactly import OfTorch

from dlctl import config
from dlctl.sim.simulation import Simulation

WORKERS, STEPS, ROUNDS = 2, 4, 8
INNER = {"lr": 0.03, "betas": [0.9, 0.95], "weight_decay": 0.1}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
ENDS_S = 120


@pytest.mark.oracle("diloco", "Douillard 2023 in torch.distributed, gloo")
def test_two_workers_are_the_loop_of_the_paper_over_gloo(tmp_path: Path, agree: Agree) -> None:
    problem = Noted(samples=WORKERS * STEPS * 8 * ROUNDS // 2)
    job = job_file(
        WORKERS, 2, epochs=2.0, algorithm=("diloco", {"local_steps": STEPS}),
        inner=("adamw", INNER), optimizer=("momentum", OUTER),
    )  # fmt: skip
    data = config.Data(portion_batches=STEPS, lease_ahead_s=0.0)
    outcome = Simulation(
        dataclasses.replace(job, data=data), problem, inner=lambda choice: partial(OfTorch, choice)
    ).run()
    assert outcome.state == "finished", outcome.reason
    assert [len(problem.rows[slot]) for slot in range(WORKERS)] == [STEPS * ROUNDS] * WORKERS

    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch.distributed"])
    pipes, members = [], []
    for slot in range(WORKERS):
        here, there = forks.Pipe()
        pipes.append(here)
        of_paper = (problem.rows[slot], STEPS, problem.x, problem.y, INNER, OUTER)
        where = (there, slot, WORKERS, str(tmp_path / "store"))
        members.append(forks.Process(target=replica, args=(*where, *of_paper), daemon=True))
        members[-1].start()
    try:
        assert all(pipe.poll(ENDS_S) for pipe in pipes)
        ends = [pipe.recv() for pipe in pipes]
    finally:
        for member in members:
            member.kill()
            member.join()
    np.testing.assert_array_equal(ends[0], ends[1])
    agree(outcome.weights, ends[0], rtol=1e-5, atol=1e-6)
