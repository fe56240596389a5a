"""The simulator itself: its network does what its options say, and its checkers catch real bugs."""

import numpy as np
import pytest
from simulated import Watcher, job_file

from dlctl.sim.network import NetworkOptions, SimLink, SimNetwork
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.process import Process, Spinning
from dlctl.sim.simulation import Simulation
from dlctl.sim.timeline import Timeline
from dlctl.wire import codec
from dlctl.wire.machine import DeadlineReached, Exit, Note, Received, Reconnected, Send
from dlctl.wire.messages import APPLIED, HELD, Ack, Drained, Heard, Initialise, Parameters, Push


class Recorder:
    """A machine that keeps what it gets, and when."""

    def __init__(self) -> None:
        self.got = []

    def handle(self, event, now):
        self.got.append((round(now, 6), event))
        return []

    def deadline(self):
        return None


class Pair:
    """A client and a listener on a network of their own."""

    def __init__(self, **link) -> None:
        self.timeline = Timeline()
        options = NetworkOptions(link=SimLink(**link))
        rng = np.random.default_rng(0)
        self.network = SimNetwork(self.timeline, options, rng, lambda text: None)
        self.client, self.listener = (self._process(name) for name in ("client", "listener"))
        self.network.listen("here", self.listener)
        self.network.connect(self.client, "listener", "here")

    def _process(self, name: str) -> Process:
        process = Process(name, 1, self.timeline, self.network, 0.0, lambda text: None)
        process.machine = Recorder()
        return process

    def send(self, *messages) -> None:
        for message in messages:
            self.network.send(self.client, "listener", message)

    def arrivals(self) -> list:
        while self.timeline.step(1e9):
            pass
        return self.listener.machine.got


def parameters(size: int) -> Parameters:
    return Parameters(0, 1, 1, 1, np.zeros(size, np.float32))


# ---------------------------------------------------------------- time and the network


def test_things_happen_in_the_order_of_their_times_and_then_of_their_planning():
    timeline, seen = Timeline(), []
    for when, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        timeline.at(when, lambda what=what: seen.append((timeline.now, what)))
    while timeline.step(10.0):
        pass
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_a_message_takes_the_latency_and_the_time_of_its_bytes():
    pair = Pair(latency_s=0.1, bytes_per_s=1e5)
    message = parameters(25_000)
    pair.send(message, message)
    nbytes = sum(len(frame) for frame in codec.encode(message))
    assert [at for at, _ in pair.arrivals()] == pytest.approx(
        [0.1 + nbytes / 1e5, 0.1 + 2 * nbytes / 1e5]
    )
    assert pair.network.nbytes["Parameters"] == 2 * nbytes


def test_messages_of_a_connection_keep_their_order_unless_they_are_reordered():
    def order(**link) -> list[int]:
        pair = Pair(latency_s=0.01, jitter_s=0.5, **link)
        pair.send(*(Drained(f"worker-{i}") for i in range(30)))
        return [int(event.message.name.rpartition("-")[2]) for _, event in pair.arrivals()]

    assert order() == list(range(30))
    assert sorted(order(reorder=0.5)) == list(range(30))
    assert order(reorder=0.5) != list(range(30))


def test_messages_are_lost_and_repeated_as_often_as_the_link_says():
    pair = Pair(loss=0.25)
    pair.send(*[Heard()] * 1000)
    assert 650 < len(pair.arrivals()) < 850
    pair = Pair(duplicate=0.25)
    pair.send(*[Heard()] * 1000)
    assert 1150 < len(pair.arrivals()) < 1350
    pair = Pair(loss=1.0)
    pair.network.healed = True
    pair.send(Heard())
    assert len(pair.arrivals()) == 1


def test_a_link_is_cut_one_way():
    pair = Pair()
    pair.network.cut("client", "listener")
    pair.send(Heard())
    assert pair.arrivals() == []
    pair.network.heal("client", "listener")
    pair.network.cut("listener", "client")
    pair.send(Heard())
    ((_, event),) = pair.arrivals()
    pair.network.send(pair.listener, event.peer, Heard())
    assert len(pair.arrivals()) == 1
    assert pair.client.machine.got == []


def test_a_listener_knows_a_connection_by_another_id_after_it_broke():
    pair = Pair()
    pair.send(Heard())
    ((_, first),) = pair.arrivals()
    pair.send(Heard())
    pair.network.reset("client")
    assert len(pair.arrivals()) == 1, "what was under way is lost"
    pair.send(Heard())
    _, (_, second) = pair.arrivals()
    assert first.peer != second.peer
    pair.network.send(pair.listener, first.peer, Heard())
    pair.network.send(pair.listener, second.peer, Heard())
    pair.arrivals()
    told, heard = (event for _, event in pair.client.machine.got)
    assert told == Reconnected("listener", lost_at=0.0005)
    assert isinstance(heard, Received), "only what was for the new one"


