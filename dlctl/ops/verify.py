"""Was an acknowledged push lost? What workers were told, against what the shards have on record.

Every incarnation of a worker has in writing up to which push each shard has acknowledged it
(`dlctl/runs/acks.py`). Every shard keeps, per slot and epoch, up to which push it has taken them:
in the state that its server keeps, else in the newest good checkpoint. A checkpoint that is
damaged, or that the run has left for an older one, proves nothing: what it has is not in the
shards.

What was acknowledged before the run went back to a checkpoint is not judged: what that cost is in
the run's events. A shard that has forgotten an old epoch cannot be asked about it: "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlctl import placement
from dlctl.config import JobFile
from dlctl.ops import remains
from dlctl.roles.server.dedup import PAST_KEPT
from dlctl.runs import acks, checkpoints, lineage
from dlctl.runs.acks import AckRecord
from dlctl.runs.database import RunDb
from dlctl.runs.kept_shards import Kept
from dlctl.runs.snapshot import Snapshot
from dlctl.util.names import HOME_AGENT

LOOKS = 5
"""At a state that a living server writes."""
FORGOTTEN = (
    "they are of processes that have been replaced since, and the shards have forgotten those"
)
MUTE = 'the servers that had them live, and keep nothing that can be read (durability = "none")'
OTHER_SHARDS = "the model was cut into other shards then"
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
    """Pushes that the shard is known to have taken; None if nobody can tell."""
    why: str
    """Why nobody can tell, in words; "" if that is known."""

    @property
    def lost(self) -> int | None:
        """Pushes that were acknowledged and are not there; None if nobody can tell."""
        return None if self.recorded is None else max(0, self.acknowledged - self.recorded)


class Witness(NamedTuple):
    """Where the word of one shard comes from."""

    shard: int
    source: str
    """A path; "" if there is none."""
    table: Table | None
    """None: its server lives and has nothing in writing, or nobody can ask for it now."""
    why: str = ""
    """Why there is no table."""


class Judgement(NamedTuple):
    verdicts: list[Verdict]
    witnesses: list[Witness]
    before: int
    """Acknowledged pushes of before the run went back to a checkpoint: they are not judged."""
    went_back: str
    """To which checkpoint it went back last, and what that cost; "" if it never did."""

    @property
    def acknowledged(self) -> int:
        return sum(verdict.acknowledged for verdict in self.verdicts)

    @property
    def lost(self) -> int:
        return sum(verdict.lost or 0 for verdict in self.verdicts)

    @property
    def unchecked(self) -> Counter[str]:
        """Why -> acknowledged pushes that nobody can tell of."""
        found: Counter[str] = Counter()
        for verdict in self.verdicts:
            if verdict.lost is None:
                found[verdict.why] += verdict.acknowledged
        return found


def judge(snapshot: Snapshot) -> Judgement:
    """Every shard against every incarnation. Raises DlctlError if a record cannot be read.

    The acks are read first: what a shard takes after that does no harm. Checkpoints are hashed if
    a witness is needed and no server has left one.
    """
    records = acks.read_all(snapshot.directory)
    with closing(RunDb(snapshot.directory, readonly=True)) as db:
        resumes = lineage.resumes(db)
    last = resumes[-1] if resumes else None
    branch = lineage.chain(resumes)
    found = checkpoints.finished(snapshot.directory)
    own = [path for path in found if lineage.is_of_branch(checkpoints.number(path)[0], branch)]
    witnesses, damaged = _witnesses(snapshot, own)
    proofs = _proofs([path for path in own if path not in damaged], len(witnesses))
    verdicts, before = list[Verdict](), 0
    for record in records:
        name = f"worker-{record.slot}"
        if last is not None and last.is_after(name, record.epoch):
            before += sum(record.counts)
            continue
        for shard, count in enumerate(record.counts):
            recorded, why = _recorded(witnesses, proofs, record, shard)
            verdicts.append(
                Verdict(name, record.incarnation, record.epoch, shard, count, recorded, why)
            )
    return Judgement(verdicts, witnesses, before, last.told if last is not None else "")


def _recorded(
    witnesses: Sequence[Witness], proofs: Sequence[Table], record: AckRecord, shard: int
) -> tuple[int | None, str]:
    """(what there is of it, why that is not known)."""
    count, recorded, why = record.counts[shard], None, OTHER_SHARDS
    if not count:
        return 0, ""
    if len(record.counts) == len(witnesses):
        table, why = witnesses[shard].table, witnesses[shard].why
        if table is not None:
            recorded, why = recorded_pushes(table, record.slot, record.epoch), FORGOTTEN
    if recorded is None and shard < len(proofs):
        proven = proofs[shard].get((record.slot, record.epoch), -1)
        recorded = proven if proven >= count else None
    return recorded, why if recorded is None else ""


def recorded_pushes(table: Mapping[tuple[int, int], int], slot: int, epoch: int) -> int | None:
    """Pushes of this epoch that the shard has taken; None if it knows newer epochs only.

    What is replaced first is forgotten first. So an epoch between two that it knows has never been
    one of this shard's.
    """
    if (slot, epoch) in table:
        return table[slot, epoch]
    known = [other for of, other in table if of == slot]
    if not known:
        return 0 if len(table) < PAST_KEPT else None
    return None if min(known) > epoch else 0


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


def _witnesses(snapshot: Snapshot, own: Sequence[Path]) -> tuple[list[Witness], Collection[Path]]:
    """One per shard, and the checkpoints that were read for that, and are damaged."""
    job = remains.read_jobfile(snapshot.directory)
    is_over = snapshot.state in ("stopped", "finished")
    kept, away = ({}, {}) if is_over else _kept(snapshot, job)
    saved, damaged, tables = None, dict[Path, str](), list[Table]()
    if not snapshot.is_live and len(kept) + len(away) < job.servers.count:
        saved, damaged = _newest_good(own)
        tables = _tables(saved) if saved is not None else []
    mute = "" if saved else next(iter(damaged.values()), "")
    found = []
    for index in range(max(job.servers.count, len(tables))):
        if index in kept:
            table = table_of(kept[index].deliveries)
            found.append(Witness(index, str(kept[index].path), table))
        elif why := away.get(index, MUTE if snapshot.is_live else mute):
            found.append(Witness(index, "", None, why))
        else:
            has_one = index < len(tables)
            found.append(
                Witness(index, str(saved) if has_one else "", tables[index] if has_one else {})
            )
    return found, damaged


def _kept(snapshot: Snapshot, job: JobFile) -> tuple[dict[int, Kept], dict[int, str]]:
    """The states that can be read, and why others cannot be asked for, both by shard. One that a
    server writes just now is looked at again; hosts are asked again only if it is theirs.
    """
    placed = placement.place(job)
    agents = {index: placed[f"server-{index}"] for index in range(job.servers.count)}
    left = remains.look(snapshot, job, ask_hosts=True)
    found = left.kept
    for _ in range(LOOKS - 1):
        written = [index for index, kept in found.items() if kept.in_use and kept.problem]
        if not written:
            break
        is_theirs = any(agents.get(index, HOME_AGENT) != HOME_AGENT for index in written)
        found |= remains.look(snapshot, job, ask_hosts=is_theirs).kept
    away = {index: left.away[agent] for index, agent in agents.items() if agent in left.away}
    return {shard: kept for shard, kept in found.items() if not kept.problem}, away


def _newest_good(own: Sequence[Path]) -> tuple[Path | None, dict[Path, str]]:
    """(the newest of these checkpoints in which every byte is right, what is wrong with those that
    are newer). What a damaged one had cannot be known: that is no proof of a loss.
    """
    damaged = dict[Path, str]()
    for path in reversed(own):
        if not (problems := checkpoints.verify(path)):
            return path, damaged
        damaged[path] = f"no checkpoint is good: {problems[0]}"
    return None, damaged


def _tables(directory: Path) -> list[Table]:
    shards = checkpoints.read_manifest(directory)["shards"]
    return [table_of(part["state"].get("deliveries")) for part in shards]


def _proofs(own: Sequence[Path], shards: int) -> list[Table]:
    """What these checkpoints together know, by shard: each proves what it has."""
    merged: list[Table] = [{} for _ in range(shards)]
    for directory in own:
        if checkpoints.verify(directory, hashes=False):
            continue
        for known, table in zip(merged, _tables(directory), strict=False):
            for key, count in table.items():
                known[key] = max(count, known.get(key, 0))
    return merged
