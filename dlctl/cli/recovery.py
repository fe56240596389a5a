"""What is left of a run that has died, what can be done with it, and what that would lose.

Two ways lead back. A run *goes on* if its coordinator's memory is there and every shard is, alive
or as its server has kept it: nothing is lost then. Otherwise it *resumes* from its newest good
checkpoint, and everything since is done again. None does without a host that is needed: as long as
it cannot be reached, nobody knows what is there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlctl.cli import (
    belonging,
    causes,
    checkpoint_choice,
    console,
    lineage,
    remains,
    report,
    values,
)
from dlctl.cli.remains import ITS_SERVER_IS, KEEPS_NOTHING, NO_STATE, Shard, obstacle
from dlctl.cli.snapshot import Snapshot, newest_whole
from dlctl.errors import DlctlError
from dlctl.runs import checkpoints, preferred
from dlctl.runs.database import RunDb
from dlctl.util import processes
from dlctl.util.text import plural

HEALTHY, SILENT, SUPERVISED, GO_ON, RESUME, OVER, NOTHING, AWAY = (
    "healthy", "silent", "supervised", "go on", "resume", "over", "nothing", "away",
)  # fmt: skip
"""It lives; its coordinator stands still; its agent starts the coordinator again; the two ways; it
has ended in order; none; none until its hosts can be reached."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Findings:
    snapshot: Snapshot
    way: str
    """HEALTHY, SILENT, SUPERVISED, GO_ON, RESUME, OVER, NOTHING or AWAY."""
    causes: list[str]
    living: list[str]
    shards: list[Shard]
    obstacles: list[str]
    """Why it cannot go on without a loss; [] if it can."""
    was_at_work: bool
    """Whether all of its daemons were ready once, since it was started last."""
    step: int
    """That the run has come to."""
    checkpoint: tuple[Path, Json] | None = None
    damaged: list[str] = field(default_factory=list)
    """What is wrong with newer checkpoints than that."""
    away: dict[str, str] = field(default_factory=dict)
    """Agents whose hosts cannot be reached, and why."""

    @property
    def lost_steps(self) -> int:
        """Steps that are done again, or never more."""
        if self.way == NOTHING:
            return self.step
        if self.way != RESUME or self.checkpoint is None:
            return 0
        return max(0, self.step - int(self.checkpoint[1]["step"]))

    @property
    def loses_nothing(self) -> bool:
        """Whether it can go on without a loss, and has anything to lose."""
        return self.way == GO_ON and (self.snapshot.is_gone or self.has_updates)

    @property
    def has_updates(self) -> bool:
        """Whether there is anything to lose: updates come long before the first step counts."""
        return self.step > 0 or any(map(_may_have_updates, self.shards))

    @property
    def done(self) -> str:
        """What the run has done, in words: as in "26,160 steps", or "7 updates" before the first
        of them counts."""
        updates = sum(shard.version or 0 for shard in self.shards)
        return plural(self.step, "step") if self.step else plural(updates, "update")

    def lost_updates(self) -> dict[str, int | None]:
        """Server -> updates of its shard that are lost; None if nobody knows how many."""
        if self.way == NOTHING:
            return {shard.name: shard.version for shard in self.shards}
        if self.way != RESUME or self.checkpoint is None:
            return dict.fromkeys((shard.name for shard in self.shards), 0)
        saved = {p["name"]: p["state"].get("version") for p in self.checkpoint[1]["shards"]}
        return {shard.name: _behind(shard.version, saved.get(shard.name)) for shard in self.shards}


def _may_have_updates(shard: Shard) -> bool:
    """Of one that cannot be looked at, what is known may be old."""
    return shard.version != 0 or bool(shard.problem)


def _behind(version: int | None, saved: Any) -> int | None:
    return None if version is None or type(saved) is not int else max(0, version - saved)


