"""`durability = "disk"`: what was acknowledged is on the disk, whatever else is gone."""

import errno
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest
from kept_states import Killed, adagrad, dense, snapshot, sparse, spec_of

from daemons.server import disklog
from daemons.server.disklog import DiskLog
from dlctl.errors import DlctlError
from dlctl.job.config import Servers
from dlctl.runs import kept_shards
from dlctl.shards import journal_format
from dlctl.shards.base import Extras, Shard
from dlctl.shards.errors import NoRoom, StateHeld, Unusable
from dlctl.shards.journaled import Journaled
from dlctl.shards.log import perform_first

SIZE = 40
SPEC = spec_of(adagrad(), SIZE, averaged=2)


def begun(directory, point=lambda name: None):
    """A shard with values, kept in `directory`."""
    shard = Shard(adagrad(), DiskLog([directory], point).create(SPEC))
    extras = Extras(np.array([1.0, 2.0]))
    shard.storage.fill({"w": np.ones(SIZE, np.float32)}, extras)
    shard.commit({"initialised": True, "commits": 0, "deliveries": []})
    return shard


def deltas(count):
    """Dense and sparse updates in turn."""
    return [dense(i, SIZE) if i % 2 else sparse(i, SIZE, 5) for i in range(count)]


def train(shard, updates, begin_with=1):
    """A commit for each update; the snapshots after each."""
    taken = []
    for number, delta in enumerate(updates, begin_with):
        shard.apply(delta)
        shard.commit({"initialised": True, "commits": number, "deliveries": [[0, 1, number]]})
        taken.append(snapshot(shard))
    return taken


def found(directory):
    """(what a server finds that has only what is on the disk, the meta of its last commit)"""
    shard = Shard(adagrad(), DiskLog([directory], lambda name: None).reopen(SPEC))
    try:
        return shard, shard.resume()
    except Unusable:
        free(shard)
        raise


def free(shard):
    """As when the process has ended: its lock is gone."""
    shard.storage._log.close()


@pytest.fixture(autouse=True)
def _long_journals(monkeypatch):
    monkeypatch.setattr(Journaled, "_journal_bytes_max", lambda self: 10**6)


@pytest.fixture
def short_journals(monkeypatch):
    monkeypatch.setattr(Journaled, "_journal_bytes_max", lambda self: 600)


def test_another_server_makes_the_same_updates_again_to_the_last_bit(tmp_path):
    first = begun(tmp_path / "state")
    first.lr = 0.25
    wanted = train(first, deltas(3))[-1]
    free(first)
    second, meta = found(tmp_path / "state")
    assert (snapshot(second), meta["commits"]) == (wanted, 3)
    assert second.storage.extras.averaged.tolist() == [1, 2]
    wanted = train(second, deltas(4), begin_with=4)[-1]
    free(second)
    assert snapshot(found(tmp_path / "state")[0]) == wanted


def test_the_disk_never_holds_much_more_than_the_state(tmp_path, short_journals):
    shard = begun(tmp_path / "state")
    for _ in range(5):
        train(shard, deltas(6))
        names = sorted(path.name.partition("-0000")[0] for path in (tmp_path / "state").iterdir())
        assert names == ["shard-0.base", "shard-0.journal", "shard-0.lock"]
        (journal,) = (tmp_path / "state").glob("*.journal-*")
        assert journal.stat().st_size <= 600 + 400


