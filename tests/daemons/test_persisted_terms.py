"""A term is given to one process, whatever befalls the coordinator or its disk."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from full_disk import LARGE, fill, free_space

from daemons.coordinator import records
from daemons.loop import Loop
from dlctl.roles.coordinator import records as j
from dlctl.roles.protocol.effects import Unwritten
from dlctl.runs import terms
from dlctl.runs.database import RunDb
from dlctl.runs.terms import OnDisk, in_lines
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send


class Sent:
    """Takes the place of the network."""

    def __init__(self) -> None:
        self.messages: list[m.Message] = []

    def send(self, peer: str, message: m.Message) -> None:
        self.messages.append(message)

    def close(self) -> None:
        """Nothing is open."""


class OnRecord:
    """A coordinator's records, and what goes out to its daemons."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.db = RunDb(directory, create=True)
        loop = Loop()
        loop.transport.close()
        loop.transport = self.sent = Sent()  # type: ignore[assignment]
        self.writer = records.RunRecords(directory, self.db, loop)
        self._performers = loop._performers
        self.posted = loop._posted

    def close(self) -> None:
        self.writer._terms_file.close()
        self.db.close()

    def do(self, *effects: Effect) -> list[m.Message]:
        """Perform these; returns what went out."""
        before = len(self.sent.messages)
        for effect in effects:
            self._performers[type(effect)](effect)
        return self.sent.messages[before:]

    def found(self) -> tuple[dict[str, int], Any]:
        """What the next coordinator would find, did this one die now: the terms in their file, and
        the term of worker-0 that is remembered.
        """
        issued, _ = in_lines(OnDisk(self.directory).read())
        with closing(RunDb(self.directory, readonly=True)) as reader:
            return issued, reader.memory().get("daemon/worker-0", {}).get("term")


def registered(term: int) -> list[Effect]:
    """What follows when worker-0 registers, but for its Welcome."""
    value = {"term": term, "registered": True}
    return [j.Remember("daemon/worker-0", value), j.IssueTerm("worker-0", term)]


WELCOME = Send(b"worker-0", m.Welcome("worker-0", 0, 5, b"token", {}))
OTHER = Send(b"worker-1", m.Heard())


def at_each_statement(db: RunDb, look: Callable[[str], None]) -> None:
    """Call `look` with each SQL statement, just before it is run."""
    db._db.set_trace_callback(look)


def test_no_term_is_sent_that_cannot_be_put_on_record(tmp_path, caplog):
    """The worker asks again; when there is room, it gets the same term. The others train on."""
    first = OnRecord(tmp_path)
    first.do(*registered(4), WELCOME)
    first.writer._retry_at = 0.0
    with files_cannot_grow(tmp_path / terms.FILE):
        assert first.do(*registered(5), WELCOME, OTHER) == [OTHER.message]
        assert first.found() == ({"worker-0": 4}, 4)
        assert os.strerror(errno.EFBIG) in caplog.text
        assert first.posted[-1] == Unwritten("File too large")
    first.writer._retry_at = 0.0
    assert first.do(WELCOME) == [WELCOME.message]
    assert first.found() == ({"worker-0": 5}, 5)
    assert first.posted[-1] == Unwritten("")
    first.close()


def test_no_term_is_sent_while_the_database_is_full(tmp_path, caplog):
    """Or the next coordinator would not know the process that has it."""
    coordinator = OnRecord(tmp_path)
    fill(coordinator.db)
    assert coordinator.do(LARGE, *registered(5), WELCOME, OTHER) == [OTHER.message]
    assert "database or disk is full; training continues" in caplog.text
    assert coordinator.found() == ({"worker-0": 5}, None)
    free_space(coordinator.db)
    coordinator.writer._retry_at = 0.0
    assert coordinator.do(WELCOME) == [WELCOME.message]
    assert coordinator.found() == ({"worker-0": 5}, 5)
    coordinator.close()


