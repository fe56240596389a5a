"""Replicas that ask each other, in whole runs: what befalls the connections between workers costs
answers, and nothing else.
"""

import pytest
from simulated import Watcher, job_file

from dlctl.sim.checkers import AnswersChecker, LivenessChecker, NothingLeft, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation
from dlctl.wire import messages as m

LATE_S = 0.2
"""From a new list of members until the next question: a step, and some latency. A second later
toy-ring would have given up by itself.
"""


def ring(seed: int = 0, link: SimLink | None = None, links: dict | None = None) -> Simulation:
    """A run of about six seconds. Without servers a worker's steps are all that it does."""
    job = job_file(
        3, 0, algorithm=("toy-ring", {}), batch_size=4, portion_batches=2, epochs=4.0, seed=seed,
        timeouts={"resend_s": 0.2},
    )  # fmt: skip
    return Simulation(
        job, LeastSquares(samples=128), seed,
        network=NetworkOptions(link=link or SimLink(), links=links or {}),
        compute=ComputeOptions(step_s=0.1),
        checkers=(TermsChecker(), AnswersChecker(), LivenessChecker(0.0), NothingLeft()),
    )  # fmt: skip


def asking(sim: Simulation, slot: int):
    return sim.world.machine(f"worker-{slot}").training.asking


def lines(outcome, source: str, target: str, kind: str, since: float, until: float) -> list[str]:
    return [
        line
        for line in outcome.trace
        if f" {source} > {target} {kind} " in line and since < float(line.split()[0]) < until
    ]


def test_workers_are_asked_over_connections_of_their_own_with_their_keys():
    sim = ring()
    watcher = Watcher(m.PeerRequest, m.PeerReply)
    sim.world.observers.append(watcher)
    assert sim.run(100.0).state == "finished"
    asked = {
        (name, peer)
        for _, name, peer, message in watcher.sent
        if isinstance(message, m.PeerRequest)
    }
    assert asked >= {("worker-0", "worker-1"), ("worker-1", "worker-2"), ("worker-2", "worker-0")}
    answers = [peer for _, _, peer, message in watcher.sent if isinstance(message, m.PeerReply)]
    assert answers
    assert all(isinstance(peer, bytes) for peer in answers)
    for slot in range(3):
        process = sim.world.process(f"worker-{slot}")
        assert process.secret
        assert set(process.admitted.values()) <= {f"worker-{s}" for s in range(3) if s != slot}


@pytest.mark.parametrize("upward", [True, False], ids=["questions", "answers"])
def test_what_is_cut_one_way_is_given_up_and_asked_again_afterwards(upward):
    sim = ring()
    way = ("worker-0", "worker-1") if upward else ("worker-1", "worker-0")
    sim.at(1.5, lambda: sim.world.network.cut(*way))
    sim.at(4.0, lambda: sim.world.network.heal(*way))
    worker, waited_for = "worker-0", set()
    for at_s in (2.0, 2.3, 2.6, 2.9):
        sim.at(at_s, lambda: waited_for.add(sim.world.machine(worker).waiting_for()))
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    assert "worker-1" in waited_for, "status says whom it waits for"
    kind = "PeerRequest" if upward else "PeerReply"
    during = lines(outcome, *way, kind, 1.5, 4.0)
    assert during
    assert all(line.endswith(" lost") for line in during)
    back = lines(outcome, "worker-1", "worker-0", "PeerReply", 4.0, 100.0)
    assert any(not line.endswith(" lost") for line in back)


def test_a_link_between_workers_has_a_latency_and_losses_of_its_own():
    poor = SimLink(latency_s=0.05, loss=0.3, duplicate=0.3)
    sim = ring(links={("worker-0", "worker-1"): poor, ("worker-1", "worker-0"): poor})
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    assert outcome.network.lost["PeerRequest"] + outcome.network.lost["PeerReply"] > 0
    assert outcome.network.repeated["PeerRequest"] + outcome.network.repeated["PeerReply"] > 0
    others = lines(outcome, "worker-1", "worker-2", "PeerRequest", 0.0, 100.0)
    assert others
    assert not any(line.endswith(" lost") for line in others)


def test_who_asks_a_worker_that_was_killed_goes_on_at_once():
    sim = ring()
    sim.at(1.55, lambda: sim.world.process("worker-1").end(-9))
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    sent = lines(outcome, "coordinator", "worker-0", "Peers", 1.55, 100.0)
    assert sent
    late = float(sent[0].split()[0]) + LATE_S
    others = lines(outcome, "worker-0", "worker-2", "PeerRequest", 1.55, late)
    assert others, "its next neighbour is asked as soon as the list has come"


@pytest.mark.parametrize("seed", range(3))
def test_over_poor_links_a_run_of_replicas_comes_to_its_end(seed):
    sim = ring(seed, SimLink(latency_s=0.01, jitter_s=0.05, loss=0.1, duplicate=0.1, reorder=0.1))
    outcome = sim.run(300.0)
    assert outcome.state == "finished", outcome.reason
    assert outcome.network.messages["PeerReply"] > 50