@pytest.mark.parametrize("together", [1, 4])
def test_a_power_loss_at_any_moment_finds_what_was_acknowledged(
    tmp_path, monkeypatch, short_journals, together
):
    """Before and after each sync the files are copied: no later write is in a copy. Their names are
    those of when the directory was synced last, with what has been removed since, and without.
    """
    state, durable, copies = tmp_path / "state", tmp_path / "durable", []
    durable.mkdir()

    def copy():
        for without_removed in (False, True):
            copies.append(tmp_path / f"copy-{len(copies)}")
            copies[-1].mkdir()
            for path in durable.iterdir():
                if not without_removed or (state / path.name).exists():
                    shutil.copy(path, copies[-1])

    def keep_names():
        shutil.rmtree(durable)
        durable.mkdir()
        for path in state.iterdir():
            if path.suffix != ".lock":
                os.link(path, durable / path.name)

    def synced(descriptor, real):
        copy()
        real(descriptor)
        if state.exists() and os.path.samestat(os.fstat(descriptor), state.stat()):
            keep_names()
        copy()

    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda descriptor, real=real: synced(descriptor, real))
    shard = begun(tmp_path / "state")
    acknowledged, states_by_number = {len(copies): 0}, {0: snapshot(shard)}
    for first in range(0, 12, together):
        writes = []
        for number, delta in list(enumerate(deltas(12), 1))[first : first + together]:
            shard.apply(delta)
            writes.append(shard.record({"initialised": True, "commits": number, "deliveries": []}))
            states_by_number[number] = snapshot(shard)
        while writes:
            count = perform_first(writes)
            acknowledged[len(copies)] = max(acknowledged.values()) + count
            del writes[:count]
    monkeypatch.undo()
    for index, directory in enumerate(copies):
        done = max((n for at, n in acknowledged.items() if at <= index + 1), default=None)
        if done is None:
            continue  # Nobody was told yet that there is anything.
        again, meta = found(directory)
        assert done <= meta["commits"] <= done + together
        assert snapshot(again) == states_by_number[meta["commits"]]


def test_a_journal_that_was_cut_anywhere_goes_to_its_last_whole_record(tmp_path):
    shard = begun(tmp_path / "state")
    ends, taken = [0], [snapshot(shard)]
    (journal,) = (tmp_path / "state").glob("*.journal-*")
    for number, delta in enumerate(deltas(3), 1):
        taken += train(shard, [delta], begin_with=number)
        ends.append(journal.stat().st_size)
    whole = journal.read_bytes()
    free(shard)
    for length in range(0, len(whole), 7):
        for rest in (b"", b"\xff" * 30):
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "state", copy)
            (copy / journal.name).write_bytes(whole[:length] + rest)
            again, _ = found(copy)
            last = max(i for i, end in enumerate(ends) if end <= length)
            assert snapshot(again) == taken[last]
            wanted = train(again, deltas(1), begin_with=last + 1)[-1]
            free(again)
            third, meta = found(copy)
            assert (snapshot(third), meta["commits"]) == (wanted, last + 1)
            free(third)
            shutil.rmtree(copy)


def test_damage_before_the_end_of_a_journal_is_named_and_not_passed_over(tmp_path):
    run = tmp_path / "run-1"
    shard = begun(run / "state")
    train(shard, deltas(2))
    free(shard)
    (journal,) = (run / "state").glob("*.journal-*")
    whole = journal.read_bytes()
    _, second_at = journal_format.read(whole)
    for at in range(0, second_at, 11):
        journal.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(Unusable, match="byte 0") as caught:
            found(run / "state")
        assert caught.value.where == str(run / "state")
        (kept,) = kept_shards.kept(run, Servers(durability="disk"))
        assert "byte 0" in kept.problem


def test_who_looks_while_the_journal_begins_anew_is_told_to_look_again(
    tmp_path, monkeypatch, short_journals
):
    """Between its base and its journal: what it has is of before, and what came since is gone."""
    run = tmp_path / "run-1"
    shard = begun(run / "state")
    read = journal_format.read

    def read_while_it_goes_on(data, *at):
        found = read(data, *at)
        if not at:  # the base
            train(shard, deltas(6))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(kept_shards.journal_format, "read", read_while_it_goes_on)
        (kept,) = kept_shards.kept(run, Servers(durability="disk"))
        assert (kept.in_use, kept.problem) == (True, "a server is writing it")
    (kept,) = kept_shards.kept(run, Servers(durability="disk"))
    assert (kept.problem, kept.version) == ("", shard.version)
    free(shard)


def test_a_damaged_base_with_a_journal_is_not_passed_over_for_the_one_before(
    tmp_path, monkeypatch, short_journals
):
    """A power loss may bring back what was removed last."""
    state = tmp_path / "state"
    shard = begun(state)
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    taken = train(shard, deltas(7))
    free(shard)
    (base,), (journal,) = state.glob("*.base-*"), state.glob("*.journal-*")
    assert base.name not in before
    for name, content in before.items():
        (state / name).write_bytes(content)
    again, _ = found(state)
    assert snapshot(again) == taken[-1]
    free(again)
    for path in state.glob("shard-0.*-*"):
        path.unlink()
    for name, content in before.items():
        (state / name).write_bytes(content)
    base.write_bytes(b"damaged")
    journal.write_bytes(b"records")
    with pytest.raises(Unusable, match="journal"):
        found(state)
    with pytest.raises(Unusable):
        DiskLog([state], lambda name: None).create(SPEC)


