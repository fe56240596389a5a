"""One decider for all shards, in whole runs: whoever dies between a decision and its step."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import KillAtDecision, Watcher, job_file

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.rows import rows_in
from dlctl.sim.checkers import Checker, LivenessChecker, NothingLeft, QuorumChecker, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.sim.store import Store
from dlctl.wire import messages as m

CLOCK = 3


class Steps(Checker):
    """Whose pushes each shard has used for step `CLOCK`."""

    def __init__(self) -> None:
        self.used: dict[str, list[tuple[int, int]]] = {}

    def on_effect(self, process: Any, effect: Any) -> None:
        if process.name.startswith("server") and process.machine.serving is not None:
            step = process.machine.serving.side.newest_step
            if step is not None and step[0] == CLOCK:
                self.used[process.name] = sorted(step[1])


def quorum(epochs: float = 2.0, store: Store | None = None) -> tuple[Simulation, Steps]:
    """A run of about 12 steps an epoch, of which each uses two pushes."""
    job = job_file(
        3, 2, algorithm=("toy-quorum", {"backups": 1}), batch_size=4, portion_batches=2,
        epochs=epochs, timeouts={"resend_s": 0.3, "silent_s": 6.0}, restarts_max=5,
    )  # fmt: skip
    steps = Steps()
    simulation = Simulation(
        job, LeastSquares(samples=96), 1, store=store,
        compute=ComputeOptions(step_s=0.1, spread=0.4),
        checkers=(TermsChecker(), QuorumChecker(), LivenessChecker(0.0), NothingLeft(), steps),
    )  # fmt: skip
    return simulation, steps


@pytest.mark.long
@pytest.mark.parametrize("others", [(), (COORDINATOR,)], ids=str)
def test_a_push_that_was_chosen_is_used_on_all_shards_though_its_worker_has_died(
    others: tuple[str, ...],
) -> None:
    simulation, steps = quorum()
    kill = KillAtDecision(simulation, CLOCK, *others)
    assert simulation.run(100.0).state == "finished"
    assert kill.chosen in steps.used["server-0"]
    assert steps.used["server-0"] == steps.used["server-1"]
    assert len(steps.used["server-0"]) == 2


@pytest.mark.parametrize(
    "others", [("server-1",), ("server-1", COORDINATOR), ("server-0", "server-1")], ids=str
)
def test_a_server_that_dies_with_a_chosen_worker_does_without_its_push(
    others: tuple[str, ...],
) -> None:
    simulation, steps = quorum()
    kill = KillAtDecision(simulation, CLOCK, *others)
    watcher = Watcher(m.Decided)
    simulation.world.observers.append(watcher)
    assert simulation.run(100.0).state == "finished"
    decided = [d for *_, d in watcher.sent if d.clock == CLOCK]
    assert len({d.used.tobytes() for d in decided}) == 1, "it is never changed"
    assert [list(kill.chosen or ())] in [rows_in(d.gone, 2) for d in decided]
    for server in ("server-0", "server-1"):
        assert (kill.chosen in steps.used[server]) == (server not in others)
        assert len(steps.used[server]) == 2 - (server in others)


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_from_a_checkpoint_shards_meet_at_the_newest_step(behind: int) -> None:
    """It is not of one moment: a shard may be saved before a step, and another one behind it."""
    store = Store()
    assert quorum(1.0, store)[0].run(100.0).state == "finished"
    states = [part["state"] for part in store.manifests[store.newest()]["shards"]]
    states[1]["version"] -= behind
    newest = states[0]["version"]
    simulation, _ = quorum(2.0, store)
    assert simulation.run(100.0).state == "finished"
    machines = (simulation.world.machine(f"server-{shard}") for shard in range(2))
    versions = {machine.serving.shard.version for machine in machines}
    assert len(versions) == 1
    assert versions.pop() > newest + 8
