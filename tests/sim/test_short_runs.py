"""A run that is too short for its method to come to anything does not begin."""

from __future__ import annotations

from simulated import job_file

from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation


def test_a_buffer_that_no_push_of_the_run_would_fill_is_refused() -> None:
    """Eight steps by two workers are at most four pushes."""

    def ends(buffer_pushes: int) -> tuple[str, str]:
        method = {"local_steps": 4, "buffer_pushes": buffer_pushes}
        job = job_file(2, algorithm=("fedbuff", method), batch_size=8, epochs=1.0)
        outcome = Simulation(job, LeastSquares(samples=64)).run()
        return outcome.state, outcome.reason

    state, reason = ends(5)
    assert state == "failed"
    assert reason.startswith("algorithm.buffer_pushes: the run has at most 4 pushes")
    assert ends(4)[0] == "finished"
