"""Files on their way between hosts, with real files, sockets and keys."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from manifests import whole

from daemons import log_file
from daemons.files import file_receiver
from daemons.files.arrays import Away, Files, serve_files
from daemons.files.file_receiver import FileReceiver
from daemons.files.file_sender import AT_HOME, ON_HOSTS, FileSender
from daemons.files.log_mirror import Mirrored, sizes
from daemons.loop import Loop
from dlctl.control import keys
from dlctl.errors import DlctlError
from dlctl.launch.base import HOST_FILE
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.records.memory import Memory
from dlctl.roles.agent.agent import Agent
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.remote_files import LogMirror
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import (
    ArraysLoaded,
    ArraysSaved,
    LoadArrays,
    SaveArrays,
)
from dlctl.roles.protocol.files import (
    BYTES_MAX,
    NOT_THERE,
    CheckFile,
    FileSealed,
    FilesMissing,
    SealFile,
    StillReading,
    TakeBytes,
    TakeLog,
    Transfers,
    WantedFile,
)
from dlctl.runs import checkpoints
from dlctl.util.hashing import PIECE_BYTES, sha256_of
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Exit, Received, Send
from dlctl.wire.messages import Register

SHARD = "ckpt/000000000120-3/shard-0.safetensors"
LOG = "logs/worker-0.1.jsonl"
ACKS = "acks/worker-0.1"


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.transport.close()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host directory with what lies in one."""
    directory = tmp_path / "host"
    for file in (SHARD, LOG, ACKS, "task/task.py", "job.json", HOST_FILE, "logs/secret.txt"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(f"content of {file}".encode())
    (tmp_path / "outside").write_text("of nobody's business")
    return directory


def ask(outgoing: FileSender, file: str, part=0, offset=0, nbytes=BYTES_MAX) -> m.FileData:
    return outgoing.answer(m.ReadFile(7, file, part, offset, nbytes))


# ---------------------------------------------------------------- who has a file


def test_what_is_meant_to_travel_is_read_piece_by_piece(loop, host):
    outgoing = FileSender(loop, host, "agent-1", ON_HOSTS)
    for file in (SHARD, LOG, ACKS):
        content = (host / file).read_bytes()
        whole = ask(outgoing, file)
        assert (whole.name, whole.request, whole.error) == ("agent-1", 7, "")
        assert (whole.data, whole.size) == (content, len(content))
        piece = ask(outgoing, file, offset=3, nbytes=4)
        assert (piece.data, piece.offset, piece.size) == (content[3:7], 3, len(content))


@pytest.mark.parametrize(
    "file",
    [
        "", "/", ".", "..", "ckpt", "ckpt/", "job.json", "host.json", "task/task.py", "run.db",
        "key", "logs/secret.txt", "logs/../job.json", "ckpt/../../outside", "../outside",
        "/etc/passwd",
        "ckpt/000000000120-3/../../job.json", "ckpt/000000000120-3/..", "ckpt//000000000120-3/x",
        "ckpt/000000000120-3/.hidden", "ckpt/000000000120-3/a/b", "ckpt/000000000120-3/",
        "logs/worker-0.1.jsonl.1", "logs/worker-0.1.jsonl\0", "logs/worker-0.1.jsonl\n",
        "logs/worker-\u0661.1.jsonl", "logs/client-0.1.jsonl", "acks/worker-0.1/..", "x" * 30_000,
        "ckpt/000000000120-3/" + "x" * 300, "LOGS/worker-0.1.jsonl", "./logs/worker-0.1.jsonl",
    ],
)  # fmt: skip
def test_no_other_name_is_answered_whatever_it_leads_to(loop, host, file):
    answer = ask(FileSender(loop, host, "agent-1", ON_HOSTS), file)
    assert (answer.data, answer.size) == (b"", 0)
    assert answer.error


def test_the_coordinator_shows_checkpoints_and_nothing_else(loop, host):
    outgoing = FileSender(loop, host, COORDINATOR, AT_HOME)
    assert ask(outgoing, SHARD).error == ""
    for file in (LOG, ACKS):
        assert ask(outgoing, file).error
    outgoing.remove(LOG)
    assert (host / LOG).exists()


def linked_file(host: Path) -> None:
    (host / SHARD).unlink()
    (host / SHARD).symlink_to(host / "job.json")


def linked_folder(host: Path) -> None:
    shutil.move(host / "ckpt", host.parent / "elsewhere")
    (host / "ckpt").symlink_to(host.parent / "elsewhere")


def linked_checkpoint(host: Path) -> None:
    directory = (host / SHARD).parent
    shutil.move(directory, host.parent / "elsewhere")
    directory.symlink_to(host.parent / "elsewhere")


def pipe(host: Path) -> None:
    (host / SHARD).unlink()
    os.mkfifo(host / SHARD)


def folder(host: Path) -> None:
    (host / SHARD).unlink()
    (host / SHARD).mkdir()


def nothing(host: Path) -> None:
    (host / SHARD).unlink()


def no_folder(host: Path) -> None:
    shutil.rmtree(host / "ckpt")


@pytest.mark.parametrize(
    ("put", "error"),
    [
        (linked_file, "cannot read it: it is a symbolic link, not a regular file"),
        (linked_folder, "cannot read it: Not a directory"),
        (linked_checkpoint, "cannot read it: Not a directory"),
        (pipe, "cannot read it: it is a FIFO, not a regular file"),
        (folder, "cannot read it: it is a directory, not a regular file"),
        (nothing, NOT_THERE),
        (no_folder, NOT_THERE),
    ],
)
def test_what_is_no_plain_file_is_not_read_and_nobody_waits_for_it(loop, host, put, error):
    put(host)
    outgoing = FileSender(loop, host, "agent-1", ON_HOSTS)
    answer = ask(outgoing, SHARD)
    assert (answer.error, answer.data) == (error, b"")
    outgoing.remove(SHARD)
    assert (host.parent / "outside").exists()
    assert (host / "job.json").exists()
    if put in (linked_folder, linked_checkpoint):
        assert list((host.parent / "elsewhere").rglob("shard-0.safetensors")), "not ours to remove"


@pytest.mark.parametrize("offset", [17, 10**6, 2**63 - 1])
@pytest.mark.parametrize("nbytes", [0, 1, 2**62])
def test_an_offset_beyond_the_end_or_a_huge_size_is_answered_with_what_there_is(
    loop, host, offset, nbytes
):
    (host / SHARD).write_bytes(b"x" * 17)
    answer = ask(FileSender(loop, host, "agent-1", ON_HOSTS), SHARD, offset=offset, nbytes=nbytes)
    assert (answer.error, answer.data, answer.size) == ("", b"", 17)


def test_no_answer_is_larger_than_a_piece_may_be(loop, host):
    (host / SHARD).write_bytes(bytes(3 * BYTES_MAX))
    answer = ask(FileSender(loop, host, "agent-1", ON_HOSTS), SHARD, nbytes=2**62)
    assert len(answer.data) == BYTES_MAX


def test_a_copy_that_was_taken_is_removed_and_its_directory_stays_for_others(loop, host):
    outgoing = FileSender(loop, host, "agent-1", ON_HOSTS)
    outgoing.remove(SHARD)
    outgoing.remove(SHARD)
    assert (host / SHARD).parent.is_dir()
    assert not (host / SHARD).exists()
    outgoing.remove(LOG)
    assert (host / LOG).exists(), "only files of checkpoints"


# ---------------------------------------------------------------- who takes it


def sealed(loop: Loop, run_script, *effects) -> FileSealed:
    (event,) = run_script(loop, *effects, awaited=1)
    assert isinstance(event, FileSealed)
    return event


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_pieces_in_any_order_become_a_file_when_they_are_right(tmp_path, run_script):
    loop, data = Loop(), os.urandom(1000)
    FileReceiver(loop, tmp_path)
    pieces = [TakeBytes(SHARD, at, data[at : at + 300]) for at in (600, 0, 900, 300, 0)]
    before = os.umask(0)
    try:
        event = sealed(loop, run_script, *pieces, SealFile(SHARD, 1000, hashed(data)))
    finally:
        os.umask(before)
    assert event == FileSealed(SHARD, "")
    assert (tmp_path / SHARD).stat().st_mode & 0o777 == 0o644
    assert (tmp_path / SHARD).read_bytes() == data
    assert [path.name for path in (tmp_path / SHARD).parent.iterdir()] == ["shard-0.safetensors"]


def test_a_file_with_one_wrong_byte_or_one_too_few_never_gets_its_name(tmp_path, run_script):
    data = os.urandom(1000)
    wrong = {"cut off": data[:-1], "SHA-256": data[:500] + bytes([data[500] ^ 1]) + data[501:]}
    for words, taken in wrong.items():
        loop = Loop()
        FileReceiver(loop, tmp_path)
        event = sealed(
            loop, run_script, TakeBytes(SHARD, 0, taken), SealFile(SHARD, 1000, hashed(data))
        )  # fmt: skip
        assert words in event.error
        assert list((tmp_path / SHARD).parent.iterdir()) == []


def test_where_there_is_no_room_the_file_fails_in_words_and_nothing_is_left(tmp_path, run_script):
    loop = Loop()
    FileReceiver(loop, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        event = sealed(loop, run_script, TakeBytes(SHARD, 900, bytes(200)), SealFile(SHARD, 9, ""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert event.error == f"cannot write {tmp_path / SHARD}: {os.strerror(errno.EFBIG)}"
    assert list((tmp_path / SHARD).parent.iterdir()) == []


def looked_at(directory: Path, run_script, nbytes: int, sha256: str) -> str:
    loop = Loop()
    FileReceiver(loop, directory)
    return sealed(loop, run_script, CheckFile(SHARD, nbytes, sha256)).error


def test_a_file_that_is_here_is_right_or_said_to_be_wrong(tmp_path, run_script):
    data, path = os.urandom(1000), tmp_path / SHARD
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert looked_at(tmp_path, run_script, 1000, hashed(data)) == ""
    assert "SHA-256" in looked_at(tmp_path, run_script, 1000, hashed(b"another"))
    assert "SHA-256" in looked_at(tmp_path, run_script, 1000, "")
    assert "cut" in looked_at(tmp_path, run_script, 1001, hashed(data))
    assert path.read_bytes() == data
    path.unlink()
    assert looked_at(tmp_path, run_script, 1000, hashed(data)) == f"{path}: missing"
    os.mkfifo(path)
    found = looked_at(tmp_path, run_script, 0, hashed(b""))
    assert [text in found for text in (f"{path}: ", "FIFO")] == [True, True]


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_while_a_file_is_read_the_thread_says_so(tmp_path, run_script, monkeypatch, pieces):
    monkeypatch.setattr(file_receiver, "READING_S", 0.0)
    data = os.urandom(pieces * PIECE_BYTES)
    reads = [StillReading()] * pieces
    loop = Loop()
    FileReceiver(loop, tmp_path)
    taken = TakeBytes(SHARD, 0, data), SealFile(SHARD, len(data), hashed(data))
    assert run_script(loop, *taken, awaited=pieces + 1) == [*reads, FileSealed(SHARD, "")]
    loop = Loop()
    FileReceiver(loop, tmp_path)
    check = CheckFile(SHARD, len(data), hashed(data))
    assert run_script(loop, check, awaited=pieces + 1) == [*reads, FileSealed(SHARD, "")]


def test_of_a_file_that_grows_no_more_is_read_than_it_should_have(tmp_path):
    path = tmp_path / "worker-0.safetensors"
    path.write_bytes(b"x" * (PIECE_BYTES + 1))
    growing = path.open("rb")
    with growing, path.open("ab") as file:

        def grow() -> None:
            file.write(b"x" * PIECE_BYTES)
            file.flush()

        assert sha256_of(growing, PIECE_BYTES + 1, grow) == hashed(b"x" * (PIECE_BYTES + 1))


# ---------------------------------------------------------------- between two processes


class Taker:
    """A coordinator that wants one file of the first agent that registers, and then is done."""

    def __init__(self, wanted: WantedFile) -> None:
        self.context = Context(1.0)
        self.transfers = Transfers(self.context)
        self.wanted = wanted
        self.peer: str | bytes = ""
        self.error: str | None = None

    def handle(self, event, now):
        match event:
            case Received(peer, m.Register(name=name)) if not self.peer:
                self.peer = peer
                self.transfers.fetch(name, self.wanted, self._done, now)
            case Received(_, m.FileData() as data, identity):
                assert identity == "agent-1"
                self.transfers.on_data(data, now)
            case FileSealed():
                self.transfers.on_sealed(event, now)
            case DeadlineReached():
                self.context.do(*self.context.retries.due(now))
        effects = self.context.clear()
        return [Send(self.peer, e.message) if isinstance(e, Send) else e for e in effects]

    def _done(self, error: str, now: float) -> None:
        self.error = error
        self.context.do(Send(self.peer, m.Shutdown("done")), Exit(0, "done"))

    def deadline(self):
        return self.context.retries.deadline()


def fetched(host: Path, home: Path, wanted: WantedFile) -> tuple[str | None, float]:
    """Fetch a file from a real agent over TCP with keys: (error, seconds)."""
    ring = keys.CurveKeys(b"k" * 32)
    giving, taking = Loop(secret=ring.secret("agent-1")), Loop(secret=ring.secret(COORDINATOR))
    address = taking.transport.listen("tcp://127.0.0.1:*")
    taking.transport.admit({ring.public("agent-1"): "agent-1"})
    giving.transport.connect(COORDINATOR, address, ring.public(COORDINATOR))
    FileSender(giving, host, "agent-1", ON_HOSTS)
    FileReceiver(taking, home)
    agent = Agent(Register("run", "agent", "agent-1", 1, os.getpid(), "here", "0"), 1.0)
    taker = Taker(wanted)
    thread = threading.Thread(target=giving.run, args=(agent,))
    thread.start()
    began_at = time.monotonic()
    taking.run(taker)
    took_s = time.monotonic() - began_at
    thread.join(20)
    assert not thread.is_alive()
    return taker.error, took_s


def test_fifty_megabytes_come_whole_over_an_encrypted_connection(tmp_path, host, capsys):
    data = np.random.default_rng(0).bytes(50_000_000)
    (host / SHARD).write_bytes(data)
    began_at = time.monotonic()
    with (host / SHARD).open("rb") as source, (tmp_path / "copy").open("wb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    copy_s = time.monotonic() - began_at
    error, took_s = fetched(host, tmp_path / "home", WantedFile(SHARD, len(data), hashed(data)))
    assert error == ""
    assert (tmp_path / "home" / SHARD).read_bytes() == data
    with capsys.disabled():
        print(f" 50 MB: {50 / took_s:.0f} MB/s, a plain copy {50 / copy_s:.0f} MB/s", end="")


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path, host):
    error, _ = fetched(host, tmp_path / "home", WantedFile("ckpt/000000000999-9/manifest.json"))
    assert error == NOT_THERE
    error, _ = fetched(host, tmp_path / "home", WantedFile("job.json"))
    assert error


# ---------------------------------------------------------------- logs


class Copying:
    """A mirror with its real files on both sides; messages go from one to the other at once."""

    def __init__(self, loop: Loop, host: Path, home: Path) -> None:
        self.members = Membership([HOME_AGENT, "agent-1"], {"worker-0": "agent-1"}, {})
        for daemon in self.members.daemons.values():
            daemon.begin(0.0)
            daemon.registered = True
        self.home, self.loop, self.outgoing = (
            home,
            loop,
            FileSender(loop, host, "agent-1", ON_HOSTS),
        )
        Mirrored(loop, home)
        self.begin()
        self.mirror.follow(self.members.daemons["worker-0"])
        self.now = 0.0

    def begin(self) -> None:
        """Another coordinator."""
        self.context = Context(1.0)
        self.mirror = LogMirror(self.context, self.members, {})
        self.memory = getattr(self, "memory", {})
        self.mirror.sizes = sizes(self.home)
        self.mirror.recall(Memory(self.memory), 0.0)

    def look(self) -> None:
        """One look, and all that follows from it."""
        self.now += 1.0
        self.mirror.on_deadline(self.now)
        for _ in range(1000):
            self.memory |= dict(self.mirror.changes())
            self.memory = {key: row for key, row in self.memory.items() if row is not None}
            effects = self.context.clear()
            if not effects:
                return
            for effect in effects:
                if isinstance(effect, Send):
                    self.mirror.on_data(self.outgoing.answer(effect.message), self.now)
                else:
                    self.loop._performers[type(effect)](effect)
        raise AssertionError("the mirror asks for ever")


@pytest.fixture
def copying(loop, host, tmp_path) -> Copying:
    (tmp_path / "home").mkdir()
    (host / LOG).write_bytes(b"")
    return Copying(loop, host, tmp_path / "home")


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_log_is_copied_as_it_grows_and_rotated_as_its_origin_is(copying, host, tmp_path):
    home = tmp_path / "home" / LOG
    append(host / LOG, "one\n")
    copying.look()
    assert home.read_text() == "one\n"
    append(host / LOG, "two\n")
    copying.begin()  # Another coordinator goes on where the one before stood.
    copying.look()
    assert home.read_text() == "one\ntwo\n"
    log_file.push_back(host / LOG)
    append(host / LOG, "three\n")
    copying.look()
    copying.look()
    assert home.with_name(home.name + ".1").read_text() == "one\ntwo\n"
    assert home.read_text() == "three\n"
    assert (tmp_path / "home" / ACKS).read_bytes() == (host / ACKS).read_bytes()


def test_files_of_a_process_that_has_ended_are_asked_for_once_more_and_then_let_go(copying, host):
    append(host / LOG, "last words\n")
    copying.members.daemons["worker-0"].ended(m.ProcessExited("worker-0", 1, -9, ()), 1.0)
    copying.look()
    assert (copying.home / LOG).read_text() == "last words\n"
    assert copying.memory == {}
    assert copying.mirror.deadline() is None


def test_a_full_disk_is_said_once_and_the_log_is_complete_when_there_is_room(
    copying, host, run_script
):
    append(host / LOG, "0123456789" * 200)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        loop = Loop()
        Mirrored(loop, copying.home)
        (failed,) = run_script(loop, TakeLog(LOG, 500, bytes(900)), awaited=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    copying.look()
    copying.mirror.on_failed(failed)
    copying.mirror.on_failed(failed)
    notes = [e for e in copying.context.clear() if not isinstance(e, Send)]
    assert len(notes) == 1
    copying.look()
    assert (copying.home / LOG).read_text() == "0123456789" * 200


# ---------------------------------------------------------------- saving and loading elsewhere


def checkpoint(run: Path) -> Path:
    """A whole checkpoint of ten parameters in three shards, and of two workers."""
    directory = checkpoints.create(run, 120, 3)
    shards, workers = [], []
    for index, (lo, hi) in enumerate([(0, 4), (4, 7), (7, 10)]):
        file, arrays = f"shard-{index}.safetensors", {"w": np.arange(lo, hi, dtype=np.float32)}
        if index == 0:
            arrays |= {"averaged": np.zeros(0)}
        sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
        part = {"name": f"server-{index}", "file": file, "sha256": sha256, "nbytes": nbytes}
        shards.append({**part, "lo": lo, "hi": hi, "state": {"version": index}})
    residual = {"residual": np.ones(10, np.float32)}
    sha256, nbytes = checkpoints.write_arrays(directory / "worker-0.safetensors", residual)
    part = {"name": "worker-0", "file": "worker-0.safetensors", "sha256": sha256}
    workers = [{**part, "nbytes": nbytes, "state": {}}]
    layout = Layout((TensorEntry("w", TRAINED, (10,), "float32"),)).to_rows()
    manifest = whole(layout=layout, shards=shards, workers=workers, step=120, number=3)
    checkpoints.write_manifest(directory, manifest)
    return directory


def born(name: str, incarnation: int = 1) -> Register:
    return Register("run", name.partition("-")[0], name, incarnation, 1, "here", "0")


def load_elsewhere(
    run_script: Callable, host: Path, home: Path, name: str, effect: LoadArrays
) -> tuple[ArraysLoaded, list[str]]:
    """Load on another host; what it says to be missing is put there, as `FileReceiver` would."""
    away, fetched = Away(host, born(name)), []
    for _ in range(3):
        loop = Loop()
        Files(loop, name, away)
        (event,) = run_script(loop, effect, awaited=1)
        if isinstance(event, ArraysLoaded):
            return event, fetched
        assert isinstance(event, FilesMissing)
        for wanted in event.files:
            fetched.append(wanted.file.rpartition("/")[2])
            (away.root / wanted.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(home / wanted.file, away.root / wanted.file)
            if wanted.nbytes is not None:
                assert hashed((home / wanted.file).read_bytes()) == wanted.sha256
    raise AssertionError("it always wants more")


@pytest.mark.parametrize(
    ("lo", "hi", "extras", "files"),
    [
        (0, 5, ("averaged",), ["shard-0.safetensors", "shard-1.safetensors"]),
        (5, 10, (), ["shard-1.safetensors", "shard-2.safetensors"]),
        (8, 9, ("averaged",), ["shard-0.safetensors", "shard-2.safetensors"]),
        (4, 7, (), ["shard-1.safetensors"]),
    ],
)
def test_a_server_elsewhere_fetches_the_shards_of_its_slice_and_leaves_nothing(
    tmp_path, host, run_script, lo, hi, extras, files
):
    directory = checkpoint(tmp_path)
    older = host / "restore" / "server-0.0" / "ckpt"
    older.mkdir(parents=True)
    effect = LoadArrays(str(directory), ("w",), extras, lo, hi)
    loaded, fetched = load_elsewhere(run_script, host, tmp_path, "server-0", effect)
    assert fetched == ["manifest.json", *files]
    assert loaded.arrays["w"].tolist() == list(range(lo, hi))
    assert list((host / "restore").iterdir()) == []


def test_a_worker_elsewhere_fetches_its_own_file_if_it_has_one(tmp_path, host, run_script):
    directory = checkpoint(tmp_path)
    effect = LoadArrays(str(directory))
    loaded, fetched = load_elsewhere(run_script, host, tmp_path, "worker-0", effect)
    assert fetched == ["manifest.json", "worker-0.safetensors"]
    assert loaded.arrays["residual"].tolist() == [1] * 10
    loaded, fetched = load_elsewhere(run_script, host, tmp_path, "worker-1", effect)
    assert (loaded.arrays, fetched) == ({}, ["manifest.json"])


def test_what_is_saved_elsewhere_lies_there_and_what_is_older_is_gone(tmp_path, host, run_script):
    (host / "ckpt" / "not-one").mkdir()
    other = host / "ckpt" / "000000000120-3" / "worker-5.safetensors"
    other.write_bytes(b"of another daemon")
    for number in (4, 5):
        loop, name = Loop(), f"{number:012d}-{number}"
        serve_files(loop, host, born("server-0"))
        arrays = {"w": np.full(3, number, np.float32)}
        effect = SaveArrays(number, str(tmp_path / "ckpt" / name), SHARD.split("/")[2], arrays)
        (saved,) = run_script(loop, effect, awaited=1)
        assert isinstance(saved, ArraysSaved)
        path = host / "ckpt" / name / "shard-0.safetensors"
        assert hashed(path.read_bytes()) == saved.sha256
        assert path.stat().st_size == saved.nbytes
    assert [str(p.relative_to(host)) for p in sorted(host.rglob("*.safetensors"))] == [
        "ckpt/000000000005-5/shard-0.safetensors", str(other.relative_to(host)),
    ]  # fmt: skip
    assert not (tmp_path / "ckpt").exists(), "not where the coordinator's directory would be"


def test_a_host_that_cannot_make_room_fails_the_checkpoint_and_not_the_daemon(
    tmp_path, host, run_script
):
    shutil.rmtree(host / "ckpt")
    (host / "ckpt").write_text("in the way")
    loop = Loop()
    serve_files(loop, host, born("server-0"))
    effect = SaveArrays(1, "/home/ckpt/000000000001-1", "shard-0.safetensors", {})
    (saved,) = run_script(loop, effect, awaited=1)
    assert saved.error.startswith("cannot make")


def test_a_damaged_manifest_ends_the_daemon_with_the_reason(tmp_path, host, run_script):
    away, loop = Away(host, born("server-0")), Loop()
    directory = away.fetched(Path("/home/ckpt/000000000120-3"))
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{}")
    Files(loop, "server-0", away)
    with pytest.raises(DlctlError, match="manifest"):
        run_script(loop, LoadArrays("/home/ckpt/000000000120-3", ("w",), (), 0, 1), awaited=1)