def test_who_was_connected_to_a_listener_hears_of_the_next_one_there():
    pair = Pair()
    pair.network.listen("here", pair._process("another"))
    assert pair.arrivals() == []
    assert pair.client.machine.got == [], "no connection was open"
    pair.network.listen("here", pair.listener)
    pair.send(Heard())
    pair.arrivals()
    pair.network.listen("here", pair._process("listener"))
    pair.arrivals()
    [(_, event)] = pair.client.machine.got
    assert isinstance(event, Reconnected)
    assert event.peer == "listener"


def test_what_changes_after_it_was_sent_arrives_changed_as_with_a_zero_copy_send():
    pair = Pair()
    message = Initialise(0, 1, np.zeros(3, np.float32), np.zeros(0))
    pair.send(message)
    message.values[0] = 7
    ((_, event),) = pair.arrivals()
    assert event.message.values.tolist() == [7, 0, 0]


def test_what_a_message_borrows_is_copied_when_it_is_sent():
    pair = Pair()
    message = parameters(3)
    pair.send(message)
    message.values[0] = 7
    ((_, event),) = pair.arrivals()
    assert event.message.values.tolist() == [0, 0, 0]


def test_the_dead_get_nothing_and_the_frozen_get_it_later():
    pair = Pair()
    pair.listener.freeze()
    pair.send(Heard())
    assert pair.arrivals() == []
    pair.listener.thaw()
    assert len(pair.arrivals()) == 1
    pair.listener.end(-9)
    pair.send(Heard())
    assert len(pair.arrivals()) == 1
    assert pair.network.lost["Heard"] == 1


# ---------------------------------------------------------------- processes


def test_a_machine_whose_deadline_stays_in_the_past_is_found_out():
    class Lazy(Recorder):
        def deadline(self):
            return 1.0

    pair = Pair()
    pair.listener.machine = Lazy()
    pair.send(Heard())
    with pytest.raises(Spinning, match=r"listener\.1 at 1\.000 s"):
        pair.arrivals()


def test_a_machine_is_called_at_its_deadline_and_its_effects_are_done_in_order():
    class Clockwork(Recorder):
        def handle(self, event, now):
            super().handle(event, now)
            if isinstance(event, DeadlineReached):
                return [Note("info", "now"), Send("listener", Heard()), Exit(3, "done")]
            return []

        def deadline(self):
            return 5.0

    pair = Pair()
    pair.client.machine = Clockwork()
    pair.client.post(Received("", Heard()), 1.0)
    ((at, _),) = pair.arrivals()
    assert at == pytest.approx(5.0005)
    assert (pair.client.status, pair.client.alive) == (3, False)


# ---------------------------------------------------------------- what an outcome tells


def test_bytes_are_counted_as_they_are_on_the_wire():
    pushes = Watcher(Push)
    job = job_file(compression=("topk", {"density": 0.1}))
    outcome = Simulation(job, LeastSquares(size=200), checkers=(pushes,)).run()
    expected = sum(len(f) for p in pushes.messages() for f in codec.encode(p))
    assert outcome.network.nbytes["Push"] == expected
    assert outcome.network.messages["Push"] == len(pushes.messages()) == 64


def test_sparse_pushes_are_several_times_smaller():
    def nbytes(compression) -> int:
        job = job_file(workers=2, compression=compression)
        return Simulation(job, LeastSquares(size=4000)).run().network.nbytes["Push"]

    assert nbytes(("topk", {"density": 0.01})) < nbytes(("none", {})) / 10


def test_a_run_that_is_not_over_yet_can_be_looked_at_and_gone_on_with():
    simulation = Simulation(job_file(workers=2), LeastSquares())
    early = simulation.run(0.5)
    assert early.state == ""
    assert early.left_behind
    assert simulation.run().state == "finished"


def test_acks_say_what_they_should_in_a_run_without_faults():
    acks = Watcher(Ack)
    Simulation(job_file(workers=2, servers=2), LeastSquares(), checkers=(acks,)).run()
    assert {ack.outcome for ack in acks.messages()} == {APPLIED}
    acks = Watcher(Ack)
    job = job_file(workers=2, servers=2, algorithm=("sync", {}))
    Simulation(job, LeastSquares(), checkers=(acks,)).run()
    assert {ack.outcome for ack in acks.messages()} == {HELD, APPLIED}
