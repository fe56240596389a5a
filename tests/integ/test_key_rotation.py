"""`dlctl keys rotate` on real runs: old keys open nothing, and whoever dies, the run goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl.control import keys, reader
from dlctl.errors import NotPermitted
from dlctl.roles.protocol.authz import CLIENT
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.wire import codec
from dlctl.wire.messages import Request

TCP = '[network]\ntransport = "tcp"\n'
SILENCE_MS = 500


@pytest.fixture
def at_work(place: Workplace) -> Workplace:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=1, workers=2, more=TCP)
    place.start()
    place.until_step(5)
    return place


class Old:
    """Connections with keys of the run key that there was when they were made."""

    def __init__(self, place: Workplace) -> None:
        self.run = keys.CurveKeys(keys.read(place.directory))
        self.address = place.run()["control"]
        self.context = zmq.Context()
        self.socket = self.connect()

    def connect(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.curve_serverkey = self.run.public(COORDINATOR).encode()
        socket.curve_publickey, socket.curve_secretkey = (
            key.encode() for key in self.run.pair(CLIENT)
        )
        socket.connect(self.address)
        return socket

    def hears(self, socket: zmq.Socket[bytes], number: int, timeout_ms: int) -> bool:
        """Whether anybody answers to a question that does no harm."""
        with suppress(zmq.Again):  # It was refused for good: then libzmq takes nothing any more.
            socket.send_multipart(codec.encode(Request(number, "no such verb", {})), zmq.NOBLOCK)
        return bool(socket.poll(timeout_ms))


@contextmanager
def old_keys(place: Workplace):
    old = Old(place)
    try:
        yield old
    finally:
        old.context.destroy(linger=0)


def a_reader_looks_on_and_can_change_nothing(place: Workplace, file: Path) -> None:
    """With an environment that knows nothing of the run but the key file."""
    assert place.dlctl("keys", "reader", str(file)).code == 0
    assert file.stat().st_mode == 0o100600
    place.env["XDG_STATE_HOME"] = str(place.path / "nowhere")
    shown = place.dlctl("status", "--key", str(file))
    assert shown.code == 0, shown.err
    assert "worker-1" in shown.out
    status = json.loads(place.dlctl("status", "--key", str(file), "--json").out)
    assert status["run"]["state"] == "running"
    assert {row["name"] for row in status["daemons"]} == {
        "agent-0", "server-0", "worker-0", "worker-1",
    }  # fmt: skip
    assert abs(status["run"]["updated_at"] - time.time()) < 60
    key = reader.load(file)
    for verb in ("stop", "scale", "set", "checkpoint", "rotate"):
        refused = pytest.raises(NotPermitted, match=f'"{verb}"')
        with refused, reader.asking(key, 10.0) as ask:
            ask(verb, {"kill": True})
    assert place.run()["state"] == "running"
    other = key._replace(secret=keys.CurveKeys(b"?" * 32).secret("reader"))
    with pytest.raises(NotPermitted):
        reader.status(other, 10.0)
    file.chmod(0o644)
    assert str(file) in place.dlctl("status", "--key", str(file)).err
    file.chmod(0o600)
    place.env["XDG_STATE_HOME"] = str(place.path / "state")


@pytest.mark.long
def test_old_keys_open_nothing_after_a_rotation_and_no_push_is_lost(at_work: Workplace) -> None:
    """Those of a client, a reader and, by the restart of all, every daemon."""
    place, file = at_work, at_work.path / "bob.key"
    a_reader_looks_on_and_can_change_nothing(place, file)
    with old_keys(place) as old:
        assert old.hears(old.socket, 1, 5000), "the key is good, and its connection is open"
        while old.socket.poll(100):
            old.socket.recv_multipart()
        before, mode = keys.read(place.directory), (place.directory / "key").stat().st_mode
        step, daemon = place.run()["step"], place.daemon("server-0")
        ended = place.dlctl("keys", "rotate")
        assert (ended.code, ended.err.count("has new keys")) == (0, 1), ended.err
        assert keys.read(place.directory) != before
        assert (place.directory / "key").stat().st_mode == mode == 0o100600
        for number, socket in ((2, old.socket), (3, old.connect())):
            assert not old.hears(socket, number, SILENCE_MS)
    assert place.dlctl("status", "--key", str(file)).code == 77, "a reader's key is an old one, too"
    place.until_step(step + 20)
    assert place.daemon("server-0")["incarnation"] == daemon["incarnation"] + 1
    events = place.events("keys")
    assert f"{os.environ.get('USER') or 'root'}@" in events[0] or "@" in events[0]
    assert place.dlctl("verify").code == 0
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_coordinator_killed_beside_the_renaming_leaves_a_run_that_heals(
    at_work: Workplace, when: str
) -> None:
    """The agent starts the next one; it finds one key or the other, and begins what is needed."""
    place = at_work
    before = keys.read(place.directory)
    pid = place.pid("coordinator")
    command = place.begin("keys", "rotate")
    if when == "before":
        place.until("it is asked", lambda: place.events("keys"))
    else:
        place.until("the key is renamed", lambda: keys.read(place.directory) != before)
    if place.pid("coordinator") == pid:
        os.kill(pid, signal.SIGKILL)
    assert command.end().code == 0
    assert keys.read(place.directory) != before
    place.until_step(place.run()["step"] + 20)
    assert place.dlctl("verify").code == 0
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_all_killed_in_the_middle_come_back_with_recover(at_work: Workplace) -> None:
    place = at_work
    before = keys.read(place.directory)
    command = place.begin("keys", "rotate")
    place.until("the key is renamed", lambda: keys.read(place.directory) != before)
    command.process.kill()
    command.process.wait()
    place.kill_at_once([p for p in place.processes() if "daemons." in " ".join(p.cmdline())])
    assert place.dlctl("recover").code == 0
    place.until_step(place.run()["step"] + 20)
    assert place.dlctl("verify").code == 0
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_run_that_is_not_live_just_gets_another_key_and_goes_on_with_it(
    at_work: Workplace,
) -> None:
    place = at_work
    assert place.dlctl("stop").code == 0
    before = keys.read(place.directory)
    ended = place.dlctl("keys", "rotate", "--json")
    assert ended.code == 0, ended.err
    assert '"restarted": []' in ended.out
    assert keys.read(place.directory) != before
    assert place.events("keys")
    place.start()
    place.until_step(place.run()["step"] + 5)
    assert place.dlctl("stop").code == 0


@pytest.mark.long
def test_shards_in_memory_only_are_not_given_up_for_new_keys(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, more_servers='durability = "none"')
    place.start()
    before = keys.read(place.directory)
    ended = place.dlctl("keys", "rotate")
    assert ended.code == 1
    assert "dlctl keys rotate" in ended.err
    assert keys.read(place.directory) == before
    assert place.dlctl("stop", "--kill").code == 0
    assert Path(place.directory / "key").stat().st_mode == 0o100600
