"""Where simulated servers keep their shards: the real storages, on memory that outlives a process.

A crash at a point (`crashpoints.py`) happens in the middle of an update or a commit: the bytes stay
as they were at that instant, and the next server has to recover from them. Of records whose sync
was under way the next server finds all, nothing, or a part: as after a kill, or a loss of power.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dlctl.optim.base import Optimizer
from dlctl.roles.server.commits import Commit, Committed
from dlctl.shards.base import Spec, Storage, no_point, not_replaced
from dlctl.shards.errors import NoRoom, StateHeld, Unusable
from dlctl.shards.image import ImageForm, has_updates
from dlctl.shards.journal_format import Bytes
from dlctl.shards.journaled import Journaled
from dlctl.shards.log import Point, by_log, perform_first, together
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.sim.disk import NO_SPACE, Disk
from dlctl.sim.process import Crashed, Process
from dlctl.wire.messages import Array

BOOT_ID = "the one boot of a simulated machine"
JOURNAL_BYTES_MIN = 0
"""Simulated shards are so small that no journal would ever be started over otherwise."""


class Survivor(NamedTuple):
    version: int
    w: Array
    """float32[n]: the parameters."""


@dataclass(slots=True)
class SurvivingShard:
    """The state of a shard that survives its server."""

    image: bytearray | None = None
    """The mapped file that survives a kill, with durability "process"."""
    log: MemoryLog | None = None
    """The journal that survives a power loss, with durability "disk"."""
    holder: Process | None = None


@dataclass(slots=True)
class MemoryLog:
    """A log on a disk that may be full."""

    disk: Disk = field(default_factory=Disk)
    files: dict[int, tuple[bytes, bytearray]] = field(default_factory=dict)
    """Number -> (base, journal)."""
    current: int = 0
    where: str = "the simulated disk"
    unsynced: bytes = b""
    """Records whose sync is under way."""

    def bases(self) -> list[int]:
        return sorted(self.files, reverse=True)

    def read_base(self, number: int) -> bytes:
        return self.files[number][0]

    def read_journal(self, number: int) -> list[bytes]:
        return [bytes(self.files[number][1])]

    def copy(self) -> MemoryLog:
        """A copy of the log on a disk that is never full."""
        files = {n: (base, bytearray(journal)) for n, (base, journal) in self.files.items()}
        return MemoryLog(files=files, current=self.current)

    def crash(self) -> None:
        """Its process has died: what becomes of records that were not synced depends on them only,
        so that it is the same in every run of a seed."""
        checksum = zlib.crc32(self.unsynced)
        kept = (0, len(self.unsynced), checksum % (len(self.unsynced) + 1))[checksum % 3]
        self.files[self.current][1].extend(self.unsynced[:kept])
        self.unsynced = b""

    def begin(self, number: int, parts: Sequence[Bytes]) -> None:
        if self.disk.full or self.disk.tight:
            raise NoRoom(NO_SPACE, where=self.where)
        self.files = {number: (b"".join(parts), bytearray())}
        self.current = number

    def append(self, parts: Sequence[Bytes]) -> None:
        if self.disk.full:
            raise NoRoom(NO_SPACE, where=self.where)
        self.unsynced = b""
        self.files[self.current][1].extend(b"".join(parts))


class KeptStates:
    """`Storages` of one simulated server."""

    def __init__(
        self,
        process: Process,
        kept: dict[int | str, SurvivingShard],
        durability: str,
        point: Point,
        disk: Disk,
    ) -> None:
        self.process = process
        self.kept = kept
        self.durability = durability
        self.point = point
        self.disk = disk
        self._spec: Spec | None = None
        self._others: dict[str, KeptStates] = {}

    def of_table(self, name: str) -> KeptStates:
        like = (self.process, self.kept, self.durability, self.point, self.disk)
        return self._others.setdefault(name, KeptStates(*like))

    def create(self, spec: Spec) -> Storage:
        if self.durability == "none":
            return InMemory().create(spec)
        kept = self._take(spec)
        if self.durability == "disk":
            kept.log = kept.log or MemoryLog(self.disk)
            return Journaled.create(kept.log, spec, self.point, JOURNAL_BYTES_MIN)
        is_known = kept.image is not None and not spec.replaces
        if is_known and has_updates(kept.image, spec, BOOT_ID):
            raise not_replaced(spec, "the simulated memory")
        kept.image = bytearray(ImageForm.of(spec, BOOT_ID).total_bytes)
        return Mapped.create(kept.image, spec, BOOT_ID, self.point)

    def reopen(self, spec: Spec) -> Storage:
        if self.durability == "none":
            raise Unusable("it was kept in memory only")
        kept = self._take(spec)
        if kept.log is not None:
            return Journaled(kept.log, spec, self.point, JOURNAL_BYTES_MIN)
        if kept.image is None:
            raise Unusable("there is none")
        return Mapped.reopen(kept.image, spec, BOOT_ID, self.point)

    def _take(self, spec: Spec) -> SurvivingShard:
        """Take the state if no live process has it, as with a lock on the file."""
        kept = self.kept.setdefault(_key(spec), SurvivingShard())
        holder = kept.holder
        if holder is not None and holder is not self.process and holder.alive:
            if not holder.given_up and holder.timeline is self.process.timeline:
                raise StateHeld(f"{holder} has this state open")
            # The old holder, not fenced yet, must not write into this server's state.
            kept.image = bytearray(kept.image) if kept.image is not None else None
            kept.log = kept.log.copy() if kept.log is not None else None
        if kept.log is not None and holder is not self.process:
            kept.log.crash()
        kept.holder, self._spec = self.process, spec
        return kept

    def survivor(self, optimizer: Optimizer) -> Survivor | None:
        """What the next server would find if the power failed now; None: nothing."""
        if self._spec is None or self.durability == "none":
            return None
        now = self.kept[_key(self._spec)]
        image = bytearray(now.image) if now.image is not None else None
        log = now.log.copy() if now.log is not None else None
        copies, durability = {_key(self._spec): SurvivingShard(image, log)}, self.durability
        storage = KeptStates(self.process, copies, durability, no_point, Disk()).reopen(self._spec)
        state = storage.resume(copy.deepcopy(optimizer))
        return Survivor(state.get("version", 0), storage.w)

    def discard(self) -> None:
        for other in self._others.values():
            other.discard()
        if self._spec is not None:
            self.kept.pop(_key(self._spec), None)


class CommitDriver:
    """Performs the commits of one simulated server, each sync taking `Disk.commit_s`."""

    def __init__(self, process: Process, disk: Disk) -> None:
        self.process = process
        self.disk = disk
        self._queue: deque[Commit] = deque()
        self._is_syncing = False
        process.perform(Commit, self._begin)

    def _begin(self, commit: Commit) -> None:
        self._queue.append(commit)
        if not self._is_syncing:
            self._sync()

    def _sync(self) -> None:
        """Write what is queued by now; what comes later waits for the next sync."""
        commits = list(self._queue)
        self._is_syncing = True
        writes = [commit.write for commit in commits]
        for log, records in by_log(writes[: together(writes)]):
            if isinstance(log, MemoryLog):
                log.unsynced = b"".join(records)
        self.process.timeline.after(self.disk.commit_s, lambda: self._synced(commits))

    def _synced(self, commits: list[Commit]) -> None:
        if not self.process.alive:
            return
        self._is_syncing = False
        try:
            count = perform_first([commit.write for commit in commits])
        except Crashed as crash:
            self.process.crash(crash)
            return
        except NoRoom as error:
            self.process.fail(error)
            return
        for _ in range(count):
            self._queue.popleft()
        self.process.post(Committed(commits[count - 1].number))
        if self._queue:
            self._sync()


def _key(spec: Spec) -> int | str:
    """The parameters of a shard by its number, other tables by their names."""
    return spec.place if spec.table else spec.shard