def examine(
    snapshot: Snapshot,
    *,
    from_checkpoint: bool = False,
    number: int | None = None,
    read_checkpoints: bool = True,
    ask_hosts: bool = True,
) -> Findings:
    """Look at everything; nothing is changed. Checkpoints are read only if they are needed, and
    not at all if the caller does not want to wait for that; likewise the other hosts are asked.
    `number`: of the checkpoint that is wanted, with `from_checkpoint`.

    Raises DlctlError for a directory that is not the run's own (see `belonging`), or if the
    checkpoint that is wanted is not there, or damaged.
    """
    in_place = belonging.check(snapshot)
    memory = read_memory(snapshot.directory)
    job = remains.read_jobfile(snapshot.directory)
    left = remains.look(snapshot, job, ask_hosts=ask_hosts and _has_died(snapshot))
    shards = remains.shards(snapshot, memory, job, left)
    obstacles = _obstacles(snapshot, memory, shards)
    if not in_place:
        moved = "the directory was moved or restored: what is kept elsewhere may be of another time"
        obstacles = [moved, *obstacles]
    way = _way(snapshot, obstacles, from_checkpoint)
    checkpoint, damaged = None, list[str]()
    if way == RESUME and read_checkpoints:
        if number is None:
            ordered = preferred.order(snapshot.directory)
            checkpoint = checkpoints.newest_good(snapshot.directory, damaged.append, ordered)
        else:
            checkpoint = checkpoint_choice.good(snapshot, number)
        way = RESUME if checkpoint is not None else NOTHING
    if way in (RESUME, NOTHING) and left.away:
        way = AWAY
    step = values.number(memory["work"][0]) if "work" in memory else None
    seen = values.number(snapshot.run.get("step")) or 0.0
    living = [*_living(snapshot), *left.living]
    is_there = has_coordinator(snapshot)
    ends = causes.of(snapshot, living, is_there=is_there, is_led=is_led(snapshot))
    return Findings(
        snapshot, way, ends, living, shards, obstacles,
        _was_at_work(snapshot, memory), int(max(step or 0.0, seen)), checkpoint, damaged, left.away,
    )  # fmt: skip


def at_a_glance(snapshot: Snapshot) -> Findings | None:
    """The same, as far as it can be seen here and at once; None if the directory is strange."""
    try:
        return examine(snapshot, read_checkpoints=False, ask_hosts=False)
    except DlctlError:
        return None


def _way(snapshot: Snapshot, obstacles: list[str], from_checkpoint: bool) -> str:
    if snapshot.state in ("stopped", "finished"):
        return OVER
    if snapshot.is_live:
        if snapshot.silent_s is not None:
            return SILENT
        if is_led(snapshot) or snapshot.run.get("pid") is None:
            return HEALTHY
        if not from_checkpoint and not obstacles:
            return SUPERVISED
    if from_checkpoint:
        return RESUME
    return RESUME if obstacles else GO_ON


def _has_died(snapshot: Snapshot) -> bool:
    """Whether anybody wants to know what is left of it on other hosts."""
    is_over = snapshot.state in ("stopped", "finished")
    return not is_over and not (snapshot.is_live and has_coordinator(snapshot))


def has_begun(snapshot: Snapshot) -> bool:
    """Whether it can have done anything, as far as is on record here. Raises DlctlError."""
    return report.has_begun(snapshot) or _was_at_work(snapshot, read_memory(snapshot.directory))


def _was_at_work(snapshot: Snapshot, memory: Json) -> bool:
    return _has_released(memory) if memory else report.has_begun(snapshot)


def _has_released(memory: Json) -> bool:
    return bool(memory) and memory["run"][2] is not None


def has_coordinator(snapshot: Snapshot) -> bool:
    return processes.is_alive(snapshot.run.get("pid"), snapshot.run.get("pid_start"))


def is_led(snapshot: Snapshot) -> bool:
    """Whether it lives, and its coordinator is there and has said so, or works and cannot write it.
    One that ends at once, as its agent starts it again and again, is there for a moment each time.
    """
    said = snapshot.run.get("updated_by") in (None, snapshot.run.get("pid_start"))
    is_there = snapshot.is_live and has_coordinator(snapshot)
    return is_there and (said or snapshot.unwritten_s is not None)


def read_memory(directory: Path) -> Json:
    """What the coordinator has remembered for its successor; {} if that is of no use."""
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            memory = db.memory()
    except (sqlite3.Error, ValueError) as error:
        raise DlctlError(f"cannot read what the coordinator knew: {error}") from error
    return memory if {"run", "work"} <= memory.keys() else {}


def _living(snapshot: Snapshot) -> list[str]:
    rows = processes.living(row for row in snapshot.daemons if row["name"] != "coordinator")
    there = ["coordinator"] if has_coordinator(snapshot) else []
    return there + [str(row["name"]) for row in rows]


# ---------------------------------------------------------------- obstacles


def _obstacles(snapshot: Snapshot, memory: Json, shards: list[Shard]) -> list[str]:
    found = [] if memory else ["the coordinator has left no memory to go on with"]
    found += [obstacle(shard) for shard in shards if shard.problem]
    if _has_released(memory) and not _survives_coordinator(snapshot):
        found.append("this method lives in the coordinator's process and cannot be gone on with")
    return found


def _survives_coordinator(snapshot: Snapshot) -> bool:
    from dlctl import registry

    name = str(snapshot.run.get("algorithm") or "")
    return not name or "server" in registry.load("algorithms", name).shape.survives


# ---------------------------------------------------------------- in words


