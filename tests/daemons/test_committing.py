"""The thread that performs a server's commits: one sync for many, in order, and within limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from daemons.server import committing
from daemons.server.committing import Committing
from daemons.transport.sockets import Transport
from dlctl.errors import DlctlError, TimedOut
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.server.commits import Commit, Committed
from dlctl.shards.base import no_point
from dlctl.shards.journal_format import MAGIC
from dlctl.shards.log import LogWrite
from dlctl.wire import messages as m

LIMIT_S = 20.0


class Disk:
    """A log each of whose syncs has to be allowed."""

    where = "here"

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._may_end = threading.Semaphore(0)
        self.synced: list[bytes] = []
        self.error: DlctlError | None = None

    def append(self, parts: list[bytes]) -> None:
        self.begun.release()
        assert self._may_end.acquire(timeout=LIMIT_S)
        if self.error is not None:
            raise self.error
        self.synced.append(b"".join(parts))

    def begin(self, number: int, parts: list[bytes]) -> None:
        self.append(parts)

    def await_begin(self) -> None:
        assert self.begun.acquire(timeout=LIMIT_S)

    def end(self) -> None:
        self._may_end.release()


class Stage:
    """The loop, as far as the thread sees it."""

    def __init__(self) -> None:
        self.performers: dict[type, Any] = {}
        self.events: list[Any] = []
        self._changed = threading.Condition()
        self.accepts = True
        self.after_events: Any = None
        self.transport = self

    def perform(self, kind: type, how: Any) -> None:
        self.performers[kind] = how

    def post(self, event: Any) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    fail = post

    def accept(self, accepts: bool) -> None:
        self.accepts = accepts

    def await_told(self, count: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.events) >= count, LIMIT_S)
        return self.events


class Server:
    """A loop that begins commits, and the thread that performs them."""

    def __init__(self) -> None:
        self.stage, self.disk, self._number = Stage(), Disk(), 0
        self.committing = Committing(self.stage)  # type: ignore[arg-type]

    def commit(self, record: bytes, base: bytes = b"", log: Disk | None = None) -> None:
        self._number += 1
        disk: Any = log or self.disk
        write = LogWrite(disk, self._number, record and MAGIC + record, base, no_point)
        self.stage.performers[Commit](Commit(self._number, write))

    def turn(self) -> bool:
        """The loop is about to wait for messages: whether it reads what workers send."""
        self.stage.after_events()
        return self.stage.accepts


def test_a_sync_covers_all_commits_that_were_begun_during_the_last() -> None:
    server = Server()
    server.commit(b"1")
    server.disk.await_begin()
    for record in (b"2", b"3", b"4"):
        server.commit(record)
    assert server.stage.events == []
    server.disk.end()
    assert server.stage.await_told(1) == [Committed(1)]
    server.disk.await_begin()
    server.disk.end()
    assert server.stage.await_told(2) == [Committed(1), Committed(4)]
    assert server.disk.synced == [b"dlJ11", b"dlJ12dlJ23dlJ24"]


def test_behind_an_error_nothing_is_written_or_confirmed() -> None:
    """The loop ends with it; what it begins until then is in vain."""
    server = Server()
    server.disk.error = DlctlError("the disk is broken")
    server.commit(b"1")
    server.disk.await_begin()
    server.commit(b"2")
    server.disk.end()
    assert server.stage.await_told(1) == [server.disk.error]
    server.commit(b"3")
    server.committing.await_all()
    assert (server.disk.synced, len(server.stage.events)) == ([], 1)


def test_who_waits_for_commits_of_a_disk_that_does_not_answer_is_told_which_one_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And may wait again: the commits go on."""
    server = Server()
    server.commit(b"1")
    server.disk.await_begin()
    server.commit(b"2")
    with monkeypatch.context() as impatient:
        impatient.setattr(committing, "AWAIT_S", 0.05)
        with pytest.raises(TimedOut, match="commit 1 ") as raised:
            server.committing.await_all()
    assert raised.value.where == server.disk.where
    assert raised.value.hint is not None
    server.disk.end()
    server.disk.end()
    server.committing.await_all()
    assert server.stage.await_told(2)[-1] == Committed(2)


