"""The client against real ROUTER sockets that answer, stay silent, or are not there at all."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zlib

import psutil
import pytest
import zmq
from fake_coordinator import RING, RUN_KEY, coordinator, coordinator_with_keys, done
from process_identity import ME, OF_ANOTHER_BOOT, identity
from proxies import Proxy, cut_in_the_middle

from daemons.transport import zap
from daemons.transport.sockets import Transport
from dlctl.control import client, keys
from dlctl.errors import DlctlError, NotPermitted, RemoteProtocolError, TimedOut, Unreachable
from dlctl.runs import paths
from dlctl.util import processes
from dlctl.wire.messages import Reply, Request


def test_a_question_is_answered(run_directory):
    with coordinator(lambda q, n: [done(q, state="stopped")]) as (address, heard):
        run = run_directory().run(state="running", control=address, **ME)
        assert client.ask(run.path, "stop", {"names": []}, 5) == {"state": "stopped"}
    assert [(q.verb, q.arguments) for q in heard] == [("stop", {"names": []})]
    assert heard[0].request < 2**53


def test_progress_is_heard_before_the_end(run_directory):
    steps = []

    def answer(q: Request, _: int) -> list[Reply]:
        parts = [Reply(q.request, False, "", {"phase": p}) for p in ("draining", "saving")]
        return [*parts, done(q)]

    with coordinator(answer) as (address, _):
        run = run_directory().run(control=address, **ME)
        client.ask(run.path, "stop", {}, 5, steps.append)
    assert steps == [{"phase": "draining"}, {"phase": "saving"}]


def test_a_lost_question_is_asked_again_with_the_same_number(run_directory):
    with coordinator(lambda q, n: [done(q)] if n == 2 else []) as (address, heard):
        run = run_directory().run(control=address, **ME)
        client.ask(run.path, "get", {}, 10)
    assert len(heard) == 2
    assert heard[0].request == heard[1].request


def test_the_coordinator_that_takes_a_dead_ones_place_is_asked_anew(run_directory, monkeypatch):
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    run = run_directory().run(state="running", **gone).daemon("agent-0", **ME)

    def place(directory) -> dict:
        """Its agent needs a moment to start the next one."""
        if len(looks) == 2:
            run.run(control=address, **ME)
        looks.append(directory)
        return read(directory)

    looks, read = [], client.database.read
    monkeypatch.setattr(client.database, "read", place)
    with coordinator(lambda q, n: [done(q, new=1)]) as (address, heard):
        assert client.ask(run.path, "get", {}, 10) == {"new": 1}
    assert len(heard) >= 1
    run.run(state="failed", **gone)
    with pytest.raises(client.Gone):
        client.ask(run.path, "get", {}, 10)


def test_answers_to_other_questions_are_not_ours(run_directory):
    def answer(q: Request, _: int) -> list[Reply]:
        return [Reply(q.request ^ 1, True, "", {"other": 1}), done(q, mine=1)]

    with coordinator(answer) as (address, _):
        run = run_directory().run(control=address, **ME)
        assert client.ask(run.path, "get", {}, 5) == {"mine": 1}


def test_a_refusal_is_told_in_the_coordinators_own_words(run_directory):
    with coordinator(lambda q, n: [Reply(q.request, True, "no server has a shard", {})]) as (a, _):
        run = run_directory().run(control=a, **ME)
        with pytest.raises(DlctlError) as caught:
            client.ask(run.path, "checkpoint", {}, 5)
    assert caught.value.exit_code == 1


def test_rubbish_instead_of_an_answer_is_the_peers_fault(run_directory):
    with coordinator(lambda q, n: [[b"\xc1 rubbish"]]) as (address, _):
        run = run_directory().run(control=address, **ME)
        with pytest.raises(RemoteProtocolError):
            client.ask(run.path, "get", {}, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"no zlib",
        zlib.compress(b"no json"),
        zlib.compress(b"[]"),
        zlib.compress(b"[" * 200_000),
        zlib.compress(b" " * client.RESULT_BYTES_MAX + b"{}"),
    ],
    ids=["no zlib", "no json", "no object", "deep", "more than it seems"],
)
def test_a_compressed_result_is_no_trap(run_directory, data):
    with coordinator(lambda q, n: [Reply(q.request, True, "", {}, data)]) as (address, _):
        run = run_directory().run(control=address, **ME)
        with pytest.raises(RemoteProtocolError):
            client.ask(run.path, "status", {}, 5)


def test_a_coordinator_that_is_gone_is_noticed_at_once_although_its_address_is_known(run_directory):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        gone = identity(process.pid)
    run = run_directory().run(state="running", control="tcp://127.0.0.1:9", **gone)
    with pytest.raises(client.Gone, match=f"gone \\(pid {process.pid}\\).*running") as caught:
        client.ask(run.path, "stop", {}, 30)
    assert caught.value.exit_code == 5


def test_a_pid_that_somebody_else_has_now_is_not_the_coordinator(run_directory):
    run = run_directory().run(control="tcp://127.0.0.1:9", pid=ME["pid"], pid_start=OF_ANOTHER_BOOT)
    with pytest.raises(client.Gone):
        client.ask(run.path, "stop", {}, 30)
    assert not processes.is_alive("x", None)
    assert not processes.is_alive(-1, 1.0)


def test_a_coordinator_that_lives_but_is_mute_is_called_so(run_directory):
    with coordinator(lambda q, n: []) as (address, _):
        run = run_directory().run(control=address, **ME)
        with pytest.raises(Unreachable, match=r" 0\.3s") as caught:
            client.ask(run.path, "stop", {}, 0.3)
    assert caught.value.where == address
    assert (
        caught.value.hint
        == f"kill -9 {ME['pid']}; dlctl recover -j digits-7f3a\nstarts another one"
    )


def test_what_helps_against_a_mute_coordinator_loses_nothing(run_directory):
    with coordinator(lambda q, n: []) as (address, _):
        run = run_directory().run(control=address, **ME).daemon("agent-0", **ME)
        with pytest.raises(Unreachable) as frozen:
            client.ask(run.path, "set", {}, 0.1)
        (run.path / paths.LOCK).touch()
        with pytest.raises(Unreachable) as at_work:
            client.ask(run.path, "set", {}, 0.1)
    assert frozen.value.hint == (
        f"kill -9 {ME['pid']}\nmakes its agent start another one at once, which continues where it "
        "was: nothing is lost; else it is replaced after 30 s without a heartbeat"
    )
    looks = "dlctl status -j digits-7f3a\nor: dlctl logs coordinator -j digits-7f3a"
    assert at_work.value.hint == looks, "it works: to kill it would help nobody"


def test_a_coordinator_without_an_address_yet_is_waited_for_and_then_named(run_directory):
    run = run_directory().run(state="starting", **ME)
    with pytest.raises(Unreachable, match="starting"):
        client.ask(run.path, "stop", {}, 0.3)


def test_work_that_takes_longer_than_the_timeout_goes_on(run_directory):
    with coordinator(lambda q, n: [Reply(q.request, False, "", {})]) as (address, heard):
        run = run_directory().run(control=address, **ME)
        with pytest.raises(TimedOut) as caught:
            client.ask(run.path, "checkpoint", {}, 1.3)
        assert caught.value.exit_code == 6
        assert len(heard) == 1  # once answered, it is not asked again


def test_ending_processes_spares_those_that_only_have_the_same_pid(run_directory):
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(sleeper) as mine, subprocess.Popen(sleeper) as foreign:
        rows = [
            {"name": "worker-0", **identity(mine.pid)},
            {"name": "worker-1", "pid": foreign.pid, "pid_start": OF_ANOTHER_BOOT},
            {"name": "worker-2", "pid": None},
        ]
        assert [row["name"] for row in processes.living(rows)] == ["worker-0"]
        assert processes.end(rows, grace_s=5) == (["worker-0"], [])
        assert foreign.poll() is None
        foreign.kill()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(run_directory):
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        row = {"name": "server-0", **identity(process.pid)}
        assert processes.end([row], grace_s=0.2) == (["server-0"], [])
        assert not processes.is_alive(row["pid"], row["pid_start"])


def test_a_zombie_has_ended_whenever_its_parent_may_find_time_for_it():
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        row = {"name": "worker-0", **identity(process.pid)}
        assert process.stdout.read() == b""
        assert processes.wait([row], timeout_s=5) == []
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert processes.end([row], grace_s=5) == ([], [])


def test_a_coordinator_with_another_key_is_not_asked_and_said_so(run_directory):
    """Somebody else listens there, or the key file is of another run: exit code 77."""
    ours, theirs = keys.CurveKeys(b"a" * 32), keys.CurveKeys(b"b" * 32)
    listener = Transport(zmq.Poller(), theirs.secret("coordinator"))
    try:
        address = listener.listen("tcp://127.0.0.1:*")
        listener.admit({ours.public("client"): "client"})
        run = run_directory().run(
            state="running", control=address, control_key=ours.public("coordinator"), **ME
        )
        key = run.path / keys.FILE
        key.write_bytes(b"a" * 32)
        key.chmod(0o600)
        began_at = time.monotonic()
        with pytest.raises(NotPermitted) as raised:
            client.ask(run.path, "stop", {}, 60)
        assert time.monotonic() - began_at < 5
        assert raised.value.where == address
        assert raised.value.exit_code == 77
        heard = [m for source, _ in listener.poller.poll(0) for m in listener.receive(source)]
        assert not heard, "and nothing was heard there"
    finally:
        listener.close()


def test_a_broken_handshake_is_no_wrong_key(run_directory, monkeypatch):
    """The next one succeeds, and the coordinator has much to do before it answers."""
    monkeypatch.setattr(client, "REFUSED_S", 0.3)
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    ring = keys.CurveKeys(b"a" * 32)
    run = run_directory()
    key = run.path / keys.FILE
    key.write_bytes(b"a" * 32)
    key.chmod(0o600)
    listener = Transport(zmq.Poller(), ring.secret("coordinator"))
    address = listener.listen("tcp://127.0.0.1:*")
    listener.admit({ring.public("client"): "client"})
    proxy = Proxy(int(address.rpartition(":")[2]), cut_in_the_middle)
    asked = []

    def serve() -> None:
        while not asked or asked[-1] is not None:
            for source, _ in listener.poller.poll(1000):
                for came in listener.receive(source):
                    asked.append(came.message)
                    if len(asked) >= 10:
                        listener.send(came.peer, done(came.message, new=1))
                        asked.append(None)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        run.run(
            state="running", control=proxy.address, control_key=ring.public("coordinator"), **ME
        )
        assert client.ask(run.path, "get", {}, 20) == {"new": 1}
        thread.join()
        assert proxy.connections == 2
    finally:
        proxy.close()
        listener.close()


@pytest.fixture
def keyed_run(run_directory):
    """The path of a run whose coordinator is at this address and has the key of `answering`."""

    def keyed(address: str):
        run = run_directory()
        key = run.path / keys.FILE
        key.write_bytes(RUN_KEY)
        key.chmod(0o600)
        run.run(state="running", control=address, control_key=RING.public("coordinator"), **ME)
        return run.path

    return keyed


def test_who_comes_too_often_goes_on_trying_and_gets_in(keyed_run, monkeypatch):
    monkeypatch.setattr(zap, "COMINGS_MAX", 1.0)
    monkeypatch.setattr(zap, "COMINGS_PER_S", 0.6)
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    with coordinator_with_keys(lambda q: [done(q, new=1)], "client") as (address, listener):
        run = keyed_run(address)
        assert client.ask(run, "set", {}, 5) == {"new": 1}
        began_at = time.monotonic()
        assert client.ask(run, "set", {}, 10) == {"new": 1}
        assert listener.gatekeeper.refused > 0
        assert time.monotonic() - began_at < 2.9, "it was told at once"


def test_who_comes_too_often_for_too_long_hears_that_and_nothing_of_keys(keyed_run, monkeypatch):
    monkeypatch.setattr(zap, "COMINGS_MAX", 0.0)
    monkeypatch.setattr(zap, "COMINGS_PER_S", 0.0)
    monkeypatch.setattr(client, "REFUSED_S", 0.2)
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    monkeypatch.setattr(client, "NO_REPLY_S", 1.0)
    with (
        coordinator_with_keys(lambda q: [done(q)], "client") as (address, _),
        pytest.raises(Unreachable) as raised,
    ):
        client.ask(keyed_run(address), "set", {}, 60)
    assert (raised.value.where, raised.value.exit_code) == (address, 5)
    assert raised.value.hint


def test_a_coordinator_that_was_not_told_yet_who_may_come_has_no_wrong_key(keyed_run, monkeypatch):
    monkeypatch.setattr(zap, "UNDECIDED_S", 0.2)
    monkeypatch.setattr(client, "REFUSED_S", 0.2)
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    with coordinator_with_keys(lambda q: [done(q, new=1)]) as (address, listener):
        names = {RING.public("client"): "client"}
        thread = threading.Timer(1.2, listener.admit, [names])
        thread.start()
        assert client.ask(keyed_run(address), "get", {}, 20) == {"new": 1}
        thread.join()
        assert listener.gatekeeper.refused > 0
