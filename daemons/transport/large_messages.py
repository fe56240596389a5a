"""How large messages get from process to process: lent, in segments, or as they are.

Between processes that talk over unix sockets they lie in shared memory (`lending.py`); over TCP
they travel in segments (`segments.py`). Either way a message arrives whole or not at all.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from daemons.transport import chunking, shm
from daemons.transport.chunking import Arriving, Assembly
from daemons.transport.shm import Borrower, Lender, Loan
from dlctl.errors import RemoteProtocolError
from dlctl.wire import Frames

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20


class Outgoing(NamedTuple):
    parts: Iterable[Frames]
    """ZeroMQ's messages, in their order."""
    loan: Loan | None = None
    """If it was lent: says when the receiver has found it."""


class Incoming(NamedTuple):
    frames: Frames | None
    """A whole message; None if more of it has to come, or some of it is lost."""
    answer: Frames | None = None
    """What its sender has to be told."""


def _keep_freed_memory() -> None:
    """Have the C library use again what ZeroMQ and Python have freed, up to 64 MiB, before it goes
    back to the kernel. A library without `mallopt` goes on as it does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


class LargeMessages:
    """The large messages of one process."""

    def __init__(self) -> None:
        self._lender, self._borrower = Lender(), Borrower()
        self._assembly = Assembly()
        _keep_freed_memory()
        self._numbers = itertools.count(secrets.randbits(48))
        """Of messages that go in segments. Nobody shall go on with one of a process before us."""

    def spare_memory(self) -> None:
        """From now on nothing is kept for the next message, nor more resident than has to be: this
        process has a part of the host's memory, and its messages are larger.
        """
        self._lender.is_sparing = self._borrower.is_sparing = True

    def outgoing(self, receiver: Hashable, frames: Frames, is_local: bool) -> Outgoing:
        """What to send for a message. is_local: `receiver` is a process of ours here."""
        if is_local and shm.are_large(frames):
            lent = self._lender.lend(frames, receiver)
            if lent is not None:
                return Outgoing([lent[0]], lent[1])
        if chunking.are_large(frames):
            return Outgoing(chunking.cut(frames, next(self._numbers)))
        return Outgoing([frames])

    def incoming(
        self, source: Hashable, frames: Frames, bytes_max: int, is_local: bool
    ) -> Incoming:
        """What has come over the connection `source`.

        Raises RemoteProtocolError for what `outgoing` never makes, and for a message of more than
        `bytes_max` bytes.
        """
        kind = frames[0][:4]
        if kind not in (shm.SHARED, shm.MISSED):
            return Incoming(self._assembly.take(source, frames, bytes_max))
        if not is_local:
            raise RemoteProtocolError("what lies in shared memory is not for other machines")
        if kind == shm.MISSED:
            self._lender.missed(frames[0], source)
            return Incoming(None)
        whole = self._borrower.read(frames, bytes_max)
        return Incoming(whole, shm.not_found(frames) if whole is None else None)

    def coming(self, source: Hashable) -> Arriving | None:
        """What comes from there, if there is a good deal more of it than the last time."""
        return self._assembly.coming(source)

    def drop_pages(self) -> None:
        """What has come was handled: what lies in memory of others need not be resident here."""
        self._borrower.drop_pages()

    def give_back(self) -> None:
        """Tell the lenders of what nobody here looks at any more, and let go what is not needed."""
        self._borrower.give_back()
        self._lender.trim()
        self._assembly.trim()

    def check(self) -> None:
        """A chore: forget what nobody goes on with, and let go what is not used."""
        for part in (self._assembly, self._lender, self._borrower):
            part.check()

    def close(self) -> None:
        self._lender.close()
