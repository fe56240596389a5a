"""A part of the coordinator says itself what has changed of its state: nothing does unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from seeds import run_seed

from dlctl.records.memory import DAEMON, Entry, Piece
from dlctl.roles.coordinator.members.membership import LASTING
from dlctl.roles.coordinator.persistence import Persistence
from dlctl.roles.coordinator.records import Owner


def everything(persistence: Persistence) -> Iterator[Entry]:
    """All pieces with one owner, whether it says that they have changed or not."""
    end = persistence.run.shutdown
    for part in (*persistence.parts, *([end] if end else [])):
        if isinstance(part, Owner):
            yield from (piece for piece in part.memory() if isinstance(piece, Entry))
    for name, daemon in persistence.run.members.daemons.items():
        yield Entry(DAEMON + name, {key: getattr(daemon, key) for key in LASTING})


def checked(persistence: Persistence) -> int:
    """The number of pieces that are as they were remembered."""
    known, count = persistence._record.known, 0
    for key, value in everything(persistence):
        piece = value.to_json() if isinstance(value, Piece) else value
        piece = list(piece) if isinstance(piece, tuple) else piece
        assert known.get(key) == piece, f"{key} has changed unnoticed"
        count += 1
    daemons = {key for key in known if key.startswith(DAEMON)}
    assert daemons == {DAEMON + name for name in persistence.run.members.daemons}
    return count


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scenario", ["recovery", "full-disks", "toys", "sync-recovery"])
def test_after_every_event_what_is_remembered_is_what_is(scenario, seed, monkeypatch) -> None:
    honest, counts = Persistence.changes, []

    def changes(self, now):
        effects = honest(self, now)
        counts.append(checked(self))
        return effects

    monkeypatch.setattr(Persistence, "changes", changes)
    result = run_seed(scenario, seed)
    assert not result.error, result.error
    assert len(counts) > 100
    assert min(counts) > 10
