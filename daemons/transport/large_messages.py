"""Transfer of large messages between processes: in shared memory, in segments, or unchanged.

Over unix sockets they are lent in shared memory (`shm.py`); over TCP they are sent in segments
(`chunking.py`). Either way a message arrives whole or not at all.
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
    """ZeroMQ messages, in order."""
    loan: Loan | None = None
    """If it was lent: tracks when the receiver has found it."""


class Incoming(NamedTuple):
    frames: Frames | None
    """A whole message; None while it is incomplete, or if some of it is lost."""
    answer: Frames | None = None
    """To send back to the sender."""


def _keep_freed_memory() -> None:
    """Make the C library reuse up to 64 MiB that ZeroMQ and Python have freed, before it returns
    memory to the kernel. A C library without `mallopt` is left as it is.
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
        """Of segmented messages. The start is random, so that no segment seems to continue a
        message of an earlier process.
        """

    def spare_memory(self) -> None:
        """From now on retain no memory for the next message, and keep as few pages resident as
        possible: this process has a part of the host's memory, and its messages are larger.
        """
        self._lender.is_sparing = self._borrower.is_sparing = True

    def outgoing(self, receiver: Hashable, frames: Frames, is_local: bool) -> Outgoing:
        """What to send for a message. is_local: `receiver` is a local process of this user."""
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
        """Handle a ZeroMQ message that was received over the connection `source`.

        Raises RemoteProtocolError for what `outgoing` never makes, and for a message of more than
        `bytes_max` bytes.
        """
        kind = frames[0][:4]
        if kind not in (shm.SHARED, shm.MISSED):
            return Incoming(self._assembly.take(source, frames, bytes_max))
        if not is_local:
            raise RemoteProtocolError("a message in shared memory from another machine")
        if kind == shm.MISSED:
            self._lender.missed(frames[0], source)
            return Incoming(None)
        whole = self._borrower.read(frames, bytes_max)
        return Incoming(whole, shm.not_found(frames) if whole is None else None)

    def coming(self, source: Hashable) -> Arriving | None:
        """The partial message of this connection, if much more of it has arrived since the last
        call that returned it.
        """
        return self._assembly.coming(source)

    def drop_pages(self) -> None:
        """Release the resident pages of received messages that were handled."""
        self._borrower.drop_pages()

    def give_back(self) -> None:
        """Return unreferenced slots to their lenders, and release unneeded memory."""
        self._borrower.give_back()
        self._lender.trim()
        self._assembly.trim()

    def check(self) -> None:
        """A chore: discard overdue messages and release unused memory."""
        for part in (self._assembly, self._lender, self._borrower):
            part.check()

    def close(self) -> None:
        self._lender.close()