def test_beyond_a_limit_nothing_is_read_until_the_disk_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committing, "QUEUED_MAX", 9)
    server = Server()
    server.commit(b"four")
    assert server.turn()
    server.disk.await_begin()
    server.commit(b"two more"[:2])
    assert not server.turn()
    server.disk.end()
    server.stage.await_told(1)
    assert server.turn()
    server.disk.end()
    server.committing.await_all()
    assert server.stage.await_told(2)[-1] == Committed(2)


def test_the_limit_holds_in_the_turn_that_exceeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the loop has handled all messages that are there: they may be large."""
    monkeypatch.setattr(committing, "QUEUED_MAX", 9)
    server = Server()
    server.commit(b"four")
    assert server.stage.accepts
    server.commit(b"more")
    assert not server.stage.accepts


def test_a_base_of_any_size_does_not_keep_a_server_from_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But a second one of the same log does: it is a copy of everything."""
    monkeypatch.setattr(committing, "QUEUED_MAX", 9)
    server, other = Server(), Disk()
    server.commit(b"", b"a base of a large model")
    assert server.turn()
    server.commit(b"", b"another table's", other)
    assert server.turn()
    server.commit(b"four", b"a second one")
    assert not server.turn()
    server.disk.end()
    server.stage.await_told(1)
    assert server.turn()
    server.commit(b"more")
    assert not server.turn(), "records are bounded in any case"
    other.end()
    for _ in range(3):
        server.disk.end()
    server.committing.await_all()
    assert server.turn()


def test_a_limit_of_one_syncs_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline of the benchmark."""
    monkeypatch.setattr(committing, "TOGETHER_MAX", 1)
    server = Server()
    for record in (b"1", b"2", b"3"):
        server.commit(record)
        server.disk.end()
    assert server.stage.await_told(3) == [Committed(1), Committed(2), Committed(3)]


# ---------------------------------------------------------------- reading


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    """A server's end and a worker's, which are connected."""
    server, worker = Transport(zmq.Poller()), Transport(zmq.Poller())
    address = f"ipc://{tmp_path}/server"
    server.listen(address)
    worker.connect(COORDINATOR, address)
    yield server, worker
    worker.close()
    server.close()


def test_what_is_sent_to_a_server_that_does_not_read_comes_later(
    ends: tuple[Transport, Transport],
) -> None:
    server, worker = ends
    server.accept(False)
    server.accept(False)
    worker.send(COORDINATOR, m.Heard())
    assert server.poller.poll(200) == []
    server.accept(True)
    ((socket, _),) = server.poller.poll(int(1000 * LIMIT_S))
    assert [type(came.message) for came in server.receive(socket)] == [m.Heard]  # type: ignore[union-attr]


def test_what_is_already_there_is_left_in_the_turn_in_which_a_server_stops_reading(
    ends: tuple[Transport, Transport],
) -> None:
    server, worker = ends
    for name in ("worker-0", "worker-1"):
        worker.send(COORDINATOR, m.Failed(name, "error", "", fatal=False))
    ((socket, _),) = server.poller.poll(int(1000 * LIMIT_S))
    turn = server.receive(socket)
    first = next(turn)
    assert server.poller.poll(int(1000 * LIMIT_S)), "the second one is there"
    server.accept(False)
    assert list(turn) == []
    server.accept(True)
    assert server.poller.poll(int(1000 * LIMIT_S))
    (second,) = server.receive(socket)
    names = [came.message.name for came in (first, second)]  # type: ignore[union-attr]
    assert names == ["worker-0", "worker-1"]


def test_a_server_that_does_not_read_can_be_closed(ends: tuple[Transport, Transport]) -> None:
    ends[0].accept(False)
