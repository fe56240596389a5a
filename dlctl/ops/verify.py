"""Was an acknowledged push lost? What workers were told, against what the shards have on record.

Every incarnation of a worker has in writing up to which push each shard has acknowledged it
(`dlctl/runs/acks.py`). Every shard keeps, per slot and epoch, up to which push it has taken them:
in the state that its server keeps, else in the newest good checkpoint. A checkpoint that is
damaged, or that the run has left for an older one, proves nothing: what it has is not in the
shards.

Epochs of before the run went back to a checkpoint are judged by that checkpoint. A shard that has
forgotten an old epoch cannot be asked about it: "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlctl import placement
from dlctl.config import JobFile
from dlctl.ops import remains
from dlctl.roles.server.dedup import PAST_KEPT
from dlctl.runs import acks, branches, checkpoints, facts, lineage
from dlctl.runs.acks import AckRecord
from dlctl.runs.branches import Resume
from dlctl.runs.kept_shards import Kept
from dlctl.runs.snapshot import Snapshot
from dlctl.util.names import HOME_AGENT

LOOKS = 5
"""At a state that a living server writes."""
FORGOTTEN = (
    "they are of processes that have been replaced since, and the shards have forgotten those"
)
MUTE = 'the servers that had them live, and keep nothing that can be read (durability = "none")'
GONE = "the checkpoint that the run went back to then is not there any more"
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


@dataclass(frozen=True, slots=True)
class Witness:
    """Where the word of one shard comes from."""

    shard: int
    source: str
    """A path; "" if there is none."""
    table: Table | None
    """None: its server lives and has nothing in writing, or nobody can ask for it now."""
    is_saved: bool = False
    """Its server and its state are gone: what the checkpoint has is all that there is."""
    why: str = ""
    """Why there is no table."""
    is_damaged: bool = False
    """That is so because its server and state are gone, and all checkpoints are damaged."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A checkpoint that the run went back to, and what its shards had taken."""

    resume: Resume
    tables: list[Table]
    """By shard; [] if it has been removed since."""

    def is_after(self, record: AckRecord) -> bool:
        return self.resume.is_after(f"worker-{record.slot}", record.epoch)

    def fits(self, record: AckRecord) -> bool:
        """Whether the model was cut into as many shards then."""
        return len(self.tables) == len(record.counts)

    def recorded(self, record: AckRecord, shard: int) -> int | None:
        """What of this epoch was in the checkpoint; None if it does not tell."""
        if not self.fits(record):
            return None
        if self.is_after(record):
            return recorded_pushes(self.tables[shard], record.slot, record.epoch)
        return self.tables[shard].get((record.slot, record.epoch))


def judge(snapshot: Snapshot) -> tuple[list[Verdict], list[Witness]]:
    """Every shard against every incarnation. Raises DlctlError if a record cannot be read.

    The acks are read first: what a shard takes after that does no harm. Checkpoints are hashed if
    a witness is needed and no server has left one.
    """
    records = acks.read_all(snapshot.directory)
    resumes = lineage.resumes(snapshot)
    own = lineage.of_branch(snapshot, branches.chain(resumes))
    witnesses, last = _witnesses(snapshot, own)
    terms: dict[str, int] = {}
    for record in records:
        name = f"worker-{record.slot}"
        terms[name] = max(record.epoch, terms.get(name, 0))
    # What is left only in a checkpoint is as if the run had gone back to that already.
    fallen = [*resumes, Resume(*last, terms)]
    court = _Court(
        witnesses, _steps(snapshot, resumes), _steps(snapshot, fallen), _merged(own, len(witnesses))
    )
    verdicts = [
        court.verdict(record, shard, count)
        for record in records
        for shard, count in enumerate(record.counts)
    ]
    return verdicts, witnesses


