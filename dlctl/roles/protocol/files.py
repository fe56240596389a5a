"""File transfers between hosts: the effects that roles request, and the events they get back.

File names are relative to the run directory, or to its counterpart on another host, and always use
slashes: "ckpt/000000000120-3/shard-0.safetensors", "logs/worker-0.3.jsonl".

The receiver requests a whole file from another host, piece by piece. A file that is already on
this host is only checked.

A lost piece is requested again, and a duplicate is dropped; pieces may arrive in any order. Few are
in flight at once, and they are small on a slow link, so other traffic never waits for long: a
daemon whose reports are late, for example, is considered dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dlctl.errors import RemoteProtocolError
from dlctl.model import frozen
from dlctl.roles.protocol.context import Context
from dlctl.util.record import record
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Event, Peer
from dlctl.wire.messages import FileData, ReadFile

CHECKPOINTS, LOGS, ACKS, FROZEN = "ckpt", "logs", "acks", frozen.FOLDER
"""Folders of a run directory."""
BYTES_MAX = 1 << 20
"""The largest piece of a file in one answer."""
NOT_THERE = "there is no such file"
"""The error of an answer if the file does not exist."""


def checkpoint_file(directory: str, file: str) -> str:
    """The name of a file in a checkpoint directory, wherever the run directory is."""
    return f"{CHECKPOINTS}/{directory.rstrip('/').rpartition('/')[2]}/{file}"


def saved_file(name: str) -> str:
    """The name of a server's or worker's file in a checkpoint, unique per daemon."""
    role, _, index = name.partition("-")
    return f"shard-{index}.safetensors" if role == "server" else f"{name}.safetensors"


class RequestNumbers:
    """Numbers of one process's requests. They start at the clock: an earlier process may have sent
    the same requests, and answers to those must not match.
    """

    def __init__(self) -> None:
        self._newest = 0

    def next(self, now: float) -> int:
        self._newest = self._newest + 1 if self._newest else int(now * 1000) + 1
        return self._newest


# ---------------------------------------------------------------- the sender of a file


@record
class ReadBytes(Effect):
    """Read the bytes that `peer` has requested; answered by `BytesRead`."""

    peer: Peer
    question: ReadFile


@record
class BytesRead(Event):
    peer: Peer
    answer: FileData


@record
class RemoveCopy(Effect):
    """Remove a file of a checkpoint from this host."""

    file: str


# ---------------------------------------------------------------- the receiver of a whole file


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file to be fetched."""

    file: str
    nbytes: int | None = None
    """The bytes of the file; None: unknown, fetch all of it."""
    sha256: str = ""
    """"": the file verifies itself by its content."""
    ranges: tuple[tuple[int, int], ...] = ()
    """The byte ranges to fetch, in order, of a file of known size; (): all of it."""


@record
class TakeBytes(Effect):
    """Write `data` at `offset` of the temporary file beside the file's final place."""

    file: str
    offset: int
    data: bytes


@record
class SealFile(Effect):
    """All bytes have arrived: verify them, and move the file durably to its place; answered by
    `FileSealed`.
    """

    file: str
    nbytes: int
    sha256: str


@record
class CheckFile(Effect):
    """Verify size and checksum of a file that is in its place; answered by `FileSealed`."""

    file: str
    nbytes: int
    sha256: str


@record
class DiscardFile(Effect):
    """A transfer was abandoned: remove the bytes received so far."""

    file: str


@record
class FileSealed(Event):
    """A file is in its place and verified, or an error, also one of `TakeBytes`."""

    file: str
    error: str
    """Why the file was not sealed; "" on success."""


@record
class StillReading(Event):
    """Progress of verifying files, which takes long and handles one file at a time: more bytes have
    been read since the last such event.
    """


@record
class FilesMissing(Event):
    """Answer to `LoadArrays` on another host: these files have to be fetched first."""

    files: tuple[WantedFile, ...]


# ---------------------------------------------------------------- mirrors of growing files


@record
class TakeLog(Effect):
    """Write these bytes at `offset` of a log."""

    file: str
    offset: int
    data: bytes


@record
class RotateLog(Effect):
    """Rename the present file and continue the log in a new one, as at its origin."""

    file: str


@record
class ReplaceFile(Effect):
    """Replace the content of a small file by `data`."""

    file: str
    data: bytes


@record
class MirrorFailed(Event):
    """Bytes of a log could not be written: it has to be resent from `offset` on."""

    file: str
    offset: int
    error: str


# ---------------------------------------------------------------- whole files, piece by piece

WINDOW = 4
"""Pieces in flight from one peer, over all files."""
PIECE_BYTES_FIRST, PIECE_BYTES_MIN = 64 * 1024, 16 * 1024
QUICK_S, SLOW_S = 0.25, 1.0
"""A piece that arrives faster is followed by larger ones, a slower one by smaller ones."""
Done = Callable[[str, float], None]
"""A callback with (the error or "", now)."""
Progress = Callable[[float], None]
"""Called with the current time when bytes have arrived, or have been read to verify them."""


@dataclass(slots=True)
class _Transfer:
    peer: str
    wanted: WantedFile
    done: Done
    progress: Progress
    nbytes: int | None
    left: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that are still to be requested."""
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Request -> (offset, bytes) of the pieces in flight."""

    def next_piece(self, nbytes: int) -> tuple[int, int]:
        """(offset, bytes) of the next piece, at most `nbytes` long; it then counts as requested."""
        lo, hi = self.left.pop(0)
        if hi - lo > nbytes:
            self.left.insert(0, (lo + nbytes, hi))
        return lo, min(nbytes, hi - lo)

    def is_complete(self) -> bool:
        return not self.asked and not self.left


