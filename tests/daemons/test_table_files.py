"""The files of a server's tables: each has its own, and none is of use without the others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_states import dense, spec_of

from daemons.server.disklog import DiskLog
from daemons.server.storages import choose_storages
from daemons.server.watching import Watch
from dlctl.errors import DlctlError, TimedOut
from dlctl.job.config import Servers
from dlctl.optim.plain import Add
from dlctl.runs import kept_shards
from dlctl.shards.base import Shard, no_point
from dlctl.shards.errors import Unusable

SIZE, CELLS = 1000, 30
TABLES = ("", "seen", "last_ones")


def spec(table: str, shard: int = 0) -> Any:
    return spec_of(Add(), CELLS if table else SIZE, shard=shard, table=table)


class Tables:
    """One server's shards of three tables, as the server opens them."""

    def __init__(self, run: Path, durability: str, shard: int = 0) -> None:
        self.run, self.shard = run, shard
        self.servers = Servers(durability=durability)  # type: ignore[arg-type]
        self.storages: Any = choose_storages(run, self.servers, no_point)
        self.shards: dict[str, Shard] = {}

    def of(self, table: str) -> Any:
        return self.storages.of_table(table) if table else self.storages

    def create(self) -> Tables:
        for table in TABLES:
            self.shards[table] = Shard(Add(), self.of(table).create(spec(table, self.shard)))
        return self

    def reopen(self) -> Tables:
        for table in TABLES:
            shard = Shard(Add(), self.of(table).reopen(spec(table, self.shard)))
            shard.resume()
            self.shards[table] = shard
        return self

    def begin(self) -> Tables:
        self.create()
        self.shards[""].storage.fill({"w": np.ones(SIZE, np.float32)}, None)
        self.commit()
        return self

    def push(self) -> None:
        for shard in self.shards.values():
            shard.apply(dense(shard.version, shard.size))
        self.commit()

    def commit(self) -> None:
        for table, shard in self.shards.items():
            meta: dict[str, Any] = {"deliveries": [[0, 1, shard.version]]}
            if not table:
                meta |= {"initialised": True, "tables": [*TABLES[1:]]}
            shard.commit(meta)

    def die(self) -> None:
        """As a kill -9 does it: the locks are gone, and nothing else happens."""
        for one in (self.storages, *self.storages._others.values()):
            (one.close if isinstance(one, DiskLog) else one._close)()

    def kept(self) -> kept_shards.KeptShard:
        (found,) = kept_shards.kept(self.run, self.servers)
        return found

    def files(self, table: str) -> list[Path]:
        name = f"shard-{self.shard}-{table}" if table else f"shard-{self.shard}"
        places = kept_shards.places(self.run, self.servers)
        return [path for place in places for path in sorted(place.glob(f"{name}.*"))]


Make = Callable[..., Tables]


