"""A server's life after another: what one leaves in its storage, the next one resumes."""

from __future__ import annotations

from collections.abc import Callable

from dlctl.shards.base import Spec, Storage, no_point
from dlctl.shards.errors import Unusable
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.sim.states import MemoryLog


class Keeping:
    """One state in memory, that the servers of a shard open one after the other."""

    def __init__(self, durability: str = "process") -> None:
        self.durability = durability
        self.buffer = bytearray()
        self.log = MemoryLog()
        self.point: Callable[[str], None] = no_point
        self.tables: dict[str, Keeping] = {}

    def passes(self, name: str) -> None:
        self.point(name)

    def create(self, spec: Spec) -> Storage:
        if self.durability == "disk":
            return Journaled.create(self.log, spec, self.passes)
        self.buffer = bytearray(ImageForm.of(spec, "boot").total_bytes)
        return Mapped.create(self.buffer, spec, "boot", self.passes)

    def reopen(self, spec: Spec) -> Storage:
        if self.durability == "disk":
            return Journaled(self.log, spec, self.passes)
        if not self.buffer:
            raise Unusable("there is none", where="shard-0.state", hint="go back")
        return Mapped.reopen(self.buffer, spec, "boot", self.passes)

    def of_table(self, name: str) -> Keeping:
        other = self.tables.setdefault(name, Keeping(self.durability))
        other.passes = self.passes  # type: ignore[method-assign]
        return other

    def copy(self) -> Keeping:
        """What is on the disk now."""
        other = Keeping(self.durability)
        other.log = self.log.copy()
        other.tables = {name: table.copy() for name, table in self.tables.items()}
        return other

    def discard(self) -> None:
        self.buffer = bytearray()
