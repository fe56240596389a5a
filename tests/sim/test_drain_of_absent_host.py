"""Workers of a host that was away when their run ended: it goes on, and they are still drained."""

from __future__ import annotations

import pytest
from simulated import ACCOUNT, job_file

from dlctl.job.config import Host
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m

HOSTS = (Host(ssh="h1"), Host(ssh="h2"))
FAR = "agent-2"
FAILS_S, IS_OVER_S, GOES_ON_S = 3.0, 40.0, 42.0


@pytest.mark.parametrize("away_after_s", [0.005, 0.01, 0.1, 0.2])
def test_a_drained_worker_that_outlives_its_run_is_replaced_when_that_goes_on(away_after_s):
    problem = Ledger(shards=1, cells=800)
    job = job_file(
        2, 1, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=12.0, hosts=HOSTS,
        timeouts={"silent_s": 3.0, "host_s": 20.0, "grace_s": 5.0},
    )  # fmt: skip
    simulation = Simulation(job, problem, compute=ComputeOptions(step_s=0.1))
    world = simulation.world

    def look() -> None:
        """The run is over, and the worker has outlived it."""
        assert world.store.run["state"] == "failed"
        assert world.living() == [FAR, "worker-1"]
        remembered = world.store.memory["daemon/worker-1"]
        assert (remembered["state"], remembered["leaving"]) == ("draining", "")
        world.join(FAR)

    def fail() -> None:
        failed = m.Failed("server-0", "the disk is broken", "", fatal=True)
        world.network.send(world.process("server-0"), COORDINATOR, failed)

    simulation.at(FAILS_S, fail)
    simulation.at(FAILS_S + away_after_s, lambda: world.cut_off(FAR))
    simulation.at(FAILS_S, lambda: world.restart_coordinator(world.past, GOES_ON_S - FAILS_S))
    simulation.at(IS_OVER_S, look)
    outcome = simulation.run(300.0)
    assert outcome.state == "finished", outcome.store.texts("state")
    assert [str(p) for p in world.processes if p.name == "worker-1"] == ["worker-1.1", "worker-1.2"]
    assert world.machine(COORDINATOR).progress.epochs_done() == 12.0
