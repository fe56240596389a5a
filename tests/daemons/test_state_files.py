"""The mapped file of a shard, with real processes, locks and file systems."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from kept_states import adagrad, dense, sparse, spec_of

from daemons.server import failpoint, statefile
from daemons.server import files as locked_files
from daemons.server.files import NEW, failure, open_locked, own_directory
from daemons.server.statefile import StateFile
from daemons.server.storages import choose_storages
from dlctl.errors import DlctlError, UsageError
from dlctl.job.config import Servers
from dlctl.runs import kept_shards
from dlctl.shards import image
from dlctl.shards.base import Shard, no_point
from dlctl.shards.errors import NoRoom, StateHeld, Unusable
from dlctl.shards.journaled import Journaled
from dlctl.shards.memory import ArraysInMemory

SIZE = 1000
SPEC = spec_of(adagrad(), SIZE)
ROOT = Path(__file__).parent.parent.parent
META = {"initialised": True, "deliveries": [[0, 1, 7]]}


def state_file(*places):
    return StateFile([Path(place) for place in places], no_point)


def begun(*places):
    """A shard with values and nothing more, in the first of `places` that has room."""
    shard = Shard(adagrad(), (files := state_file(*places)).create(SPEC))
    shard.storage.fill({"w": np.ones(SIZE, np.float32)}, None)
    shard.commit({"initialised": True, "deliveries": []})
    return files, shard


def made(*places):
    """The same with an update."""
    files, shard = begun(*places)
    shard.apply(dense(1, SIZE))
    shard.commit(META)
    return files, shard


def free(files):
    files._close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("daemons.server.files.LOCK_S", 0.2)


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run-1"
    directory.mkdir()
    return directory


# ---------------------------------------------------------------- where it is


def test_shared_memory_comes_first_and_the_job_may_say_otherwise(run, tmp_path):
    shm = Path(f"/dev/shm/dlctl-{os.getuid()}/run-1")
    assert kept_shards.places(run, Servers()) == [shm, run / "state"]
    assert kept_shards.places(run, Servers(durability="disk")) == [run / "state"]
    elsewhere = Servers(state_dir=str(tmp_path / "fast"))
    assert kept_shards.places(run, elsewhere) == [tmp_path / "fast" / "run-1"]


def test_each_durability_has_its_storage(run, tmp_path):
    kinds = {}
    for durability in ("none", "disk", "process"):
        servers = Servers(durability=durability, state_dir=str(tmp_path / durability))
        storages = choose_storages(run, servers, no_point)
        kinds[durability] = type(storages.create(SPEC))
        storages.discard()
    assert kinds["none"] is ArraysInMemory
    assert kinds["disk"] is Journaled
    assert kinds["process"].__name__ == "Mapped"


def test_a_place_without_room_is_passed_over_and_an_old_state_is_not_left_in_it(
    run, tmp_path, monkeypatch
):
    free(begun(tmp_path / "a" / "run-1", run / "state")[0])
    assert (tmp_path / "a" / "run-1" / "shard-0.state").exists()
    monkeypatch.setattr(statefile, "MARGIN_BYTES", 2**60)
    files, _ = made(tmp_path / "a" / "run-1", run / "state")
    assert not (tmp_path / "a" / "run-1").exists()
    assert (run / "state" / "shard-0.state").stat().st_mode & 0o777 == 0o600
    assert (run / "state").stat().st_mode & 0o777 == 0o700
    free(files)
    again = state_file(tmp_path / "a" / "run-1", run / "state").reopen(SPEC)
    assert again.w.any()


def test_a_new_state_never_replaces_one_with_updates_of_the_same_run(run, monkeypatch):
    free(made(run / "state")[0])
    path = run / "state" / "shard-0.state"
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(Unusable) as caught:
            state_file(run / "state").create(SPEC)
        assert caught.value.where == str(path)
        assert "dlctl recover --from-checkpoint" in caught.value.hint
        assert path.read_bytes() == before
    files = state_file(run / "state")
    shard = Shard(adagrad(), files.reopen(SPEC))
    assert (shard.resume(), shard.version) == (META, 1)
    shard.commit(META)  # One more commit does not make it look as good as new.
    free(files)
    with pytest.raises(Unusable):
        state_file(run / "state").create(SPEC)
    other = spec_of(adagrad(), SIZE, run_id="run-2")
    free(files := state_file(run / "state"))
    Shard(adagrad(), files.create(other)).apply(dense(1, SIZE))
    free(files)
    state_file(run / "state").create(SPEC)


def test_a_state_of_before_a_reboot_is_replaced_because_nobody_can_go_on_with_it(run, monkeypatch):
    free(made(run / "state")[0])
    monkeypatch.setattr(kept_shards, "boot_id", lambda: "the next boot")
    files = state_file(run / "state")
    assert not files.create(SPEC).w.any()
    free(files)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a file system of 1 MB")
def test_a_full_file_system_is_an_error_with_place_size_and_a_way_on(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        files, spec = state_file(small / "run-1"), spec_of(adagrad(), 10**6)
        with pytest.raises(DlctlError, match=os.strerror(errno.ENOSPC)):
            files.create(spec)
        assert list(small.iterdir()) == [], "nothing is left behind"
        free(made(small / "run-1")[0])
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_link_or_a_foreign_thing_in_the_place_is_refused(run, tmp_path):
    (run / "state").mkdir()
    (tmp_path / "elsewhere").write_bytes(b"x" * 10_000)
    (run / "state" / "shard-0.state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DlctlError, match="link"):
        state_file(run / "state").create(SPEC)
    assert (tmp_path / "elsewhere").read_bytes() == b"x" * 10_000
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(DlctlError, match="link"):
        state_file(tmp_path / "link" / "run-1").create(SPEC)


@pytest.mark.parametrize("what", ["a pipe", "a file with another name", "somebody else's"])
def test_only_a_plain_file_of_ours_is_opened(run, tmp_path, monkeypatch, what):
    path = run / "state" / "shard-0.state"
    path.parent.mkdir(mode=0o700)
    if what == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"x" * 10_000)
    if what == "a file with another name":
        os.link(path, tmp_path / "elsewhere")
    if what == "somebody else's":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    refused = "must be a file of yours, with one name|the state is a FIFO, not a regular file"
    with pytest.raises(DlctlError, match=refused):
        state_file(path.parent).reopen(SPEC)
    assert path.exists()


def test_only_a_directory_of_ours_is_used(run, monkeypatch):
    (run / "state").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(DlctlError, match="yours"):
        state_file(run / "state").create(SPEC)


def test_what_is_above_a_directory_of_ours_need_not_be_readable(run, monkeypatch):
    """As /home is for many users: its names cannot be synced, and need not be."""

    def refuse(directory):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))

    own_directory(run / "state")
    monkeypatch.setattr(locked_files, "sync_directory", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    own_directory(run / "state")
    with pytest.raises(DlctlError, match=os.strerror(errno.EACCES)):
        own_directory(run / "other")


# ---------------------------------------------------------------- opening it again


def test_what_is_missing_or_of_before_a_reboot_is_said_with_the_place(run, monkeypatch):
    with pytest.raises(Unusable, match="shard 0 ") as caught:
        state_file(run / "state").reopen(SPEC)
    assert caught.value.where == str(run / "state" / "shard-0.state")
    free(made(run / "state")[0])
    monkeypatch.setattr(kept_shards, "boot_id", lambda: "the next boot")
    with pytest.raises(Unusable, match="reboot") as caught:
        state_file(run / "state").reopen(SPEC)
    assert caught.value.hint


def test_an_empty_file_is_no_state(run):
    (run / "state").mkdir(mode=0o700)
    (run / "state" / "shard-0.state").touch(mode=0o600)
    with pytest.raises(Unusable, match="empty"):
        state_file(run / "state").reopen(SPEC)


def test_an_empty_file_does_not_hide_the_state_in_the_other_place(run, tmp_path):
    """A server has moved its state there, and what it had begun in the first place was left."""
    files, shard = made(run / "state")
    version = shard.version
    free(files)
    (tmp_path / "first").mkdir(mode=0o700)
    (tmp_path / "first" / "shard-0.state").touch(mode=0o600)
    again = Shard(adagrad(), state_file(tmp_path / "first", run / "state").reopen(SPEC))
    again.resume()
    assert again.version == version


def test_who_only_looks_at_a_state_that_is_being_made_does_not_keep_it_from_being_made(tmp_path):
    """A reader may have its lock in just the moment between the making and the locking."""
    path, readers = tmp_path / "shard-0.state", []
    opens = os.open

    def opened_by_a_reader_too(*arguments, **more):
        descriptor = opens(*arguments, **more)
        readers.append(opens(path, os.O_RDONLY))
        fcntl.flock(readers[-1], fcntl.LOCK_SH)
        threading.Timer(0.1, os.close, readers).start()
        return descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened_by_a_reader_too)
        descriptor = open_locked(path, NEW)
    other = opens(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(other)
    os.close(descriptor)


def test_a_state_that_somebody_else_keeps_locked_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr("daemons.server.files.LOCK_S", 0.1)
    path, opens, others = tmp_path / "shard-0.state", os.open, []

    def locked_by_another(*arguments, **more):
        descriptor = opens(*arguments, **more)
        others.append(opens(path, os.O_RDONLY))
        fcntl.flock(others[-1], fcntl.LOCK_EX)
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", locked_by_another)
        with pytest.raises(StateHeld):
            open_locked(path, NEW)
    os.close(others[0])


HOLDER = """
    import sys
    from pathlib import Path
    from daemons.server.files import open_locked
    open_locked(Path(sys.argv[1]))
    print("locked", flush=True)
    sys.stdin.read()
