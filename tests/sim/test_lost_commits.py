"""The scenario of commits under way does what it is for."""

from __future__ import annotations

import zlib

import pytest
from scenarios import commits
from seeds import finish

from dlctl.sim.states import MemoryLog


@pytest.mark.long
def test_servers_die_while_their_commits_are_under_way_and_syncs_cover_several(monkeypatch):
    honest, together = MemoryLog.append, []

    def append(self, parts):
        together.append(b"".join(parts).count(b"dlJ"))
        honest(self, parts)

    monkeypatch.setattr(MemoryLog, "append", append)
    killed = 0
    for seed in range(4):
        simulation = commits(seed)
        finish(simulation)
        killed += simulation.injector.struck["kill in a commit"]
    assert killed >= 4
    assert max(together) > 2


@pytest.mark.parametrize(("kind", "kept"), list(enumerate(("nothing", "all", "a part"))))
def test_of_a_record_that_was_not_synced_a_crash_leaves_nothing_all_or_a_part(kind, kept):
    record = next(
        record
        for record in (bytes([number]) * 99 for number in range(256))
        if zlib.crc32(record) % 3 == kind and zlib.crc32(record) % 100 not in (0, 99)
    )
    log = MemoryLog()
    log.begin(0, [b"base"])
    log.unsynced = record
    assert log.copy().read_journal(0) == [b""], "a loss of power finds nothing of it"
    log.crash()
    (found,) = log.read_journal(0)
    assert record.startswith(found)
    is_kept = "nothing" if not found else "all" if found == record else "a part"
    assert is_kept == kept
