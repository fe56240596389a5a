"""Was an acknowledged push lost? Compares the workers' ack records with the shards' records.

Every incarnation of a worker records up to which push each shard has acknowledged
(`dlctl/runs/acks.py`). Every shard records, per slot and term, up to which push it has applied:
in the state that its server stores, else in the newest good checkpoint. A checkpoint that is
damaged, or that the run abandoned for an older one, proves nothing: its content is not in the
shards.

Pushes acknowledged before the run resumed from a checkpoint are not judged: the cost of the
rollback is in the run's events. If a shard has discarded an old term, the result is "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlctl.job import placement
from dlctl.job.config import JobFile
from dlctl.ops import remains
from dlctl.records.manifest import Manifest
from dlctl.roles.server.dedup import PAST_KEPT
from dlctl.runs import acks, checkpoints, lineage
from dlctl.runs.acks import AckRecord
from dlctl.runs.database import RunDb
from dlctl.runs.kept_shards import KeptShard
from dlctl.runs.snapshot import Snapshot
from dlctl.util.names import HOME_AGENT

LOOKS = 5
"""Attempts to read a state that a live server is writing."""
Table = dict[tuple[int, int], int]
"""(slot, term) -> pushes that were applied."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One shard and one incarnation of a worker."""

    worker: str
    incarnation: int
    term: int
    shard: int
    acknowledged: int
    recorded: int | None
    """Pushes that the shard is known to have applied; None if unknown."""
    why: str
    """Why `recorded` is unknown; "" if it is known."""

    @property
    def lost(self) -> int | None:
        """Pushes that were acknowledged but not recorded; None if unknown."""
        return None if self.recorded is None else max(0, self.acknowledged - self.recorded)


class Witness(NamedTuple):
    """The source of one shard's records."""

    shard: int
    source: str
    """A path; "" if there is none."""
    table: Table | None
    """None: its server is alive and stores nothing, or its host cannot be queried now."""
    why: str = ""
    """Why there is no table."""


class Judgement(NamedTuple):
    verdicts: list[Verdict]
    witnesses: list[Witness]
    before: int
    """Pushes acknowledged before the run resumed from a checkpoint: they are not judged."""

    @property
    def acknowledged(self) -> int:
        return sum(verdict.acknowledged for verdict in self.verdicts)

    @property
    def lost(self) -> int:
        return sum(verdict.lost or 0 for verdict in self.verdicts)

    @property
    def unchecked(self) -> Counter[str]:
        """Why -> acknowledged pushes whose outcome is unknown."""
        found: Counter[str] = Counter()
        for verdict in self.verdicts:
            if verdict.lost is None:
                found[verdict.why] += verdict.acknowledged
        return found


def judge(snapshot: Snapshot) -> Judgement:
    """Every shard against every incarnation. Raises DlctlError if a record cannot be read.

    The acks are read first: pushes that a shard applies after that do no harm. Checkpoints are
    hashed if a witness is needed and no server has left one.
    """
    records = acks.read_all(snapshot.directory)
    with closing(RunDb(snapshot.directory, readonly=True)) as db:
        resumes = lineage.resumes(db)
    ended = resumes[-1].terms if resumes else {}
    branch = lineage.chain(resumes)
    found = checkpoints.finished(snapshot.directory)
    own = [path for path in found if lineage.is_of_branch(checkpoints.number(path)[0], branch)]
    witnesses, own = _witnesses(snapshot, own)
    proofs = _proofs(own, len(witnesses))
    verdicts, before = list[Verdict](), 0
    for record in records:
        name = f"worker-{record.slot}"
        if record.term <= ended.get(name, -1):
            before += sum(record.counts)
            continue
        for shard, count in enumerate(record.counts):
            recorded, why = _recorded(witnesses, proofs, record, shard)
            verdicts.append(
                Verdict(name, record.incarnation, record.term, shard, count, recorded, why)
            )
    return Judgement(verdicts, witnesses, before)