"""


def child(script, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_a_file_that_another_process_has_is_waited_for_and_never_taken(run, monkeypatch):
    free(made(run / "state")[0])
    path = run / "state" / "shard-0.state"
    with child(HOLDER, path) as holder:
        assert holder.stdout.readline() == "locked\n"
        for attempt in (state_file(run / "state").reopen, state_file(run / "state").create):
            with pytest.raises(
                StateHeld, match=f"another process has the state open: pid {holder.pid}"
            ):
                attempt(SPEC)
        holder.kill()
    monkeypatch.setattr("daemons.server.files.LOCK_S", 10.0)
    state_file(run / "state").reopen(SPEC)


def test_who_waits_for_a_file_gets_it_when_its_holder_ends(run, monkeypatch):
    monkeypatch.setattr("daemons.server.files.LOCK_S", 10.0)
    free(made(run / "state")[0])
    with child(HOLDER, path := run / "state" / "shard-0.state") as holder:
        holder.stdout.readline()
        threading.Timer(0.2, holder.kill).start()
        Shard(adagrad(), state_file(path.parent).reopen(SPEC)).resume()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_its_holder_removes_in_the_end_is_not_used(run, monkeypatch, is_replaced):
    """Who waited for it has just opened it: it is nobody's state any more."""
    free(made(run / "state")[0])
    path, other = run / "state" / "shard-0.state", run / "other"
    other.write_bytes(b"")
    opens, endings = locked_files._open, iter([True])

    def opened_before_the_end(*arguments):
        descriptor = opens(*arguments)
        if next(endings, False):
            other.replace(path) if is_replaced else path.unlink()
        return descriptor

    monkeypatch.setattr(locked_files, "_open", opened_before_the_end)
    with pytest.raises(Unusable, match="it is empty" if is_replaced else "there is none"):
        state_file(path.parent).reopen(SPEC)