@dataclass(frozen=True, slots=True)
class _Court:
    witnesses: Sequence[Witness]
    branch: list[_Step]
    """The newest one first."""
    fallen: list[_Step]
    """The same for shards of which only a checkpoint is left."""
    merged: list[Table]
    """Of all checkpoints of the branch: each proves what it has, and nothing of what came later."""

    def verdict(self, record: AckRecord, shard: int, count: int) -> Verdict:
        recorded, why = self._recorded(record, shard) if count else (0, "")
        if recorded is None:
            proven = _table_at(self.merged, shard).get((record.slot, record.epoch), -1)
            recorded, why = (proven, "") if proven >= count else (None, why)
        name = f"worker-{record.slot}"
        return Verdict(name, record.incarnation, record.epoch, shard, count, recorded, why)

    def _recorded(self, record: AckRecord, shard: int) -> tuple[int | None, str]:
        """(what there is of it, why that is not known). First the checkpoints that it was of."""
        is_same_cut = len(record.counts) == len(self.witnesses)
        witness = self.witnesses[shard] if is_same_cut else None
        is_saved = witness.is_saved if witness else all(w.is_saved for w in self.witnesses)
        branch = self.fallen if is_saved else self.branch
        for step in branch:
            recorded = step.recorded(record, shard)
            if recorded is not None:
                return recorded, ""
            if not step.is_after(record):
                break
        before = [step for step in branch if step.is_after(record)]
        why = GONE if before and not any(step.fits(record) for step in before) else FORGOTTEN
        if witness is None:
            return None, why  # The slices were others.
        if witness.table is None:
            return None, why if before else witness.why
        return recorded_pushes(witness.table, record.slot, record.epoch), why


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


def _witnesses(snapshot: Snapshot, own: Sequence[Path]) -> tuple[list[Witness], tuple[int, int]]:
    """One per shard; and (its number, the highest one) of the checkpoint that some of them are."""
    job = remains.read_jobfile(snapshot.directory)
    is_over = snapshot.state in ("stopped", "finished")
    kept, away = ({}, {}) if is_over else _kept(snapshot, job)
    saved, damage = None, ""
    if not snapshot.is_live and len(kept) + len(away) < job.servers.count:
        saved, damage = _newest_good(snapshot, own)
    tables = _tables(saved) if saved is not None else []
    found = []
    for index in range(max(job.servers.count, len(tables))):
        if index in kept:
            table = table_of(kept[index].deliveries)
            found.append(Witness(index, str(kept[index].path), table))
        elif snapshot.is_live or index in away:
            found.append(Witness(index, "", None, why=away.get(index, MUTE)))
        elif damage:
            found.append(Witness(index, "", None, why=damage, is_damaged=True))
        else:
            source = str(saved) if index < len(tables) else ""
            found.append(Witness(index, source, _table_at(tables, index), is_saved=True))
    highest = checkpoints.highest_number(snapshot.directory)
    return found, (checkpoints.number(saved)[0] if saved is not None else 0, highest)


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


def _table_at(tables: Sequence[Table], index: int) -> Table:
    return tables[index] if index < len(tables) else {}


def _newest_good(snapshot: Snapshot, own: Sequence[Path]) -> tuple[Path | None, str]:
    """(the newest of these checkpoints in which every byte is right, why nobody knows what is left
    if there is none). What a damaged one had cannot be known: that is no proof of a loss.
    """
    good = next((path for path in reversed(own) if not checkpoints.verify(path)), None)
    if good is not None:
        return good, ""
    left = set(checkpoints.complete(snapshot.directory)) - set(own)
    of_branch = [path for path in checkpoints.finished(snapshot.directory) if path not in left]
    damaged = [found[0] for path in reversed(of_branch) if (found := checkpoints.verify(path))]
    return None, f"{facts.damaged_in_words(len(damaged))}: {damaged[0]}" if damaged else ""


def _tables(directory: Path) -> list[Table]:
    shards = checkpoints.read_manifest(directory)["shards"]
    return [table_of(part["state"].get("deliveries")) for part in shards]


def _steps(snapshot: Snapshot, resumes: Sequence[Resume]) -> list[_Step]:
    """Every time that the run went back to a checkpoint, on its way to where it is now."""
    found = checkpoints.complete(snapshot.directory)
    paths = {checkpoints.number(path)[0]: path for path in found}
    return [
        _Step(resume, _tables(paths[resume.checkpoint]) if resume.checkpoint in paths else [])
        for resume in branches.chain(resumes)
    ]


def _merged(own: Sequence[Path], shards: int) -> list[Table]:
    """What these checkpoints together know, by shard: the highest count of each epoch."""
    merged: list[Table] = [{} for _ in range(shards)]
    for directory in own:
        if checkpoints.verify(directory, hashes=False):
            continue
        for known, table in zip(merged, _tables(directory), strict=False):
            for key, count in table.items():
                known[key] = max(count, known.get(key, 0))
    return merged