def test_a_base_of_somebody_else_s_making_is_named(tmp_path):
    run = tmp_path / "run-1"
    (run / "state").mkdir(parents=True)
    base = run / "state" / "shard-0.base-000000000000"
    for body in (
        {},
        {"run_id": run.name, "shard": 0},
        {"run_id": run.name, "shard": 0, "state": 7},
    ):
        base.write_bytes(b"".join(journal_format.pack(0, body, [])))
        (kept,) = kept_shards.kept(run, Servers(durability="disk"))
        assert kept.problem in (
            "it is of shard None of run None",
            "the committed state has an unknown format",
        )


def test_a_server_that_comes_again_does_not_keep_the_bytes_of_its_base(tmp_path):
    shard = begun(tmp_path / "state")
    free(shard)
    again, _ = found(tmp_path / "state")
    extras = again.storage.extras
    assert extras.averaged.tolist() == [1, 2]
    assert extras.averaged.base is None
    free(again)


def test_a_log_that_was_closed_in_order_is_checked_to_its_last_commit(tmp_path):
    shard = begun(tmp_path / "state")
    wanted = train(shard, deltas(2))[-1]
    (journal,) = (tmp_path / "state").glob("*.journal-*")
    committed = journal.stat().st_size
    shard.storage.close()
    free(shard)
    whole = journal.read_bytes()
    for at in range(0, committed, 5):
        journal.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(Unusable, match="byte"):
            found(tmp_path / "state")
    # What is behind it nobody was told of.
    journal.write_bytes(whole[:committed])
    again, meta = found(tmp_path / "state")
    assert (snapshot(again), meta["commits"]) == (wanted, 2)


def test_after_a_crash_damage_of_the_very_last_record_is_taken_for_a_write_that_was_cut(tmp_path):
    """The one thing that nobody can tell: the text of the promises says so."""
    shard = begun(tmp_path / "state")
    taken = train(shard, deltas(2))
    free(shard)
    (journal,) = (tmp_path / "state").glob("*.journal-*")
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    again, meta = found(tmp_path / "state")
    assert (snapshot(again), meta["commits"]) == (taken[0], 1)


def test_an_error_of_the_disk_does_not_spoil_an_end_in_order(tmp_path, monkeypatch):
    shard = begun(tmp_path / "state")
    wanted = train(shard, deltas(2))[-1]

    def no_space(fd, parts):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(disklog.os, "write", no_space)
        shard.storage.close()
    free(shard)
    assert snapshot(found(tmp_path / "state")[0]) == wanted


def test_who_opens_a_log_writes_all_of_it_to_files_that_no_error_has_touched(tmp_path, monkeypatch):
    """After a failed fsync the old file may say that it is on the disk, and not be."""
    shard = begun(tmp_path / "state")
    train(shard, deltas(2))

    def fails(fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(disklog.os, "fdatasync", fails)
        with pytest.raises(DlctlError, match="journal"):
            train(shard, deltas(1), begin_with=3)
    free(shard)
    before = {path.name for path in (tmp_path / "state").iterdir()}
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        disklog.os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), real(fd))
    )
    again, meta = found(tmp_path / "state")
    assert meta["commits"] == 3, "it may be there or not; nobody was told of it"
    after = {path.name: path.stat().st_ino for path in (tmp_path / "state").iterdir()}
    assert before & set(after) == {"shard-0.lock"}
    assert {after[name] for name in set(after) - before} <= set(synced)
    wanted = snapshot(again)
    free(again)
    for journal in (tmp_path / "state").glob("*.journal-*"):
        assert journal.stat().st_size == 0
    assert snapshot(found(tmp_path / "state")[0]) == wanted


@pytest.mark.parametrize("journals", ["long", "short"])
def test_a_new_log_never_replaces_one_with_updates_of_the_same_run(tmp_path, monkeypatch, journals):
    """The coordinator may have lost its newest notes, and believe that nobody has served yet."""
    if journals == "short":
        monkeypatch.setattr(Journaled, "_journal_bytes_max", lambda self: 0)
    shard = begun(tmp_path / "state")
    wanted = train(shard, deltas(2))[-1]
    free(shard)
    for _ in range(3):
        logs = DiskLog([tmp_path / "state"], lambda name: None)
        with pytest.raises(Unusable) as caught:
            logs.create(SPEC)
        assert "dlctl recover" in caught.value.hint
        logs.close()
        again, meta = found(tmp_path / "state")
        assert (snapshot(again), meta["commits"]) == (wanted, 2)
        free(again)