def _recorded(
    witnesses: Sequence[Witness], proofs: Sequence[Table], record: AckRecord, shard: int
) -> tuple[int | None, str]:
    """(recorded pushes, why they are unknown)."""
    count, recorded, why = record.counts[shard], None, "the model was sharded differently then"
    if not count:
        return 0, ""
    if len(record.counts) == len(witnesses):
        table, why = witnesses[shard].table, witnesses[shard].why
        if table is not None:
            recorded = recorded_pushes(table, record.slot, record.term)
            why = "they are of processes that the shards no longer have records of"
    if recorded is None and shard < len(proofs):
        proven = proofs[shard].get((record.slot, record.term), -1)
        recorded = proven if proven >= count else None
    return recorded, why if recorded is None else ""


def recorded_pushes(table: Mapping[tuple[int, int], int], slot: int, term: int) -> int | None:
    """Pushes of this term that the shard has applied; None if it has records of newer terms only.

    A shard discards the oldest terms first. So a term missing between two recorded ones never
    pushed to this shard.
    """
    if (slot, term) in table:
        return table[slot, term]
    known = [other for of, other in table if of == slot]
    if not known:
        return 0 if len(table) < PAST_KEPT else None
    return None if min(known) > term else 0


def table_of(rows: Any) -> Table:
    """Rows [slot, term, next number, settled beyond it ...] of a shard; skips malformed rows.

    One slot may have several rows: its newest term and earlier ones.
    """
    table: Table = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) >= 3 and all(type(n) is int for n in row):
            slot, term, count, *ahead = row
            while count in ahead:
                count += 1
            table[slot, term] = count
    return table


def _witnesses(snapshot: Snapshot, own: list[Path]) -> tuple[list[Witness], list[Path]]:
    """One per shard, and those of the run's own checkpoints that are not newer than the one among
    them. The content of a damaged one is unknown: that is no proof of a loss.
    """
    job = remains.read_jobfile(snapshot.directory)
    is_over = snapshot.state in ("stopped", "finished")
    kept, away = ({}, {}) if is_over else _kept(snapshot, job)
    saved, tables, mute = "", list[Table](), ""
    if snapshot.is_live:
        mute = "the servers that had them are alive and store nothing readable"
    elif len(kept) + len(away) < job.servers.count:
        damaged: list[str] = []
        if good := lineage.first_good(reversed(own), damaged.append):
            saved, tables, own = str(good[0]), _tables(good[1]), own[: own.index(good[0]) + 1]
        elif damaged:
            mute, own = f"no checkpoint is good: {damaged[0]}", []
    found = []
    for index in range(max(job.servers.count, len(tables))):
        if index in kept:
            table = table_of(kept[index].deliveries)
            found.append(Witness(index, str(kept[index].path), table))
        elif why := away.get(index, mute):
            found.append(Witness(index, "", None, why))
        elif index < len(tables):
            found.append(Witness(index, saved, tables[index]))
        else:
            found.append(Witness(index, "", {}))
    return found, own


def _kept(snapshot: Snapshot, job: JobFile) -> tuple[dict[int, KeptShard], dict[int, str]]:
    """The readable states, and why others are unavailable, both by shard. A state that a server is
    writing is read again; other hosts are queried again only if it is theirs.
    """
    placed = placement.place(job)
    agents = {index: placed[f"server-{index}"] for index in range(job.servers.count)}
    left = remains.look(snapshot, job, ask_hosts=True)
    for _ in range(LOOKS - 1):
        written = [index for index, kept in left.kept.items() if kept.in_use and kept.problem]
        if not written:
            break
        is_theirs = any(agents.get(index, HOME_AGENT) != HOME_AGENT for index in written)
        left.kept.update(remains.look(snapshot, job, ask_hosts=is_theirs).kept)
    away = {index: left.away[agent] for index, agent in agents.items() if agent in left.away}
    return {shard: kept for shard, kept in left.kept.items() if not kept.problem}, away


def _tables(manifest: Manifest) -> list[Table]:
    return [table_of(part["state"].get("deliveries")) for part in manifest["shards"]]


def _proofs(own: Sequence[Path], shards: int) -> list[Table]:
    """The merged records of these checkpoints, by shard: each proves what it has."""
    merged: list[Table] = [{} for _ in range(shards)]
    for directory in own:
        if checkpoints.verify(directory, hashes=False):
            continue
        tables = _tables(checkpoints.read_manifest(directory))
        for known, table in zip(merged, tables, strict=False):
            for key, count in table.items():
                known[key] = max(count, known.get(key, 0))
    return merged
