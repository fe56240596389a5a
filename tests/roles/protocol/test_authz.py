"""Who may say what: a key speaks for its own name, in its own role, or it is not heard."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.errors import NotPermitted, RemoteProtocolError
from dlctl.job.config import Job, JobFile
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.authz import CLIENT, OFFENCES_MAX, READER, Authz, keys_of, offence
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.keyring import Keyring
from dlctl.roles.protocol.rows import packed
from dlctl.roles.server.server import Server
from dlctl.sim.keys import SimulatedKeys
from dlctl.wire import messages as m
from dlctl.wire.machine import Admit, Note
from dlctl.wire.messages import MESSAGES, Packed, PeerRequest

KEYS = SimulatedKeys(b"token key")
NAMES = ("agent-0", "server-0", "worker-0", "worker-1", CLIENT, READER)
READ = m.ReadFile(1, "ckpt/000000000001-1/manifest.json", 0, 0, 1)
DATA = m.FileData("agent-0", 1, "logs/worker-0.1.jsonl", 1, 0, 1, b"x", "")
REGISTER = m.Register("run", "worker", "worker-0", 1, 1, "host", "0")
STOP = m.Request(1, "stop", {})
STATUS = m.Request(2, "status", {})
JOIN = m.Join("run", 0, 1, b"")
PUSH = m.Push(0, 1, 1, 0, 0, 0, 0, 1, 0, Packed("none", 0, ()))
ROWS = packed([])


@pytest.fixture
def doors() -> Authz:
    made = Authz(Context(1.0))
    made.admit(keys_of(KEYS, NAMES))
    made.context.clear()
    return made


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ("worker-0", REGISTER),
        ("worker-0", JOIN),
        ("worker-0", PUSH),
        ("worker-0", m.LeaseRequest(0, 1, 0, False)),
        ("server-0", m.Serving("server-0", "tcp://x", True)),
        ("server-0", m.VectorResult(1, 0, 1, (0.0,))),
        ("server-0", m.Holding(0, 1, 1, 0, ROWS)),
        ("agent-0", m.ProcessExited("worker-1", 1, -9, (), "")),
        ("agent-0", DATA),
        ("server-0", READ),
        ("worker-1", READ),
        (CLIENT, STOP),
        (CLIENT, STATUS),
        (READER, STATUS),
        ("", STOP),
        ("", REGISTER),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_everybody_may_say_what_is_theirs(doors: Authz, identity: str, message: m.Message) -> None:
    doors.check(identity, message)


@pytest.mark.parametrize(
    ("identity", "message", "why"),
    [
        ("worker-1", REGISTER, "worker-1 speaks for worker-0"),
        ("worker-1", JOIN, "worker-1 speaks for worker-0"),
        ("worker-1", PUSH, "worker-1 speaks for worker-0"),
        ("server-0", PUSH, "server-0 may not send Push"),
        ("worker-0", STOP, "worker-0 may not send Request"),
        ("server-0", STOP, "server-0 may not send Request"),
        ("agent-0", STOP, "agent-0 may not send Request"),
        (CLIENT, REGISTER, "client may not send Register"),
        (CLIENT, PUSH, "client may not send Push"),
        ("worker-0", m.ProcessExited("worker-1", 1, -9, (), ""), "may not send ProcessExited"),
        ("worker-0", m.Serving("server-0", "tcp://x", True), "may not send Serving"),
        ("server-0", m.VectorResult(1, 1, 1, (0.0,)), "server-0 speaks for server-1"),
        ("server-0", m.Holding(1, 1, 1, 0, ROWS), "server-0 speaks for server-1"),
        ("worker-0", m.Holding(0, 1, 1, 0, ROWS), "worker-0 may not send Holding"),
        ("server-0", m.Decided(0, ROWS, ROWS), "server-0 may not send Decided"),
        ("worker-0", m.Kill("server-0", 1, 9), "worker-0 may not send Kill"),
        ("worker-0", m.AllowedPeers(1, b"{}"), "worker-0 may not send AllowedPeers"),
        ("worker-0", DATA, "worker-0 may not send FileData"),
        ("agent-1", DATA, "agent-1 is not admitted any more"),
        ("agent-0", READ, "agent-0 may not send ReadFile"),
        (CLIENT, READ, "client may not send ReadFile"),
        (READER, REGISTER, "reader may not send Register"),
        (READER, PUSH, "reader may not send Push"),
        ("worker-0", m.FileTaken("x"), "worker-0 may not send FileTaken"),
        ("worker-7", REGISTER, "worker-7 is not admitted any more"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_nobody_may_say_what_is_not_theirs(
    doors: Authz, identity: str, message: m.Message, why: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        doors.check(identity, message)


@pytest.mark.parametrize("verb", ["stop", "set", "checkpoint", "scale", "restart", "rotate", "?"])
def test_a_reader_is_told_no_by_name_and_may_still_look_afterwards(doors: Authz, verb: str) -> None:
    for _ in range(OFFENCES_MAX + 1):
        with pytest.raises(
            NotPermitted, match=f'a reader may not ask for "{verb}"'.replace("?", ".")
        ):
            doors.check(READER, m.Request(1, verb, {}))
    doors.check(READER, STATUS)


def test_after_three_offences_the_key_is_shut_out_and_the_others_are_not(doors: Authz) -> None:
    for _ in range(OFFENCES_MAX):
        with pytest.raises(RemoteProtocolError):
            doors.check("worker-1", REGISTER)
    note, admit = doors.context.clear()
    assert isinstance(note, Note)
    assert note.text.startswith("worker-1 sent 3 ")
    assert isinstance(admit, Admit)
    assert set(admit.names.values()) == set(NAMES) - {"worker-1"}
    own = m.LeaseRequest(1, 1, 0, False)
    with pytest.raises(RemoteProtocolError):
        doors.check("worker-1", own)
    doors.check("worker-0", REGISTER)
    doors.admit(keys_of(KEYS, [*NAMES, "worker-2"]))
    (admit,) = doors.context.clear()
    assert isinstance(admit, Admit)
    assert "worker-1" not in admit.names.values(), "told again who belongs here, it stays out"


def test_a_name_that_is_gone_is_not_heard_on_the_connection_that_it_has(doors: Authz) -> None:
    doors.check("worker-1", m.LeaseRequest(1, 1, 0, False))
    doors.admit(keys_of(KEYS, ["agent-0", "server-0", "worker-0"]))
    with pytest.raises(RemoteProtocolError):
        doors.check("worker-1", m.LeaseRequest(1, 1, 0, False))


def test_what_has_not_changed_is_not_put_in_force_again(doors: Authz) -> None:
    doors.admit(keys_of(KEYS, NAMES))
    assert doors.context.clear() == []


def test_without_keys_there_is_nobody_to_admit() -> None:
    assert keys_of(Keyring(b"token key"), NAMES) == {}


def test_every_message_that_a_listening_daemon_takes_has_a_rule() -> None:
    job = JobFile(job=Job(name="any", task="none"))
    coordinator = Coordinator("run", job, Keyring(b"key"), DOWNPOUR, Past())
    taken = {*coordinator._dispatch, *Server._FROM_WORKERS, PeerRequest}
    for kind in MESSAGES.values():
        message = kind(*(0 for _ in fields(kind)))
        says = {offence(name, message) for name in (*NAMES, "guest-0")}
        may = any("may not send" not in why for why in says)
        assert may == (kind in taken), kind.__name__
