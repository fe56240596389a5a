"""User code that hangs does not hide: its process lives and reports, but its batch never ends."""

from typing import Any

from simulated import job_file

from dlctl.roles.effects import LocateTask
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
