"""Who takes part, as the coordinator tells the workers, and whom a worker that listens hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlctl import registry
from dlctl.algorithms.base import PEERS_MAX
from dlctl.compress.none import Dense
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import COUNT_MAX, Choice, Host, Job, JobFile, Network, Servers, Workers
from dlctl.launch import addresses
from dlctl.records.memory import Memory
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.supervision.peers import FEW, PAUSE_S, PeerLists, is_address
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.keyring import Keyring
from dlctl.roles.worker.services.asking import pack
from dlctl.roles.worker.worker import Worker
from dlctl.sim.keys import SimulatedKeys
from dlctl.util.names import HOME_AGENT
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Admit, Connect, Note, Received, Send, Started
from dlctl.wire.messages import Packed, Register

KEYS = SimulatedKeys(b"token key")
PUSH = m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, Packed("none", 0, ()))
QUESTION = m.PeerRequest(1, 1, 1, 1, "model", pack(()))


def job(algorithm: str = "toy-ring", **sections: Any) -> JobFile:
    sections = {"servers": Servers(count=0), "workers": Workers(count=3)} | sections
    return JobFile(job=Job(name="peers", task="none"), algorithm=Choice(name=algorithm), **sections)


# ---------------------------------------------------------------- the coordinator


class Office:
    """The part of a coordinator that tells who takes part, and its workers."""

    def __init__(
        self, algorithm: str = "toy-ring", keyring: Keyring = KEYS, workers: int = 3
    ) -> None:
        self.context = EventContext(1.0)
        placed = {f"worker-{slot}": HOME_AGENT for slot in range(workers)}
        members = Membership((HOME_AGENT,), placed, {})
        method = registry.load("algorithms", algorithm)
        self.run = RunState("run", job(algorithm), method, keyring, self.context, members)
        self.ended: list[str] = []
        """Why the run was ended."""
        control = SimpleNamespace(end=lambda state, why, now, **_: self.ended.append(why))
        self.peers = PeerLists(self.run, control)  # type: ignore[arg-type]
        for slot in range(workers):
            self.comes(slot)

    def worker(self, slot: int) -> Daemon:
        return self.run.members.daemons[f"worker-{slot}"]

    def comes(self, slot: int) -> None:
        """A new process of this slot is at work."""
        worker = self.worker(slot)
        if worker.alive:
            worker.ended(m.ProcessExited(worker.name, worker.incarnation, -9, ()), 0.0)
            worker.back_off(0.0)
        worker.begin(0.0)
        worker.term += 1
        worker.registered = worker.model_ready = worker.asked_for_data = True
        worker.peer = f"connection {slot}".encode()

    def listens(self, slot: int, address: str = "", now: float = 0.0) -> None:
        worker = self.worker(slot)
        assert worker.peer is not None
        message = m.Listening(slot, worker.term, address or f"ipc:///run/worker-{slot}")
        self.peers.on_listening(worker.peer, message, now)

    def updates(self, now: float = 0.0) -> dict[str, m.Peers]:
        """Worker -> what it is sent now, if the list has changed."""
        self.peers.advance(now)
        return self.sent()

    def sent(self) -> dict[str, m.Peers]:
        return {
            str(effect.peer): effect.message
            for effect in self.context.clear()
            if isinstance(effect, Send) and isinstance(effect.message, m.Peers)
        }


ALL = {"worker-0", "worker-1", "worker-2"}


def test_all_are_told_of_all_with_their_addresses_and_keys():
    office = Office()
    for slot in range(3):
        office.listens(slot)
    messages = office.sent()
    assert set(messages) == ALL
    message = messages["worker-1"]
    assert (message.slots, message.joining, message.terms) == ((0, 1, 2), (), (1, 1, 1))
    assert message.addresses == tuple(f"ipc:///run/worker-{slot}" for slot in range(3))
    assert message.keys == tuple(KEYS.public(f"worker-{slot}") for slot in range(3))
    assert office.updates() == {}, "nothing has changed"


def test_many_receivers_get_many_changes_in_one_list_and_few_get_each_at_once():
    few, many = Office(workers=FEW), Office(workers=50)
    for office in (few, many):
        assert len(office.updates(1.0)) == len(office.run.members.live_slots())
        office.worker(1).drained = True
        first = office.updates(1.001)
        office.worker(2).drained = True
        second = office.updates(1.002)
        assert bool(first) == bool(second) == (office is few)
    assert few.peers.deadline() is None
    due_at = many.peers.deadline()
    assert due_at == pytest.approx(1.0 + 50 * PAUSE_S)
    assert many.updates(due_at - 0.001) == {}
    messages = many.updates(due_at)
    assert len(messages) == 50
    assert messages["worker-9"].slots == (0, *range(3, 50)), "both changes"
    assert many.peers.deadline() is None


def test_who_dies_while_there_is_a_pause_is_sent_no_list_any_more():
    office = Office(workers=50)
    office.updates(1.0)
    _dies(office.worker(7))
    assert office.updates(1.001) == {}
    due = {send.peer for send in office.context.retries.due(100.0)}
    assert due == {f"worker-{slot}" for slot in range(50)} - {"worker-7"}


def test_of_a_method_without_links_only_slots_and_terms_are_sent():
    messages = Office("downpour").updates()
    assert set(messages) == ALL
    message = messages["worker-0"]
    assert (message.slots, message.terms) == ((0, 1, 2), (1, 1, 1))
    assert set(message.addresses) == set(message.keys) == {""}


def test_connections_without_keys_have_none_in_the_list():
    assert set(Office(keyring=Keyring(b"x")).updates()["worker-0"].keys) == {""}


def _dies(worker: Daemon) -> None:
    worker.ended(m.ProcessExited(worker.name, worker.incarnation, -9, ()), 0.0)


def _is_drained(worker: Daemon) -> None:
    worker.drained = True


@pytest.mark.parametrize("how", [_dies, _is_drained])
def test_who_dies_or_is_drained_is_not_in_the_next_list(how):
    office = Office()
    first = office.updates()["worker-0"]
    how(office.worker(1))
    messages = office.updates()
    assert {"worker-0", "worker-2"} <= set(messages)
    assert messages["worker-0"].slots == (0, 2)
    assert messages["worker-0"].number > first.number


def test_who_was_replaced_has_another_term_and_no_address_until_it_listens():
    office = Office()
    office.listens(1)
    office.updates()
    office.comes(1)
    message = office.updates()["worker-0"]
    assert (message.terms, message.addresses[1]) == ((1, 2, 1), "")
    office.listens(1, "ipc:///run/new")
    assert office.sent()["worker-0"].addresses[1] == "ipc:///run/new"


def test_a_worker_that_is_scaled_away_is_gone_from_the_list():
    office = Office()
    office.updates()
    office.run.members.remove("worker-2")
    assert office.updates()["worker-0"].slots == (0, 1)


def test_a_list_is_repeated_until_it_is_noted_and_the_newest_counts():
    office = Office()
    first = office.updates()["worker-0"]
    again = {send.message for send in office.context.retries.due(100.0)}
    assert first in again
    office.worker(2).drained = True
    second = office.updates(101.0)["worker-0"]
    office.context.noted(("peers", "worker-0"), 101.1, number=first.number)
    due = [send.message for send in office.context.retries.due(200.0) if send.peer == "worker-0"]
    assert due == [second], "an older note says nothing of the newest list"
    office.context.noted(("peers", "worker-0"), 200.1, number=second.number)
    assert [s for s in office.context.retries.due(300.0) if s.peer == "worker-0"] == []


@pytest.mark.parametrize(
    ("count", "address", "key"),
    [(PEERS_MAX, f"tcp://[{'abcd:' * 7}abcd%interface0]:65535", "k" * 40), (COUNT_MAX, "", "")],
    ids=["with links", "without"],
)
def test_as_many_as_a_run_may_have_fit_into_one_list(count, address, key):
    slots = tuple(range(count))
    message = m.Peers(10**6, slots, slots, (10**5,) * count, (address,) * count, (key,) * count)
    assert codec.decode([bytes(frame) for frame in codec.encode(message)]) == message


def test_the_numbers_of_the_next_coordinator_are_greater_whatever_is_on_record():
    before = Office()
    for slot in range(3):
        before.listens(slot)
    newest = before.sent()["worker-0"].number
    after = Office()
    after.context.recall(Memory({"numbers": [0, 0]}), 5.0)
    assert after.updates()["worker-0"].number > newest


@pytest.mark.parametrize(
    ("slot", "term", "peer"),
    [(1, 9, b"connection 1"), (1, 1, b"somebody else"), (7, 1, b"connection 1")],
    ids=["another term", "another connection", "nobody"],
)
def test_only_the_process_that_has_a_slot_says_where_it_listens(slot, term, peer):
    office = Office()
    office.peers.on_listening(peer, m.Listening(slot, term, "ipc:///run/x"), 0.0)
    assert office.worker(1).address == ""


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("tcp://10.0.0.1:5555", True),
        ("tcp://node-7.cluster:1", True),
        ("tcp://[fe80::1%eth0]:65535", True),
        ("ipc:///run/user/1000/dlctl/x/worker-0", True),
        ("sim://worker-0", True),
        ("", False),
        ("tcp://10.0.0.1:0", False),
        ("tcp://10.0.0.1:99999", False),
        ("tcp://10.0.0.1:5555;id", False),
        ("tcp://*:5555", False),
        ("tcp://10.0.0.1:\u0665", False),
        ("pgm://10.0.0.1:5555", False),
        ("inproc://x", False),
        ("ipc://" + "x" * 200, False),
        ("ipc:///run/\x1b]0;x", False),
    ],
)
def test_nobody_is_told_to_connect_to_what_is_no_address(text, is_good):
    assert is_address(text) is is_good
    office = Office()
    if is_good:
        office.listens(1, text)
    else:
        with pytest.raises(RemoteProtocolError):
            office.peers.on_listening(b"connection 1", m.Listening(1, 1, text), 0.0)
    assert office.worker(1).address == (text if is_good else "")


def test_where_replicas_do_not_ask_each_other_nobody_listens():
    office = Office("downpour")
    with pytest.raises(RemoteProtocolError):
        office.listens(1)


# ---------------------------------------------------------------- a worker that listens


class Listener:
    """Worker 0 of a ring of three, with keys or without."""

    def __init__(self, keyring: Keyring = KEYS) -> None:
        registration = Register("run", "worker", "worker-0", 1, 1, "here", "0")
        method = registry.load("algorithms", "toy-ring")
        self.keyring = keyring
        self.worker = Worker(
            registration, job(), method, Dense(Dense.Options()), "ipc:///run/worker-0"
        )
        self.worker.handle(Started(), 0.0)
        self.hears(m.Welcome("worker-0", 0, 1, b"", {}), COORDINATOR)

    def is_told(self, number: int, *slots: int) -> list[Any]:
        keys = tuple(self.keyring.public(f"worker-{slot}") for slot in slots)
        where = tuple(f"ipc:///run/worker-{slot}" for slot in slots)
        message = m.Peers(number, slots, (), (1,) * len(slots), where, keys)
        return self.hears(message, COORDINATOR)

    def hears(self, message: m.Message, peer: str | bytes, identity: str = "") -> list[Any]:
        return self.worker.handle(Received(peer, message, identity), 0.0)

    def refusals(self, message: m.Message, identity: str) -> list[str]:
        effects = self.hears(message, b"connection", identity)
        return [e.text for e in effects if isinstance(e, Note) and e.text.startswith("refused")]


def test_a_worker_lets_in_the_others_of_its_run_and_nobody_else():
    listener = Listener()
    (admit,) = [e for e in listener.is_told(1, 0, 1, 2) if isinstance(e, Admit)]
    assert dict(admit.names) == {KEYS.public(f"worker-{s}"): f"worker-{s}" for s in (1, 2)}
    (admit,) = [e for e in listener.is_told(2, 0, 2) if isinstance(e, Admit)]
    assert set(admit.names.values()) == {"worker-2"}
    assert listener.refusals(QUESTION, "worker-1") != [], "removing a key cuts no connection"


def test_a_worker_connects_to_the_others_and_not_to_itself():
    listener = Listener()
    connects = [e for e in listener.is_told(1, 0, 1, 2) if isinstance(e, Connect)]
    assert connects == [
        Connect(f"worker-{s}", f"ipc:///run/worker-{s}", KEYS.public(f"worker-{s}")) for s in (1, 2)
    ]
    assert [e for e in listener.is_told(2, 0, 1, 2) if isinstance(e, Connect)] == []


def test_without_keys_nobody_is_let_in_by_name():
    listener = Listener(Keyring(b"x"))
    assert [e for e in listener.is_told(1, 0, 1, 2) if isinstance(e, Admit)] == []
    assert listener.refusals(QUESTION, "") == []


@pytest.mark.parametrize(
    "message",
    [
        PUSH,
        m.Join("run", 1, 1, b""),
        m.Fetch(1, 1, 1, 0),
        m.LeaseRequest(1, 1, 0, False),
        m.PeerReply(1, 1, 1, "", pack(())),
        m.Dismiss("go"),
        m.Shutdown("go"),
        m.Drain("go"),
        m.Save(1, "x"),
        m.Peers(9, (), (), (), (), ()),
        m.Ack(0, 1, 0, "applied", 1, 0, 1),
        m.Parameters(0, 1, 1, 1, np.zeros(1, np.float32)),
        m.Request(1, "stop", {}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nothing_but_questions_is_taken_from_who_connects_to_a_worker(message):
    listener = Listener()
    listener.is_told(1, 0, 1, 2)
    (refusal,) = listener.refusals(message, "worker-1")
    assert "kind" in refusal
    assert listener.worker.members.number == 1
    assert not listener.worker._draining


@pytest.mark.parametrize("who", ["server-0", "agent-0", "client", "reader", "worker-2", "worker-7"])
def test_a_question_is_heard_from_the_worker_whose_it_is_only(who):
    listener = Listener()
    listener.is_told(1, 0, 1, 2)
    assert listener.refusals(QUESTION, "worker-1") == []
    assert len(listener.refusals(QUESTION, who)) == 1


def test_who_asks_three_times_as_somebody_else_is_not_let_in_any_more():
    listener = Listener()
    listener.is_told(1, 0, 1, 2)
    heard = [listener.hears(QUESTION, b"connection", "worker-2") for _ in range(3)]
    (admit,) = [effect for effect in heard[-1] if isinstance(effect, Admit)]
    assert set(admit.names.values()) == {"worker-1"}


@pytest.mark.parametrize("peer", ["server-0", COORDINATOR, "worker-1"])
def test_nobody_asks_over_a_connection_that_this_worker_has_made(peer):
    listener = Listener()
    listener.is_told(1, 0, 1, 2)
    effects = listener.hears(QUESTION, peer)
    assert any(isinstance(e, Note) and "kind" in e.text for e in effects)


# ---------------------------------------------------------------- ports


def test_workers_have_the_ports_behind_those_of_the_servers():
    run = job(
        servers=Servers(count=2), workers=Workers(count=2),
        network=Network(transport="tcp", port=7000),
    )  # fmt: skip
    servers = [addresses.of_server("run", f"server-{i}", run, "agent-0", "") for i in range(2)]
    workers = [addresses.of_worker("run", f"worker-{i}", run, "agent-0", "") for i in range(2)]
    ports = [place.bind.rpartition(":")[2] for place in (*servers, *workers)]
    assert ports == ["7001", "7002", "7003", "7004"]
    assert {place.bind.rpartition(":")[0] for place in workers} == {"tcp://127.0.0.1"}


def test_without_a_port_any_free_one_is_taken_and_alone_a_socket_of_this_user():
    anything = job(network=Network(transport="tcp"))
    place = addresses.of_worker("run", "worker-1", anything, "agent-0", "")
    assert place.bind == "tcp://127.0.0.1:*"
    alone = addresses.of_worker("run", "worker-1", job(), "agent-0", "")
    assert alone.bind.startswith("ipc://")


@pytest.mark.parametrize("name", ["worker-0", "worker-9"], ids=["moved", "added"])
def test_a_worker_listens_at_the_address_of_the_host_that_it_is_on(name):
    hosts = (Host(ssh="a", data="10.0.0.1"), Host(ssh="b", data="10.0.0.2"))
    run = job(workers=Workers(count=1), hosts=hosts)
    place = addresses.of_worker("run", name, run, "agent-2", "tcp://127.0.0.1:7000")
    assert place.bind == "tcp://10.0.0.2:*"