def test_a_file_that_its_holder_has_removed_is_made_again_while_it_lives_on(tmp_path, monkeypatch):
    path, opens = tmp_path / "shard-0.lock", locked_files._open
    held = open_locked(path, os.O_CREAT)
    endings = iter([path.unlink])

    def opened_before_it_is_removed(*arguments):
        descriptor = opens(*arguments)
        next(endings, lambda: None)()
        return descriptor

    monkeypatch.setattr(locked_files, "_open", opened_before_it_is_removed)
    made_again = open_locked(path, os.O_CREAT)
    assert locked_files.is_there(path, made_again)
    os.close(held)
    os.close(made_again)


# ---------------------------------------------------------------- looking at it


def test_what_a_run_has_left_is_listed_with_versions_and_reasons(run):
    for shard in range(3):
        files = state_file(run / "state")
        spec = spec_of(adagrad(), SIZE, shard=shard)
        one = Shard(adagrad(), files.create(spec))
        if shard < 2:
            one.apply(dense(shard, SIZE))
            one.commit(META)
            one.storage.close()
        free(files)
    damaged = run / "state" / "shard-1.state"
    data = bytearray(damaged.read_bytes())
    data[-5000] ^= 1
    damaged.write_bytes(data)
    first, second, third = kept_shards.kept(run, Servers())
    assert (first.shard, first.version, first.deliveries) == (0, 1, [[0, 1, 7]])
    assert (first.initialised, first.problem, first.in_use) == (True, "", False)
    assert second.problem.startswith("its vectors")
    assert third.problem
    assert kept_shards.kept(run.parent / "run-2", Servers()) == []


