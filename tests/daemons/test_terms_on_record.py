"""An epoch or generation is given to one process, whatever befalls the coordinator or its disk."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from fulldisk import LARGE, fill, free_space

from daemons.coordinator import records
from daemons.loop import Loop
from dlctl import messages as m
from dlctl.machine import Effect, Send
from dlctl.roles.coordinator import records as j
from dlctl.roles.protocol.effects import Unwritten
from dlctl.runs.database import RunDb


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
        self.writer = records.Records(directory, self.db, loop)
        self._performers = loop._performers

    def do(self, *effects: Effect) -> list[m.Message]:
        """Perform these; returns what went out."""
        before = len(self.sent.messages)
        for effect in effects:
            self._performers[type(effect)](effect)
        return self.sent.messages[before:]

    def found(self) -> tuple[dict[str, int], Any]:
        """What the next coordinator would find, did this one die now: the terms, and the term of
        worker-0 that is remembered."""
        with closing(RunDb(self.directory, readonly=True)) as reader:
            return reader.terms(), reader.memory().get("daemon/worker-0", {}).get("term")


def registered(term: int) -> list[Effect]:
    """What follows when worker-0 registers, but for its Welcome."""
    value = {"term": term, "registered": True}
    return [j.Remember("daemon/worker-0", value), j.IssueTerm("worker-0", term)]


WELCOME = Send(b"worker-0", m.Welcome("worker-0", 0, 5, b"token", {}))
OTHER = Send(b"worker-1", m.Heard())


def at_each_statement(db: RunDb, look: Callable[[str], None]) -> None:
    """Call `look` with each SQL statement, just before it is run."""
    db._db.set_trace_callback(look)


def test_nobody_is_told_of_an_epoch_that_cannot_be_put_on_record(tmp_path, caplog):
    """The worker asks again; when there is room, it gets the same epoch. The others train on."""
    RunDb(tmp_path, create=True).close()
    loop, db = Loop(), RunDb(tmp_path)
    loop.transport.close()
    loop.transport = sent = Sent()  # type: ignore[assignment]
    writer = records.Records(tmp_path, db, loop)
    perform = loop._performers
    fill(db)
    perform[j.AddEvent](LARGE)
    perform[j.IssueTerm](j.IssueTerm("worker-0", 3))
    welcome, other = m.Welcome("worker-0", 0, 3, b"token", {}), m.Heard()
    perform[Send](Send(b"worker-0", welcome))
    perform[Send](Send(b"worker-1", other))
    assert sent.messages == [other]
    assert "database or disk is full; training continues" in caplog.text
    assert [*loop._posted] == [Unwritten("database or disk is full")]
    with closing(RunDb(tmp_path, readonly=True)) as reader:
        assert reader.terms() == {}
        free_space(db)
        writer._retry_at = 0.0
        perform[Send](Send(b"worker-0", welcome))
        assert sent.messages == [other, welcome]
        assert reader.terms() == {"worker-0": 3}
    assert loop._posted[-1] == Unwritten("")
    db.close()


def test_whenever_it_dies_an_epoch_is_remembered_if_and_only_if_it_is_on_record(tmp_path):
    """Or the next coordinator gives it to a second worker, whose first pushes count as done."""
    coordinator = OnRecord(tmp_path)
    coordinator.do(*registered(4))
    coordinator.writer.commit()
    found = []
    at_each_statement(coordinator.db, lambda _: found.append(coordinator.found()))
    assert coordinator.do(*registered(5), WELCOME) == [WELCOME.message]
    found.append(coordinator.found())
    assert sorted({terms["worker-0"] for terms, _ in found}) == [4, 5]
    assert [remembered for _, remembered in found] == [terms["worker-0"] for terms, _ in found]
    coordinator.db.close()


@contextmanager
def files_cannot_grow(directory: Path) -> Iterator[None]:
    """Nothing can be added to the database's log."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (directory / "run.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_fails_at_syncs(coordinator: OnRecord, trouble: ExitStack) -> None:
    """From the first attempt to have something on the disk, until `trouble` is closed."""

    def look(statement: str) -> None:
        if statement == "PRAGMA synchronous=FULL" or "wal_checkpoint" in statement:
            trouble.enter_context(files_cannot_grow(coordinator.directory))

    at_each_statement(coordinator.db, look)


def test_an_epoch_that_may_not_be_on_the_disk_yet_is_handed_out_by_nobody(tmp_path, caplog):
    """Nor by the next coordinator, which finds it on record."""
    first = OnRecord(tmp_path)
    first.do(*registered(4), OTHER)
    with ExitStack() as trouble:
        disk_fails_at_syncs(first, trouble)
        assert first.do(*registered(5), WELCOME, OTHER) == [OTHER.message]
        assert caplog.text.count("disk I/O error; training continues") == 1
        second = OnRecord(tmp_path)
        disk_fails_at_syncs(second, trouble)
        assert second.do(WELCOME, OTHER) == [OTHER.message]
    at_each_statement(second.db, lambda _: None)
    second.writer._retry_at = 0.0
    assert second.do(WELCOME) == [WELCOME.message]
    assert second.found() == ({"worker-0": 5}, 5)
    second.db.close()
    first.db.close()


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
    coordinator.db.close()


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


def test_a_coordinator_that_leaves_waits_for_its_epochs_to_be_put_on_record(tmp_path, monkeypatch):
    coordinator, other = OnRecord(tmp_path), RunDb(tmp_path)
    coordinator.db._db.execute("PRAGMA busy_timeout = 0")
    other.put_run(state="running")
    assert coordinator.do(j.IssueTerm("worker-0", 5), WELCOME) == []
    monkeypatch.setattr(records.time, "sleep", lambda _: other.commit())
    coordinator.writer.finish()
    assert coordinator.found()[0] == {"worker-0": 5}
    coordinator.db.close()
    other.close()