def lines(findings: Findings) -> list[str]:
    """All that was found, for people; escaped."""
    found = [f"cause       {cause}" for cause in findings.causes]
    if findings.living:
        found.append(f"alive       {', '.join(findings.living)}")
    saved = dict[str, Any]()
    if findings.checkpoint is not None:
        path, data = findings.checkpoint
        saved = {part["name"]: part["state"].get("version") for part in data["shards"]}
        at = values.ago(data["at"], findings.snapshot.now)
        found.append(f"checkpoint  step {values.count(data['step'])}, {at}, {values.path(path)}")
    found += [f"damaged     {problem}" for problem in findings.damaged]
    found += [_shard_line(findings, shard, saved.get(shard.name)) for shard in findings.shards]
    if findings.way in (RESUME, NOTHING, AWAY):
        found += [f"obstacle    {text}" for text in findings.obstacles]
    return [console.escape(line) for line in found]


def _shard_line(findings: Findings, shard: Shard, saved: Any) -> str:
    what = "alive" if shard.alive else shard.problem or "its state can be used"
    if not findings.was_at_work and not shard.alive and not shard.path:
        what = "there is nothing of it yet"
    at = "" if shard.version is None else f", version {values.count(shard.version)}"
    at += " at least" if at and not shard.is_exact and not shard.alive else ""
    checkpoint = f" (the checkpoint has {values.count(saved)})" if type(saved) is int else ""
    where = f", {values.path(shard.path)}" if shard.path and not shard.alive else ""
    return f"{shard.name:<10}  {what}{at}{checkpoint}{where}"


def cost(findings: Findings, why: str = "") -> str:
    """What it costs to resume, and why it had to be, for the run's events; "" if nothing is lost.

    As in "183 steps are done again, 192 updates are lost, because server-0 and server-1 are gone
    and left no state, and checkpoint 16 is damaged". `why`: if nothing stood in the way.
    """
    assert findings.checkpoint is not None
    steps = findings.lost_steps
    parts = [f"{plural(steps, 'step')} {'is' if steps == 1 else 'are'} done again"] if steps else []
    known = [updates for updates in findings.lost_updates().values() if updates is not None]
    if len(known) < len(findings.shards):
        parts.append("an unknown number of updates is lost")
    elif sum(known):
        lost = f"{plural(sum(known), 'update')} {'is' if sum(known) == 1 else 'are'} lost"
        is_exact = all(shard.is_exact for shard in findings.shards)
        parts.append(lost if is_exact else f"at least {lost}")
    if not parts:
        return ""
    reasons = [*_reasons(findings)] or [why]
    reasons.append(lineage.skipped(findings.snapshot.directory, findings.checkpoint[0]))
    because = ", and ".join(filter(None, reasons))
    return ", ".join(parts) + (f", because {because}" if because else "")


def cost_of_going_back(findings: Findings) -> str:
    """The same before anything is done; "" too if it is not what is left that leads back to the
    newest checkpoint. Its bytes are not read.
    """
    newest = newest_whole(findings.snapshot.directory)
    if newest is None or not findings.obstacles:
        return ""
    return cost(replace(findings, way=RESUME, checkpoint=newest))


def _reasons(findings: Findings) -> Iterator[str]:
    """The obstacles as parts of a sentence, those of shards together."""
    told = set[str]()
    for problem in (NO_STATE, KEEPS_NOTHING):
        shards = [shard for shard in findings.shards if shard.problem == problem]
        told |= {obstacle(shard) for shard in shards}
        if shards:
            names = " and ".join(shard.name for shard in shards)
            verb = "is" if len(shards) == 1 else "are"
            yield f"{names} {verb} {problem.removeprefix(ITS_SERVER_IS)}"
    yield from (text for text in findings.obstacles if text not in told)


def as_data(findings: Findings) -> Json:
    """The same as JSON."""
    checkpoint = findings.checkpoint
    return {
        "run_id": findings.snapshot.run_id,
        "state": findings.snapshot.state,
        "reason": findings.snapshot.reason,
        "way": findings.way,
        "causes": findings.causes,
        "alive": findings.living,
        "obstacles": findings.obstacles,
        "away": findings.away,
        "was_at_work": findings.was_at_work,
        "step": findings.step,
        "shards": [
            {
                key: getattr(shard, key)
                for key in ("name", "alive", "problem", "version", "is_exact", "path")
            }
            for shard in findings.shards
        ],
        "checkpoint": None
        if checkpoint is None
        else {"directory": str(checkpoint[0]), "step": checkpoint[1]["step"]},
        "damaged": findings.damaged,
        "lost_steps": findings.lost_steps,
        "lost_updates": findings.lost_updates(),
    }