@pytest.fixture(params=["process", "disk"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    run = tmp_path / "run-1"
    run.mkdir()
    monkeypatch.setattr(kept_shards, "shared_memory", lambda: tmp_path / "fast")
    monkeypatch.setattr("daemons.server.files.LOCK_S", 0.1)
    made: list[Tables] = []

    def make_one(shard: int = 0) -> Tables:
        made.append(Tables(run, request.param, shard))
        return made[-1]

    yield make_one
    for one in made:
        one.die()


def test_the_tables_of_a_server_are_listed_as_one_state_with_the_version_of_the_parameters(
    make: Make,
) -> None:
    tables = make().begin()
    tables.push()
    assert (tables.kept().in_use, tables.kept().problem) == (True, "")
    tables.die()
    kept = tables.kept()
    assert (kept.shard, kept.in_use, kept.problem, kept.initialised) == (0, False, "", True)
    assert (kept.version, kept.deliveries) == (1, [[0, 1, 1]])
    assert kept.path.name.partition(".")[0] == "shard-0"
    again = make().reopen()
    assert [shard.version for shard in again.shards.values()] == [1, 1, 1]


@pytest.mark.parametrize("table", TABLES[1:])
def test_without_one_of_its_tables_a_state_is_of_no_use(make: Make, table: str) -> None:
    tables = make().begin()
    tables.push()
    tables.die()
    for path in tables.files(table):
        path.unlink()
    assert f'"{table}"' in tables.kept().problem
    with pytest.raises(Unusable):
        make().reopen()


@pytest.mark.parametrize("table", TABLES)
def test_a_damaged_table_is_named(make: Make, table: str) -> None:
    tables = make().begin()
    tables.push()
    tables.die()
    for path in tables.files(table):
        if path.suffix != ".lock":
            data = bytearray(path.read_bytes())
            data[20:30] = b"x" * 10
            path.write_bytes(data)
    problem = tables.kept().problem
    assert "damaged" in problem
    assert problem.startswith(f'its table "{table}" cannot be used: ') == bool(table)


def test_a_file_of_another_table_is_not_taken_for_one_s_own(make: Make) -> None:
    tables = make().begin()
    tables.push()
    tables.die()
    seen, last = tables.files("seen"), tables.files("last_ones")
    for path, other in zip(seen, last, strict=True):
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    assert "seen" in tables.kept().problem
    with pytest.raises(Unusable, match=r"last_ones.*seen"):
        make().reopen()


def test_tables_that_a_server_has_made_before_any_values_are_as_good_as_new(make: Make) -> None:
    tables = make().create()
    tables.die()
    assert tables.kept().problem == kept_shards.NO_VALUES
    make().begin().push()


def test_a_new_state_never_replaces_a_table_with_updates(make: Make) -> None:
    tables = make().begin()
    tables.push()
    tables.die()
    for path in tables.files(""):
        path.unlink()
    with pytest.raises(Unusable):
        make().create()
    assert kept_shards.kept(tables.run, tables.servers)[0].problem, "not all of it is there"


def test_what_is_left_of_other_tables_alone_is_no_state(make: Make) -> None:
    """A server was killed while it removed its files, or somebody else has removed some."""
    tables = make().begin()
    tables.die()
    for path in tables.files(""):
        path.unlink()
    assert kept_shards.kept(tables.run, tables.servers) == []
    assert kept_shards.remove(tables.run, tables.servers)
    assert [tables.files(table) for table in TABLES] == [[], [], []]


def test_at_the_end_of_a_run_the_files_of_all_tables_go_and_no_other_server_s(make: Make) -> None:
    one, other = make(0).begin(), make(1).begin()
    one.storages.discard()
    assert [one.files(table) for table in TABLES] == [[], [], []]
    assert all(other.files(table) for table in TABLES)
    other.storages.discard()
    assert not [p for p in kept_shards.places(one.run, one.servers) if p.exists()]


def test_files_of_tables_that_a_living_server_has_stay(make: Make) -> None:
    living, dead = make(0).begin(), make(1).begin()
    dead.die()
    kept_shards.remove(living.run, living.servers)
    assert [dead.files(table) for table in TABLES] == [[], [], []]
    assert all(living.files(table) for table in TABLES)
    living.push()


def test_all_that_was_removed_is_put_back_at_one_look(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tables = make().begin()
    tables.push()
    watch = Watch(tables.storages, tables.run, lambda: None)
    place = tables.kept().path.parent
    shutil.rmtree(place)
    with caplog.at_level(logging.WARNING, "dlctl"):
        watch()
    assert [text for text in caplog.messages if "was written again" in text]
    tables.push()
    tables.die()
    assert tables.kept().problem == ""
    again = make().reopen()
    for table, shard in again.shards.items():
        assert shard.w.tobytes() == tables.shards[table].w.tobytes(), table


def test_a_table_that_cannot_be_put_back_does_not_keep_the_others_from_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = make().begin()
    watch = Watch(tables.storages, tables.run, lambda: None)
    for table in TABLES:
        for path in tables.files(table):
            path.unlink()

    def fail() -> str:
        raise DlctlError("no room for this one")

    with monkeypatch.context() as patch:
        patch.setattr(tables.of("seen"), "put_back", fail)
        watch()
        watch()
    assert [text for text in caplog.messages if "no room for this one" in text] == [
        "the state of this shard was removed and cannot be restored: no room for this one"
    ]
    assert [bool(tables.files(table)) for table in TABLES] == [True, False, True]
    watch()
    assert all(tables.files(table) for table in TABLES)


def test_commits_that_are_late_are_waited_for_once_and_the_next_look_tries_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop stands still meanwhile: with a wait for each table it would be taken for dead."""
    tables = make().begin()
    waited: list[bool] = []
    is_late = True

    def await_commits() -> None:
        waited.append(is_late)
        if is_late:
            raise TimedOut("commit 7 is not on the disk", where="/kept", hint="dmesg")

    watch = Watch(tables.storages, tables.run, await_commits)
    for table in TABLES:
        for path in tables.files(table):
            path.unlink()
    watch()
    watch()
    (line,) = caplog.messages
    assert "commit 7 is not on the disk (/kept); dmesg" in line
    assert waited == [True, True]
    is_late = False
    watch()
    assert all(tables.files(table) for table in TABLES)