def test_not_even_a_damaged_log_is_replaced_if_there_were_updates_in_it(tmp_path):
    shard = begun(tmp_path / "state")
    train(shard, deltas(2))
    free(shard)
    (journal,) = (tmp_path / "state").glob("*.journal-*")
    damaged = bytearray(journal.read_bytes())
    damaged[50] ^= 1
    journal.write_bytes(damaged)
    with pytest.raises(Unusable):
        DiskLog([tmp_path / "state"], lambda name: None).create(SPEC)
    assert journal.read_bytes() == damaged


def test_a_log_with_first_values_only_or_of_another_run_is_replaced(tmp_path):
    """A server may die while it takes its values from a checkpoint; the next one does it again."""
    for _ in range(2):
        free(begun(tmp_path / "state"))
    shard = begun(tmp_path / "state")
    train(shard, deltas(2))
    free(shard)
    logs = DiskLog([tmp_path / "state"], lambda name: None)
    other = spec_of(adagrad(), SIZE, averaged=2, run_id="another run")
    assert not logs.create(other).w.any()


def test_a_base_that_is_damaged_is_never_used(tmp_path):
    shard = begun(tmp_path / "state")
    free(shard)
    (base,) = (tmp_path / "state").glob("*.base-*")
    whole = base.read_bytes()
    for at in range(0, len(whole), 13):
        base.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(Unusable, match="base 1 "):
            found(tmp_path / "state")
    base.unlink()
    with pytest.raises(Unusable, match="shard 0 "):
        found(tmp_path / "state")


@pytest.mark.parametrize("name", ["commit begun", "record written", "base written"])
def test_a_kill_between_two_writes_leaves_a_commit_or_the_next(tmp_path, short_journals, name):
    for at in range(1, 4):
        directory = tmp_path / f"state-{at}"
        left = [None]

        def point(passed, left=left):
            if left[0] is not None and passed == name:
                left[0] -= 1
                if left[0] == 0:
                    raise Killed(passed)

        shard = begun(directory, point)
        left[0] = at
        taken = [snapshot(shard)]
        with suppress(Killed):
            for number, delta in enumerate(deltas(20), 1):
                taken += train(shard, [delta], begin_with=number)
        done = len(taken) - 1
        assert done < 20, "it was not killed"
        free(shard)
        again, meta = found(directory)
        assert meta["commits"] == done + (name != "commit begun")
        if name == "commit begun":
            assert snapshot(again) == taken[done]


def test_an_error_of_the_disk_ends_the_server_with_the_file_and_the_way_on(tmp_path, monkeypatch):
    shard = begun(tmp_path / "state")

    def no_space(fd, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disklog.os, "write", no_space)
    with pytest.raises(DlctlError, match=os.strerror(errno.ENOSPC)) as caught:
        train(shard, deltas(1))
    assert "journal-0" in caught.value.where
    assert "state_dir" in caught.value.hint


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room_for_a_base(real):
    return lambda path, parts: no_room() if "base-" in path.name else real(path, parts)


def train_until_it_fails(shard, updates, taken):
    """Snapshots of what was committed go to `taken`; returns the error of what was not."""
    try:
        for number, delta in enumerate(updates, 1):
            taken += train(shard, [delta], begin_with=number)
    except DlctlError as error:
        return error
    raise AssertionError("all of it could be written")


def test_without_room_for_a_base_the_journal_grows_on(tmp_path, monkeypatch, short_journals):
    shard, updates = begun(tmp_path / "state"), deltas(40)
    with monkeypatch.context() as full:
        full.setattr(disklog, "_create", no_room_for_a_base(disklog._create))
        wanted = train(shard, updates[:20])[-1]
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert len(names) == 3, f"a lock, a base and its journal, and nothing that was begun: {names}"
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    assert snapshot(found(tmp_path / "copy")[0]) == wanted
    before = shard.storage._log.bases()
    train(shard, updates[20:], begin_with=21)
    assert shard.storage._log.bases() > before, "there was room, and it began anew"
    free(shard)