def test_whenever_it_dies_no_term_is_remembered_that_is_not_on_record(tmp_path):
    """Or the next coordinator gives it to a second worker, whose first pushes count as done."""
    coordinator = OnRecord(tmp_path)
    coordinator.do(*registered(4))
    coordinator.writer.commit()
    found = []
    at_each_statement(coordinator.db, lambda _: found.append(coordinator.found()))
    assert coordinator.do(*registered(5), WELCOME) == [WELCOME.message]
    found.append(coordinator.found())
    assert {issued["worker-0"] for issued, _ in found} == {5}, "it comes first"
    assert sorted({remembered for _, remembered in found}) == [4, 5]
    coordinator.close()


def test_a_term_that_may_not_be_on_the_disk_yet_is_handed_out_by_nobody(
    tmp_path, caplog, monkeypatch
):
    """Nor by the next coordinator, which finds it in the file."""
    first = OnRecord(tmp_path)
    first.do(*registered(4), OTHER)
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "fsync", fails)
        assert first.do(*registered(5), WELCOME, OTHER) == [OTHER.message]
        assert caplog.text.count(os.strerror(errno.EIO)) == 1
        second = OnRecord(tmp_path)
        assert second.do(WELCOME, OTHER) == [OTHER.message]
    second.writer._retry_at = 0.0
    assert second.do(WELCOME) == [WELCOME.message]
    assert second.found()[0] == {"worker-0": 5}
    second.close()
    first.close()


def fails(_: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


@contextmanager
def files_cannot_grow(*files: Path) -> Iterator[None]:
    """Nothing can be added to the largest of these."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(file.stat().st_size for file in files)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_fails_at_syncs(coordinator: OnRecord, trouble: ExitStack) -> None:
    """From the first attempt to have rows on the disk, until `trouble` is closed."""

    def look(statement: str) -> None:
        if statement == "PRAGMA synchronous=FULL" or "wal_checkpoint" in statement:
            trouble.enter_context(files_cannot_grow(coordinator.directory / "run.db-wal"))

    at_each_statement(coordinator.db, look)


def test_a_disk_that_fails_when_a_served_shard_is_noted_is_tried_again(tmp_path, caplog):
    coordinator = OnRecord(tmp_path)
    coordinator.do(*registered(5), WELCOME)
    serves = j.Remember("daemon/server-0", {"has_served": True})
    with ExitStack() as trouble:
        disk_fails_at_syncs(coordinator, trouble)
        for _ in range(3):
            coordinator.writer._retry_at = 0.0
            assert coordinator.do(serves, OTHER) == [OTHER.message]
    assert caplog.text.count("training continues") == 1
    synced: list[str] = []
    at_each_statement(coordinator.db, synced.append)
    coordinator.writer._retry_at = 0.0
    coordinator.writer.commit()
    assert "PRAGMA synchronous=FULL" in synced
    assert "can be written again" in caplog.text
    synced.clear()
    coordinator.do(serves, OTHER)
    assert "PRAGMA synchronous=FULL" not in synced
    coordinator.close()


def test_who_reads_the_database_does_not_keep_it_from_the_disk(tmp_path):
    """A checkpoint of SQLite's log leaves out what came after the oldest reader began."""
    with closing(RunDb(tmp_path, create=True)) as db, closing(RunDb(tmp_path)) as reader:
        reader._db.execute("BEGIN")
        reader.run()
        db.put_run(state="running")
        db.commit()
        before = (tmp_path / "run.db-wal").stat().st_size
        db.sync()
        assert (tmp_path / "run.db-wal").stat().st_size > before


def test_a_coordinator_that_leaves_waits_for_its_terms_to_be_put_on_record(tmp_path, monkeypatch):
    coordinator, other = OnRecord(tmp_path), RunDb(tmp_path)
    coordinator.db._db.execute("PRAGMA busy_timeout = 0")
    other.put_run(state="running")
    assert coordinator.do(j.IssueTerm("worker-0", 5), WELCOME) == []
    monkeypatch.setattr(records.time, "sleep", lambda _: other.commit())
    coordinator.writer.finish(None)
    assert coordinator.found()[0] == {"worker-0": 5}
    coordinator.close()
    other.close()
