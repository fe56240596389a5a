"""Was an acknowledged push lost? What workers were told, against what the shards have on record.

Every incarnation of a worker has in writing up to which push each shard has acknowledged it
(`dlctl/acks.py`). Every shard keeps, per slot and epoch, up to which push it has taken them: in the
state that its server keeps, else in the newest checkpoint, which is the last word of a run that has
ended in order. A shard that has forgotten an old epoch cannot be asked about it: "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl import acks, checkpoints, states
from dlctl.acks import AckRecord
from dlctl.cli.recovery import read_jobfile
from dlctl.cli.snapshot import Snapshot
from dlctl.config import Servers
from dlctl.errors import DlctlError
from dlctl.states import Kept

LOOKS = 5
"""At a state that a living server writes."""
Table = dict[tuple[int, int], int]
"""(slot, epoch) -> pushes that were taken."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One shard and one incarnation of a worker."""

    worker: str
    incarnation: int
    epoch: int
    shard: int
    acknowledged: int
    recorded: int | None
    """Pushes that the shard knows to have taken; None: it has forgotten this epoch."""

    @property
    def lost(self) -> int | None:
        """Pushes that were acknowledged and are not there; None if nobody can tell."""
        return None if self.recorded is None else max(0, self.acknowledged - self.recorded)


@dataclass(frozen=True, slots=True)
class Witness:
    """Where the word of one shard comes from."""

    shard: int
    source: str
    """A path; "" if there is none."""
    table: Table | None
    """None: its server lives, and has nothing in writing."""


def judge(snapshot: Snapshot) -> tuple[list[Verdict], list[Witness]]:
    """Every shard against every incarnation. Raises DlctlError if a record cannot be read.

    The acks are read first: what a shard takes after that does no harm.
    """
    records = acks.read_all(snapshot.directory)
    witnesses = _witnesses(snapshot)
    older = _Older(_resumed(snapshot), _merged(snapshot, len(witnesses)))
    verdicts = [
        _verdict(record, shard, count, witnesses, older)
        for record in records
        for shard, count in enumerate(record.counts)
    ]
    return verdicts, witnesses


@dataclass(frozen=True, slots=True)
class _Older:
    """What checkpoints know of epochs that the shards have forgotten."""

    resumed: list[Table]
    """Of the one that the run went back to: what it does not have of its epochs is lost."""
    merged: list[Table]
    """Of all together: each proves what it has, and nothing about what came after it."""

    def recorded(self, shard: int, slot: int, epoch: int, count: int) -> int | None:
        exact = _table_at(self.resumed, shard).get((slot, epoch))
        proven = _table_at(self.merged, shard).get((slot, epoch), -1)
        return exact if exact is not None else proven if proven >= count else None


def _verdict(
    record: AckRecord, shard: int, count: int, witnesses: Sequence[Witness], older: _Older
) -> Verdict:
    table = witnesses[shard].table if shard < len(witnesses) else {}
    recorded = None if table is None else recorded_pushes(table, record.slot, record.epoch)
    if recorded is None:
        recorded = older.recorded(shard, record.slot, record.epoch, count)
    name = f"worker-{record.slot}"
    return Verdict(name, record.incarnation, record.epoch, shard, count, recorded)


def recorded_pushes(table: Mapping[tuple[int, int], int], slot: int, epoch: int) -> int | None:
    """Pushes of this epoch that the shard has taken; None if it knows newer epochs only."""
    if (slot, epoch) in table:
        return table[slot, epoch]
    is_forgotten = any(known == slot and newer > epoch for known, newer in table)
    return None if is_forgotten else 0


def table_of(rows: Any) -> Table:
    """Rows [slot, epoch, next number, settled beyond it ...] of a shard; others are left out.

    One slot may have several rows: of its newest epoch, and of those before.
    """
    table: Table = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) >= 3 and all(type(n) is int for n in row):
            slot, epoch, count, *ahead = row
            while count in ahead:
                count += 1
            table[slot, epoch] = count
    return table


def _witnesses(snapshot: Snapshot) -> list[Witness]:
    job = read_jobfile(snapshot.directory)
    is_over = snapshot.state in ("stopped", "finished")
    kept = {} if is_over else _kept(snapshot, job.servers)
    saved, path = _newest(snapshot)
    found = []
    for index in range(max(job.servers.count, len(saved))):
        if index in kept:
            table = table_of(kept[index].deliveries)
            found.append(Witness(index, str(kept[index].path), table))
        elif snapshot.is_live:
            found.append(Witness(index, "", None))
        else:
            source = path if index < len(saved) else ""
            found.append(Witness(index, source, _table_at(saved, index)))
    return found


def _kept(snapshot: Snapshot, servers: Servers) -> dict[int, Kept]:
    """The states that can be read. One that a server writes just now is looked at again."""
    for _ in range(LOOKS):
        found = states.kept(snapshot.directory, servers)
        if not any(kept.in_use and kept.problem for kept in found):
            break
    return {kept.shard: kept for kept in found if not kept.problem}


def _table_at(tables: Sequence[Table], index: int) -> Table:
    return tables[index] if index < len(tables) else {}


def _newest(snapshot: Snapshot) -> tuple[list[Table], str]:
    """The tables of the newest checkpoint, by shard, and its directory."""
    found = checkpoints.complete(snapshot.directory)
    return (_tables(found[-1]), str(found[-1])) if found else ([], "")


def _tables(directory: Path) -> list[Table]:
    shards = checkpoints.read_manifest(directory)["shards"]
    return [table_of(part["state"].get("deliveries")) for part in shards]


def _resumed(snapshot: Snapshot) -> list[Table]:
    resume = snapshot.run.get("resume")
    if not isinstance(resume, str) or not resume:
        return []
    try:
        return _tables(Path(resume))
    except DlctlError:  # it has been removed since
        return []


def _merged(snapshot: Snapshot, shards: int) -> list[Table]:
    """What all checkpoints together know, by shard: the highest count of each epoch."""
    merged: list[Table] = [{} for _ in range(shards)]
    for directory in checkpoints.complete(snapshot.directory):
        for known, table in zip(merged, _tables(directory), strict=False):
            for key, count in table.items():
                known[key] = max(count, known.get(key, 0))
    return merged