def test_nothing_is_acknowledged_behind_a_base_that_may_have_its_name_or_not(
    tmp_path, monkeypatch, short_journals
):
    """The name of a new base is there, and that it would stay there could not be made sure of: who
    comes next begins with it. Records behind the base of before would be lost.
    """
    shard, updates, taken = begun(tmp_path / "state"), deltas(40), []
    monkeypatch.setattr(disklog, "sync_directory", no_room)
    error = train_until_it_fails(shard, updates, taken)
    assert "journal" in error.message
    monkeypatch.undo()
    monkeypatch.setattr(Journaled, "_journal_bytes_max", lambda self: 10**6)
    assert len(taken) > 2
    free(shard)
    again, meta = found(tmp_path / "state")
    assert meta["commits"] >= len(taken)
    assert again.version == meta["commits"]


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "a quota, which nobody sees"])
def test_who_finds_no_room_may_try_again_until_there_is_some(tmp_path, monkeypatch, is_seen):
    """It has the lock of its own attempt before, and must not wait for itself."""
    first = begun(tmp_path / "state")
    wanted = train(first, deltas(3))[-1]
    free(first)
    logs = DiskLog([tmp_path / "state"], lambda name: None)

    def attempt():
        shard = Shard(adagrad(), logs.reopen(SPEC))
        shard.resume()
        return shard

    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        if is_seen:
            full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        else:
            full.setattr(disklog, "_create", no_room_for_a_base(disklog._create))
        for _ in range(3):
            with pytest.raises(NoRoom, match=os.strerror(errno.ENOSPC)):
                attempt()
    assert snapshot(attempt()) == wanted


def test_what_a_dead_server_has_not_finished_takes_no_room_from_the_next_one(tmp_path):
    first = begun(tmp_path / "state")
    wanted = train(first, deltas(3))[-1]
    free(first)
    unfinished = tmp_path / "state" / "shard-0.base-000000000007.tmp"
    of_another = unfinished.with_name("shard-1.base-000000000007.tmp")
    for path in (unfinished, of_another):
        path.write_bytes(b"half of a base")
    log = DiskLog([tmp_path / "state"], lambda name: None)
    log.open(SPEC)
    assert not unfinished.exists()
    assert of_another.exists()
    log.close()
    of_another.unlink()
    assert snapshot(found(tmp_path / "state")[0]) == wanted


def test_a_directory_that_is_gone_when_a_base_is_due_is_named(tmp_path):
    log = DiskLog([tmp_path / "state"], lambda name: None)
    log.open(SPEC)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(DlctlError, match=os.strerror(errno.ENOENT)) as caught:
        log.begin(1, [b"base"])
    assert caught.value.where == str(tmp_path / "state")
    log.close()


def test_short_writes_are_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(disklog.os, "write", lambda fd, data: real(fd, data[:7]))
    shard = begun(tmp_path / "state")
    wanted = train(shard, deltas(3))[-1]
    free(shard)
    assert snapshot(found(tmp_path / "state")[0]) == wanted


def test_two_servers_never_have_the_same_log(tmp_path, monkeypatch):
    shard = begun(tmp_path / "run-1" / "state")
    monkeypatch.setattr("daemons.server.files.LOCK_S", 0.1)
    with pytest.raises(StateHeld, match=str(os.getpid())):
        DiskLog([tmp_path / "run-1" / "state"], lambda name: None).open(SPEC)
    (kept,) = kept_shards.kept(tmp_path / "run-1", Servers(durability="disk"))
    assert (kept.in_use, kept.problem, kept.version) == (True, "", 0)
    free(shard)


def test_what_a_dead_server_has_left_is_removed_and_what_a_living_one_has_stays(tmp_path):
    shard = begun(tmp_path / "run-1" / "state")
    assert kept_shards.remove(tmp_path / "run-1", Servers(durability="disk")) == []
    free(shard)
    assert len(kept_shards.remove(tmp_path / "run-1", Servers(durability="disk"))) == 3
    assert not (tmp_path / "run-1" / "state").exists()


def test_a_log_is_removed_without_a_trace(tmp_path):
    logs = DiskLog([tmp_path / "state"], lambda name: None)
    Shard(adagrad(), logs.create(SPEC)).commit({})
    logs.discard()
    assert not (tmp_path / "state").exists()
