"""Portions that are done, and of which the coordinator has not heard: nobody gets them again."""

from __future__ import annotations

from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m
from dlctl.wire.machine import Send

ALONE_S, HEARD_S = 0.37, 13.0
"""Between these no answer of the server gets to the worker, which has computed all of its data."""


class Breaks(Checker):
    """The worker's connections break when its first word of a portion that is done is under way."""

    def __init__(self) -> None:
        self.lost: set[int] = set()

    def on_effect(self, process, effect) -> None:
        done = effect.message if isinstance(effect, Send) else None
        if isinstance(done, m.PortionDone) and done.portion not in self.lost:
            self.lost.add(done.portion)
            process.timeline.after(0.0001, lambda: process.network.reset(process.name))


def test_what_is_done_is_not_leased_again_when_the_word_of_it_is_lost():
    """It was acknowledged after 12 s in which its worker had asked for data in vain."""
    problem = Ledger(shards=1, samples=32, cells=300)
    job = job_file(
        1, 1, algorithm=("downpour", {"fetch_every_steps": 99, "push_every_steps": 2}),
        optimizer=ACCOUNT, batch_size=8, portion_batches=2, epochs=1.0,
        timeouts={"resend_s": 1.0, "silent_s": 60.0},
    )  # fmt: skip
    breaks, noted = Breaks(), Watcher(m.PortionNoted)
    checkers = ledger_checkers(problem, 1, once=True, heal_at_s=HEARD_S)
    simulation = Simulation(
        job, problem, compute=ComputeOptions(step_s=0.05), checkers=(*checkers, breaks, noted)
    )
    network = simulation.world.network
    simulation.at(ALONE_S, lambda: network.cut("server-0", "worker-0"))
    simulation.at(HEARD_S, lambda: network.heal("server-0", "worker-0"))
    outcome = simulation.run(100.0)
    assert outcome.state == "finished", outcome.reason
    assert breaks.lost == {0, 1}
    assert min(when for when, *_ in noted.sent) > HEARD_S
