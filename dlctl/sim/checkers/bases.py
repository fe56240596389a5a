"""Bases of a log are rare enough for the memory, and frequent enough for a recovery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from dlctl.roles.server.commits import Commit
from dlctl.roles.server.server import Server
from dlctl.shards.journaled import JOURNAL_STATES
from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.wire.machine import Effect


@dataclass(slots=True)
class _Journal:
    base: int = 0
    """The number of the newest commit with a base."""
    base_bytes: int = 0
    bytes: int = 0
    """Size of the records since that base."""


class BasesChecker(Checker):
    """No journal is started over while a base of its log is under way. Else it is before it is much
    longer than `JOURNAL_STATES` states.
    """

    def __init__(self) -> None:
        self._journals: dict[tuple[Process, int], _Journal] = {}

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not isinstance(effect, Commit):
            return
        write, machine = effect.write, cast(Server, process.machine)
        journal = self._journals.setdefault((process, id(write.log)), _Journal())
        is_written = journal.base <= machine.commits.durable
        if write.record and write.base and not is_written:
            raise self.broken(f"{process} begins a base while that of {journal.base} is under way")
        if write.base:
            journal.base, journal.base_bytes, journal.bytes = effect.number, len(write.base), 0
            return
        journal.bytes += len(write.record)
        most = (JOURNAL_STATES + 1) * max(journal.base_bytes, len(write.record))
        if journal.base and is_written and journal.bytes > most:
            raise self.broken(f"{process} has a journal of {journal.bytes} bytes")