@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("wrong", [{"samples": 2**62}, {"lr": 1e300}, {"meta": 3}])
def test_who_looks_refuses_what_a_server_would_refuse(run, durability, wrong):
    """Its bytes are those that were written, and their meaning is not one of this version."""
    servers = Servers(durability=durability, state_dir=str(run / "state"))
    storages = choose_storages(run, servers, no_point)
    storage = storages.create(SPEC)
    storage.fill({"w": np.ones(SIZE, np.float32)}, None)
    good = {"version": 0, "samples": 0, "lr": 0.1, "counters": {}, "meta": META}
    if write := storage.commit(good | wrong):
        write.perform()
    free(storages) if durability == "process" else storage._log.close()
    (kept,) = kept_shards.kept(run, servers)
    assert "committed" in kept.problem
    with pytest.raises(Unusable):
        Shard(adagrad(), choose_storages(run, servers, no_point).reopen(SPEC)).resume()


def test_who_looks_refuses_vectors_that_are_not_finite(run):
    files, shard = begun(run / "state")
    shard.storage.w[3] = np.nan
    free(files)
    (kept,) = kept_shards.kept(run, Servers())
    assert '"w"' in kept.problem
    with pytest.raises(Unusable, match="finite"):
        state_file(run / "state").reopen(SPEC)


def test_looking_changes_nothing_and_sees_a_server_at_work(run):
    files, shard = made(run / "state")
    before = (run / "state" / "shard-0.state").read_bytes()
    (kept,) = kept_shards.kept(run, Servers())
    assert (kept.in_use, kept.version) == (True, 1)
    assert (run / "state" / "shard-0.state").read_bytes() == before
    shard.apply(dense(2, SIZE))
    shard.commit(META)
    free(files)


def test_a_server_that_goes_on_while_it_is_looked_at_is_not_said_to_be_damaged(run, monkeypatch):
    """It commits, and begins its next update, between two reads of who looks."""
    files, shard = made(run / "state")
    honest = image.read_commit

    def read_commit(buffer, form, which):
        found = honest(buffer, form, which)
        for _ in range(3):
            shard.apply(sparse(5, SIZE, 10))
            shard.commit(META)
        shard.apply(sparse(6, SIZE, 10))
        return found

    monkeypatch.setattr(image, "read_commit", read_commit)
    (kept,) = kept_shards.kept(run, Servers())
    assert (kept.in_use, kept.problem) == (True, "")
    assert kept.version in range(1, 9), "what it was in the meantime"
    free(files)


def test_what_was_written_over_while_it_was_read_is_looked_at_again(run, monkeypatch):
    """The newest commit is being replaced by one that is not whole yet; the other one is older than
    what was acknowledged before anybody looked."""
    files, shard = made(run / "state")
    honest = image.read_commit

    def newest_is_torn(buffer, form, which):
        commits = [honest(buffer, form, i) for i in (0, 1)]
        newest = max(commit.number for commit in commits if commit is not None)
        found = commits[which]
        return None if found is not None and found.number == newest else found

    with monkeypatch.context() as patch:
        patch.setattr(image, "read_commit", newest_is_torn)
        (kept,) = kept_shards.kept(run, Servers())
        assert (kept.in_use, kept.problem) == (True, "a server is writing it")
    (kept,) = kept_shards.kept(run, Servers())
    assert (kept.problem, kept.version) == ("", shard.version)
    free(files)


def test_what_somebody_else_has_put_in_shared_memory_is_not_in_our_way(run, monkeypatch):
    theirs = run.parent / "dlctl-1000"
    theirs.write_text("no directory")
    monkeypatch.setattr(kept_shards, "shared_memory", lambda: theirs)
    files, _ = made(*kept_shards.places(run, Servers()))
    (kept,) = kept_shards.kept(run, Servers())
    assert (kept.path.parent, kept.problem) == (run / "state", "")
    free(files)
    assert kept_shards.remove(run, Servers()) == [kept.path]
    assert theirs.read_text() == "no directory"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free some space there, or set [servers] state_dir to a directory that"),
        (errno.EIO, "see why with dmesg; findmnt -T /some/where"),
        (errno.EACCES, "ls -ld /some/where"),
    ],
    ids=["full", "broken", "refused"],
)
def test_what_helps_depends_on_what_is_wrong(number, hint):
    error = failure("write the state", Path("/some/where/shard-0"), OSError(number, "so"))
    assert error.hint.startswith(hint)
    assert isinstance(error, NoRoom) == (number == errno.ENOSPC)


