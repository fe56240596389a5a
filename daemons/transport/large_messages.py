"""Transfer of large messages between processes: in shared memory, in segments, or unchanged.

Over unix sockets they are lent in shared memory (`shm.py`); over TCP they are sent in segments
(`chunking.py`). Either way a message arrives whole or not at all.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from collections.abc import Hashable, Iterable

from daemons.transport import chunking, shm
from daemons.transport.chunking import Assembly
from daemons.transport.shm import Borrower, Lender, Loan
from dlctl.errors import RemoteProtocolError
from dlctl.wire.codec import Frames

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20


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
        self.lender, self.borrower = Lender(), Borrower()
        self.assembly = Assembly()
        _keep_freed_memory()
        self._numbers = itertools.count(secrets.randbits(48))
        """Numbers of segmented messages. The first is random, so that no segment seems to continue
        a message of an earlier process.
        """

    def spare_memory(self) -> None:
        """Retain no memory for the next message from now on, and keep as few pages resident as
        possible: this process has a part of the host's memory, and its messages are larger.
        """
        self.lender.is_sparing = self.borrower.is_sparing = True

    def outgoing(
        self, receiver: Hashable, frames: Frames, is_local: bool
    ) -> tuple[Iterable[Frames], Loan | None]:
        """The ZeroMQ messages for a message, in order; and its loan, if it was lent, which tracks
        when the receiver has found it. is_local: `receiver` is a local process of this user.
        """
        largest_bytes = max(map(len, frames))
        if is_local and largest_bytes >= shm.FRAME_BYTES_MIN:
            lent = self.lender.lend(frames, receiver)
            if lent is not None:
                return [lent[0]], lent[1]
        if largest_bytes >= chunking.FRAME_BYTES_MIN:
            return chunking.cut(frames, next(self._numbers)), None
        return [frames], None

    def incoming(
        self, source: Hashable, frames: Frames, bytes_max: int, is_local: bool
    ) -> tuple[Frames | None, Frames | None]:
        """Handle a ZeroMQ message that was received over the connection `source`. Returns a whole
        message, None while it is incomplete, or if some of it is lost; and an answer to the sender.

        Raises RemoteProtocolError for what `outgoing` never makes, and for a message of more than
        `bytes_max` bytes.
        """
        kind = frames[0][:4]
        if kind not in (shm.SHARED, shm.MISSED):
            return self.assembly.take(source, frames, bytes_max), None
        if not is_local:
            raise RemoteProtocolError("a message in shared memory from another machine")
        if kind == shm.MISSED:
            self.lender.missed(source)
            return None, None
        whole = self.borrower.read(frames, bytes_max)
        return whole, [shm.MISSED] if whole is None else None

    def give_back(self) -> None:
        """Return unreferenced slots to their lenders, and release unneeded memory."""
        self.borrower.give_back()
        self.lender.trim()
        self.assembly.trim()

    def check(self) -> None:
        """A chore: discard overdue messages and release unused memory."""
        for part in (self.assembly, self.lender, self.borrower):
            part.check()
