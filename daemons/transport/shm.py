"""Large messages between processes of one machine are passed in shared memory.

The sender copies the large frames into a slot and sends the slot's location. The receiver reads
them in place and marks the slot as returned when it holds no reference to it. Then the sender
reuses the slot.

A slot is an anonymous file (memfd_create): the kernel frees it when the last process that has it
open exits. The receiver opens it through /proc, which only the same user can. The size is sealed,
so no process can truncate the memory under a reader. A slot that is not returned in time is never
written again: a receiver that has it open reads the old content, and one that opens it later does
not find it, as if the message had been lost; the roles retry. Forked processes (data loaders)
inherit neither the mappings nor the descriptors.

    a slot       one page: the cookie, the numbers of the last loans found and returned; then the
                 bytes
    on the wire  [head, lengths of the frames in the slot, frames ...]; the frames in the slot are
                 empty here
    the answer   [`MISSED`] from a receiver that has not found the slot

A slot may be as large as the model. So its pages are mapped on access, and each side drops the
pages that it no longer needs: the sender after sending, the receiver after handling the message.
A later access maps them again, with the same content.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import secrets
import struct
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from daemons.transport import shm_layout
from dlctl.errors import RemoteProtocolError
from dlctl.util import pages, threads
from dlctl.util.buffer_pool import is_unused
from dlctl.wire.codec import Frames
from dlctl.wire.messages import Array

SHARED, MISSED = b"\xc1shm", b"\xc1mis"
FRAME_BYTES_MIN = 128 * 1024
"""Frames of at least this size go into a slot; for smaller ones, the socket is as fast."""
PATIENCE_S = 10.0
"""A loan that is not returned within this time is abandoned."""
PAUSE_S = 60.0
"""After a missed loan, messages to that receiver go over the socket for this long: it may have no
access to /proc, or be slower than `PATIENCE_S`."""
KEEP_S = 1.0
"""Memory that is reused within this time is retained; other memory is released at once. Between
two rounds of many steps it would be an unused copy of the model.
"""
SLOTS_MAX = 64
BYTES_MAX = 1 << 30
"""The memory of all slots of a process; a message that does not fit goes over the socket."""
_PAGE = 4096
_HEAD = struct.Struct("<4sQQ16sQ?")
"""Kind, the sender's pid, its descriptor, the slot's cookie, number of the loan, whether both ends
keep the slot.
"""
_NOTES_AT = 64
"""uint64[2]: the numbers of the last loans found and returned."""
_FOUND, _RETURNED = 0, 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- sender


class Slot:
    """Memory that is lent for one message at a time. Raises OSError if it cannot be allocated."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.cookie = secrets.token_bytes(16)
        self.number = 0
        """The number of the newest loan."""
        self.used_at = -math.inf
        self.receiver: Hashable = None
        self.is_kept = False
        """Retained when it is free, because it was reused soon."""
        self.is_given_up = False
        self.fd = os.memfd_create("dlctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _descriptors.add(self.fd)  # Before the slow calls: another thread may fork meanwhile.
        try:
            os.posix_fallocate(self.fd, 0, _PAGE + nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self.fd, _PAGE + nbytes)
            self.memory.madvise(mmap.MADV_DONTFORK)
        except OSError:
            self.close()
            raise
        self.memory[:16] = self.cookie
        self.notes = np.frombuffer(self.memory, np.uint64, 2, _NOTES_AT)
        self.content = np.frombuffer(self.memory, np.uint8, nbytes, _PAGE)

    def is_back(self, number: int) -> bool:
        """Whether this loan (an earlier one or the newest) was returned or abandoned."""
        return self.is_given_up or int(self.notes[_RETURNED]) >= number

    def was_found(self, number: int) -> bool:
        """Whether the receiver has opened this loan, or the loan is over."""
        return self.is_back(number) or int(self.notes[_FOUND]) >= number

    def close(self) -> None:
        """A receiver that has opened the slot still reads its content."""
        self.is_given_up = True
        _descriptors.discard(self.fd)
        os.close(self.fd)


_descriptors: set[int] = set()
"""File descriptors of the slots of this process."""


def _forget_slots() -> None:
    """Close the slots in a forked child: an inherited descriptor would keep the memory."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_forget_slots)


class Loan(NamedTuple):
    """One message in a slot."""

    slot: Slot
    number: int

    @property
    def done(self) -> bool:
        """Whether the receiver has opened the slot: the message is no longer in flight."""
        return self.slot.was_found(self.number)


class Lender:
    """The slots of one process, for all its receivers."""

    def __init__(self) -> None:
        self.is_sparing = False
        """Whether to retain no slots and keep no pages resident."""
        self._slots: list[Slot] = []
        self._missed: dict[Hashable, float] = {}
        """Receiver that has not found a loan -> time of the report."""
        self._closed_at = -math.inf
        """Time of the latest use of any closed slot."""

    def lend(self, frames: Frames, receiver: Hashable) -> tuple[Frames, Loan] | None:
        """What to send instead of `frames`, and the loan, which tracks when the receiver is done.

        None: this message has to go over the socket.
        """
        lengths, rest = shm_layout.split(frames, FRAME_BYTES_MIN)
        places, need = shm_layout.places(lengths)
        if receiver in self._missed or (slot := self._find(need)) is None:
            return None
        now = time.monotonic()
        is_soon = now < max(slot.used_at, self._closed_at) + KEEP_S
        slot.is_kept = is_soon and not self.is_sparing
        slot.used_at, slot.receiver, slot.number = now, receiver, slot.number + 1
        copy = pages.copy if self.is_sparing else threads.copy
        for frame, place, length in zip(frames, places, lengths, strict=True):
            if length:
                copy(slot.content[place : place + length], np.frombuffer(frame, np.uint8))
        if not slot.is_kept:
            slot.memory.madvise(mmap.MADV_DONTNEED)
        loan = slot.number, slot.is_kept
        head = _HEAD.pack(SHARED, os.getpid(), slot.fd, slot.cookie, *loan)
        return [head, shm_layout.pack(lengths), *rest], Loan(slot, slot.number)

    def _find(self, need: int) -> Slot | None:
        free = [slot for slot in self._slots if slot.is_back(slot.number)]
        fitting = [slot for slot in free if need <= slot.nbytes <= 4 * need]
        if fitting:
            return min(fitting, key=lambda slot: slot.nbytes)
        free.sort(key=lambda slot: slot.used_at)
        while (
            len(self._slots) >= SLOTS_MAX
            or sum(slot.nbytes for slot in self._slots) + need > BYTES_MAX
        ):
            if not free:
                return None
            self._close(free.pop(0))
        try:
            self._slots.append(Slot(need))
        except OSError as error:
            log.debug("no memory to share: %s", error)
            return None
        return self._slots[-1]

    def missed(self, receiver: Hashable) -> None:
        """`receiver` reports that it has not found a loan: the loan was abandoned, or the receiver
        has no access to the slot.
        """
        for slot in [s for s in self._slots if s.receiver == receiver]:
            if not slot.was_found(slot.number):  # Else it would count as unread for `PATIENCE_S`.
                self._close(slot)
        self._missed[receiver] = time.monotonic()
        who = receiver if isinstance(receiver, str) else "a peer"
        text = "%s cannot read from shared memory; its messages go over the socket for %.0f s"
        log.warning(text, who, PAUSE_S)

    def trim(self) -> None:
        """Close slots that are unlikely to be reused soon. Once the receiver has opened a slot, it
        needs no reference of the sender.
        """
        for slot in [*self._slots]:
            if not slot.is_kept and slot.was_found(slot.number):
                self._close(slot)

    def check(self) -> None:
        """A chore: close slots that were not returned in time, and unused ones."""
        now = time.monotonic()
        self._missed = {who: at for who, at in self._missed.items() if now < at + PAUSE_S}
        for slot in [*self._slots]:
            if now > slot.used_at + (KEEP_S if slot.is_back(slot.number) else PATIENCE_S):
                self._close(slot)

    def _close(self, slot: Slot) -> None:
        self._closed_at = max(self._closed_at, slot.used_at)
        self._slots.remove(slot)
        slot.close()

    def close(self) -> None:
        for slot in [*self._slots]:
            self._close(slot)


# ---------------------------------------------------------------- receiver


_Key = tuple[int, int, bytes]
"""The sender's pid, its descriptor, the slot's cookie."""


@dataclass(slots=True)
class _Seen:
    """A slot of another process, opened by this one."""

    notes: Array
    """uint64[2], the only part that this process writes."""
    memory: mmap.mmap
    arrays: list[Array]
    """One uint8[n]: the content. Every view of a frame holds a reference to it."""
    number: int = 0
    """The number of the current loan, or the last one."""
    used_at: float = -math.inf
    is_kept: bool = False
    """Stays mapped when it is returned, because its owner keeps it."""


class Borrower:
    """The slots of other processes that this process reads."""

    def __init__(self) -> None:
        self.is_sparing = False
        """No memory is kept for the next message (`Lender.is_sparing`)."""
        self._seen: dict[_Key, _Seen] = {}
        self._lent: dict[_Key, _Seen] = {}
        """The slots that this process has not returned."""

    def read(self, frames: Frames, bytes_max: int) -> Frames | None:
        """The frames of a lent message; None if its slot is gone.

        Raises RemoteProtocolError for what `Lender` never makes, and for a message of more than
        `bytes_max` bytes.
        """
        if len(frames) < 2 or len(frames[0]) != _HEAD.size:
            raise RemoteProtocolError("this is no loan of a message")
        _, pid, fd, cookie, number, is_kept = _HEAD.unpack(frames[0])
        lengths = shm_layout.unpack(frames[1], frames[2:], bytes_max)
        _, total = shm_layout.places(lengths)
        key = pid, fd, cookie
        seen = self._seen.get(key) or _open(*key)
        if seen is None:
            return None
        self._seen[key] = seen
        if number <= seen.number or total > seen.arrays[0].size:
            raise RemoteProtocolError("a loan that is an old one, or larger than its slot")
        seen.is_kept = is_kept and not self.is_sparing
        seen.number, seen.used_at = number, time.monotonic()
        seen.notes[_FOUND] = number
        self._lent[key] = seen
        return shm_layout.join(seen.arrays[0].data, lengths, frames[2:])

    def drop_pages(self) -> None:
        """Release the resident pages of messages that were handled."""
        for seen in self._lent.values():
            if not seen.is_kept:
                seen.memory.madvise(mmap.MADV_DONTNEED)

    def give_back(self) -> None:
        """Mark slots as returned that this process holds no reference to."""
        for key, seen in list(self._lent.items()):
            if is_unused(seen.arrays, 0):
                seen.notes[_RETURNED] = seen.number
                del self._lent[key]
                if not seen.is_kept:
                    del self._seen[key]

    def check(self) -> None:
        """A chore: close slots that were not used for `KEEP_S`."""
        oldest = time.monotonic() - KEEP_S
        for key in [key for key, seen in self._seen.items() if seen.used_at < oldest]:
            if key not in self._lent:
                del self._seen[key]


def _open(pid: int, fd: int, cookie: bytes) -> _Seen | None:
    """Open a slot of another process; None if it is gone or the descriptor was reused."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        ours = os.open(f"/proc/{pid}/fd/{fd}", flags)
    except OSError as error:
        log.debug("a message in shared memory is gone: %s", error)
        return None
    try:
        size, seals = os.fstat(ours).st_size, fcntl.fcntl(ours, fcntl.F_GET_SEALS)
        if size <= _PAGE or seals & _SEALS != _SEALS:
            return None
        page = mmap.mmap(ours, _PAGE)
        page.madvise(mmap.MADV_DONTFORK)
        if page[:16] != cookie:
            return None
        memory = mmap.mmap(ours, size, mmap.MAP_SHARED, mmap.PROT_READ)
        memory.madvise(mmap.MADV_DONTFORK)
    except OSError as error:
        log.debug("a message in shared memory cannot be read: %s", error)
        return None
    finally:
        os.close(ours)
    content = np.frombuffer(memory, np.uint8, size - _PAGE, _PAGE)
    notes = np.frombuffer(page, np.uint64, 2, _NOTES_AT)
    return _Seen(notes, memory, [content], number=int(notes[_RETURNED]))