class Transfers:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._in_flight: dict[str, _Transfer] = {}
        self._piece_bytes: dict[str, int] = {}
        """Peer -> the bytes that the next request asks of it."""
        self._numbers = RequestNumbers()

    def fetch(
        self,
        peer: str,
        wanted: WantedFile,
        done: Done,
        now: float,
        progress: Progress | None = None,
    ) -> None:
        """Fetch a file from `peer`; `done` is called once, unless it is cancelled."""
        self.cancel(wanted.file)
        progress = progress or (lambda now: None)
        # The first piece of a file of unknown size has it.
        whole = (0, PIECE_BYTES_MIN if wanted.nbytes is None else wanted.nbytes)
        left = [(lo, hi) for lo, hi in wanted.ranges or (whole,) if lo < hi]
        transfer = _Transfer(peer, wanted, done, progress, wanted.nbytes, left)
        self._in_flight[wanted.file] = transfer
        if transfer.is_complete():
            self._seal(transfer)
        self._request_more(peer, now)

    def check(self, file: str, nbytes: int, sha256: str, done: Done, progress: Progress) -> None:
        """Verify a file that another process on this host wrote, as if it had been fetched."""
        wanted = WantedFile(file, nbytes, sha256)
        self._in_flight[file] = _Transfer("", wanted, done, progress, nbytes)
        self.context.do(CheckFile(file, nbytes, sha256))

    def cancel(self, file: str) -> None:
        """Abandon the transfer of this file, if there is one."""
        transfer = self._in_flight.pop(file, None)
        if transfer is not None:
            for request in transfer.asked:
                self.context.retries.drop(_key(request))
            self.context.do(DiscardFile(file))

    def fail_all(self, peer: str, error: str, now: float) -> None:
        """Fail all transfers from this peer."""
        for transfer in [t for t in self._in_flight.values() if t.peer == peer]:
            self._fail(transfer, error, now)

    def is_busy(self) -> bool:
        return bool(self._in_flight)

    # ------------------------------------------------------------ pieces

    def on_data(self, message: m.FileData, now: float) -> None:
        """A piece has arrived. Raises RemoteProtocolError if another peer was asked for it."""
        transfer = self._in_flight.get(message.file)
        if transfer is None or message.request not in transfer.asked:
            return
        if message.name != transfer.peer:
            raise RemoteProtocolError("it was not asked for this file")
        took_s = self.context.retries.done(_key(message.request), now) or 0.0
        offset, nbytes = transfer.asked.pop(message.request)
        if error := _wrong(transfer, message, offset, nbytes):
            self._fail(transfer, error, now)
            return
        if transfer.nbytes is None:
            transfer.nbytes = message.size
            transfer.left = [(nbytes, message.size)] if message.size > nbytes else []
        self._adapt(transfer.peer, nbytes, took_s)
        self.context.do(TakeBytes(message.file, offset, message.data))
        transfer.progress(now)
        if transfer.is_complete():
            self._seal(transfer)
        self._request_more(transfer.peer, now)

    def on_sealed(self, event: FileSealed, now: float) -> None:
        transfer = self._in_flight.get(event.file)
        if transfer is None:
            return
        if event.error:
            self._fail(transfer, event.error, now)
        else:
            del self._in_flight[event.file]
            transfer.done("", now)

    def on_reading(self, now: float) -> None:
        """One reader verifies all complete files: its progress counts for each of them."""
        for transfer in self._in_flight.values():
            if transfer.is_complete():
                transfer.progress(now)

    def _seal(self, transfer: _Transfer) -> None:
        wanted, nbytes = transfer.wanted, transfer.nbytes or 0
        if nbytes == 0:
            self.context.do(TakeBytes(wanted.file, 0, b""))
        self.context.do(SealFile(wanted.file, nbytes, wanted.sha256))

    def _fail(self, transfer: _Transfer, error: str, now: float) -> None:
        self.cancel(transfer.wanted.file)
        transfer.done(error, now)
        self._request_more(transfer.peer, now)

    def _request_more(self, peer: str, now: float) -> None:
        """Send requests up to the peer's window, which all files from it share."""
        here = [t for t in self._in_flight.values() if t.peer == peer]
        free = WINDOW - sum(len(t.asked) for t in here)
        while free > 0 and (ready := [t for t in here if t.left]):
            self._request(min(ready, key=lambda t: len(t.asked)), now)
            free -= 1

    def _request(self, transfer: _Transfer, now: float) -> None:
        number = self._numbers.next(now)
        nbytes = self._piece_bytes.get(transfer.peer, PIECE_BYTES_FIRST)
        offset, nbytes = transfer.asked[number] = transfer.next_piece(nbytes)
        question = m.ReadFile(number, transfer.wanted.file, 0, offset, nbytes)
        self.context.ask(_key(number), transfer.peer, question, now, nbytes)

    def _adapt(self, peer: str, nbytes: int, took_s: float) -> None:
        if took_s < QUICK_S:
            larger = min(2 * nbytes, BYTES_MAX)
            self._piece_bytes[peer] = max(self._piece_bytes.get(peer, PIECE_BYTES_FIRST), larger)
        elif took_s > SLOW_S:
            self._piece_bytes[peer] = max(nbytes // 2, PIECE_BYTES_MIN)


def _key(request: int) -> tuple[str, int]:
    return "piece", request


def _wrong(transfer: _Transfer, message: m.FileData, offset: int, nbytes: int) -> str:
    """What is wrong with a piece, or ""."""
    if message.error:
        return message.error
    if transfer.nbytes is not None and message.size != transfer.nbytes:
        return f"it has {message.size} bytes there instead of {transfer.nbytes}"
    expected = min(nbytes, max(0, message.size - offset))
    if message.offset != offset or len(message.data) != expected:
        return f"{len(message.data)} bytes arrived instead of {expected}"
    return ""