def test_the_file_of_a_run_that_is_over_goes_with_its_directory(run):
    one = state_file(run / "state")
    other = state_file(run / "state")
    one.create(SPEC)
    other.create(spec_of(adagrad(), SIZE, shard=1))
    one.discard()
    assert [path.name for path in (run / "state").iterdir()] == ["shard-1.state"]
    other.discard()
    assert not (run / "state").exists()


def test_what_dead_servers_have_left_is_removed_and_what_living_ones_have_stays(run):
    files = state_file(run / "state")
    files.create(SPEC)
    other = state_file(run / "state")
    other.create(spec_of(adagrad(), SIZE, shard=1))
    free(other)
    assert kept_shards.remove(run, Servers()) == [run / "state" / "shard-1.state"]
    free(files)
    assert kept_shards.remove(run, Servers()) == [run / "state" / "shard-0.state"]
    assert not (run / "state").exists()
    assert kept_shards.remove(run, Servers(durability="disk")) == []


# ---------------------------------------------------------------- kill -9

WRITER = """
    import sys
    from pathlib import Path
    sys.path[:0] = [sys.argv[2]]
    from kept_states import adagrad, spec_of
    from daemons.server.statefile import StateFile
    from dlctl.compress.base import Delta
    from dlctl.shards.base import Shard, no_point
    import numpy as np
    size = int(sys.argv[3])
    files = StateFile([Path(sys.argv[1])], no_point)
    shard = Shard(adagrad(), files.reopen(spec_of(adagrad(), size)))
    shard.resume()
    while True:
        number = shard.version + 1
        where = np.arange(number % 7, size, 50) if number % 3 else None
        count = size if where is None else where.size
        shard.apply(Delta(np.full(count, number, np.float32), where))
        shard.commit({"number": number})
        print(number, flush=True)
"""


def expected(size, updates):
    from dlctl.compress.base import Delta
    from dlctl.shards.memory import in_memory

    shard = in_memory(adagrad(), np.zeros(size, np.float32))
    for name, value in shard.optimizer.slots.items():
        shard.slots[name][:] = value
    for number in range(1, updates + 1):
        where = np.arange(number % 7, size, 50) if number % 3 else None
        count = size if where is None else where.size
        shard.apply(Delta(np.full(count, number, np.float32), where))
    return shard


@pytest.mark.long
def test_a_process_that_is_killed_at_any_instant_leaves_what_it_has_said(run):
    """Killed while it works as fast as it can, a few hundred updates of 1 MB on."""
    size = 250_000
    spec = spec_of(adagrad(), size)
    files = state_file(run / "state")
    files.create(spec)
    free(files)
    version = 0
    for kill_after in (1, 2, 7, 20, 33):
        with child(WRITER, run / "state", ROOT / "tests" / "kit", size) as writer:
            versions = [int(writer.stdout.readline()) for _ in range(kill_after)]
            writer.send_signal(signal.SIGKILL)
            versions += [int(line) for line in writer.stdout if line.endswith("\n")]
        files = state_file(run / "state")
        shard = Shard(adagrad(), files.reopen(spec))
        meta = shard.resume()
        assert meta["number"] == shard.version
        assert shard.version in (versions[-1], versions[-1] + 1), (
            "acknowledged and lost, or made up"
        )
        assert versions[0] == version + 1
        version = shard.version
        wanted = expected(size, version)
        assert np.array_equal(shard.w, wanted.w)
        assert np.array_equal(shard.slots["sum"], wanted.slots["sum"])
        free(files)


# ---------------------------------------------------------------- failpoints


def test_a_failpoint_kills_the_process_at_its_count():
    script = """
        import os
        from daemons.server import failpoint
        point = failpoint.from_environment(os.environ)
        for number in range(9):
            print(number, flush=True)
            point("commit written")
            point("commit begun")
    """
    environment = {**os.environ, "DLCTL_FAILPOINT": "commit written:3"}
    with child(script, env=environment) as process:
        output = process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    assert output.splitlines() == ["0", "1", "2"]


def test_without_a_failpoint_nothing_is_done_and_a_wrong_one_is_an_error():
    assert failpoint.from_environment({}) is no_point
    name = "commit written"
    for wrong in (name, ":3", "no such point:1", f"{name}:0", f"{name}:x"):
        with pytest.raises(UsageError, match="NAME:COUNT"):
            failpoint.from_environment({"DLCTL_FAILPOINT": wrong})
