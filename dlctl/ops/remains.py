"""What is left of a run: live daemons, the coordinator's memory, the servers' stored shards, and
the cost of rolling back to a checkpoint.

Most of it is on this machine. Other hosts have to be queried.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job import config, placement
from dlctl.launch import base
from dlctl.ops import other_hosts
from dlctl.records.memory import DAEMON, Memory, RunMemory, Work
from dlctl.runs import facts, lock
from dlctl.runs.database import RunDb
from dlctl.runs.lineage import Good
from dlctl.runs.snapshot import Snapshot
from dlctl.util import processes, values
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import OTHER_NUMBERS, plural

if TYPE_CHECKING:
    from dlctl.runs.kept_shards import KeptShard

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a run on all of its hosts."""

    kept: dict[int, KeptShard]
    """Shard -> its stored state. A path on another host begins with that host's name."""
    living: list[str]
    """Live daemons on other hosts."""
    away: dict[str, str]
    """Agents whose hosts did not answer or were not queried, and why."""


@dataclass(frozen=True, slots=True)
class ShardRemains:
    name: str
    """The name of its server."""
    alive: bool
    problem: str
    """Why the shard cannot be resumed; "" if it can."""
    version: int | None
    """Updates applied, if known."""
    is_exact: bool
    """`version` is from the shard's state; otherwise from its server's last report, and the server
    may have applied more since."""
    path: str
    """Where its state is stored; "" if there is none."""


def look(snapshot: Snapshot, job: config.JobFile, *, ask_hosts: bool) -> Remains:
    """Inspect this machine and, with `ask_hosts`, all other hosts in parallel."""
    from dlctl.runs import kept_shards  # imported late, here and below: it pulls in numpy

    hosts = other_hosts.of(snapshot)
    kept = {found.shard: found for found in kept_shards.kept(snapshot.directory, job.servers)}
    if not hosts or not ask_hosts:
        return Remains(kept, [], dict.fromkeys(hosts, "its host was not queried"))
    from dlctl.launch import answers, launcher, reached, remote

    own = launcher.of(job)
    living, away, keys = list[str](), dict[str, str](), fields(kept_shards.KeptShard)
    request = remote.look_request(snapshot.run_id)
    for agent, answer in own.ask(hosts, request, reached.ANSWER_S).items():
        try:
            value = answers.value_of(answer, own.explain)
            names = [str(row["name"]) for row in value["daemons"]]
            rows = [{key.name: row[key.name] for key in keys} for row in value["kept"]]
            for row in rows:
                row["path"] = Path(f"{hosts[agent].name}:{row['path']}")
        except DlctlError as error:
            away[agent] = error.message
        except (KeyError, TypeError):
            away[agent] = own.explain(answer._replace(value={})).message
        else:
            living += names
            kept |= {row["shard"]: kept_shards.KeptShard(**row) for row in rows}
    return Remains(kept, living, away)


def shards_of(
    snapshot: Snapshot, memory: Json, job: config.JobFile, left: Remains
) -> list[ShardRemains]:
    """One per server of the run: from its process if alive, else from its stored state."""
    placed, shards = placement.place(job), []
    for index in range(job.servers.count):
        name, kept = f"server-{index}", left.kept.get(index)
        row, agent = snapshot.daemon(name), placed[name]
        is_here = agent == HOME_AGENT and processes.is_alive(row.get("pid"), row.get("pid_start"))
        alive = is_here or name in left.living
        reported = facts.metrics(row).get("version")
        version, is_exact = reported if type(reported) is int else None, False
        if kept is not None and (kept.initialised or not kept.problem):
            version, is_exact = kept.version, not alive
        problem = ""
        if memory.get(DAEMON + name, {}).get("has_served") and not alive:
            problem = left.away.get(agent, "") or _state_problem(job, kept)
        path = "" if kept is None else str(kept.path)
        shards.append(ShardRemains(name, alive, problem, version, is_exact, path))
    return shards


def _state_problem(job: config.JobFile, kept: KeptShard | None) -> str:
    from dlctl.runs.kept_shards import NO_VALUES

    if job.servers.durability == "none":
        return 'its server is gone, and durability = "none" stores nothing'
    if kept is None:
        return "its server is gone and left no state"
    # A shard without values counts as new: the workers initialise it.
    is_new = kept.version == 0 and not kept.initialised and kept.problem == NO_VALUES
    return "" if is_new else kept.problem


def read_jobfile(directory: Path) -> config.JobFile:
    """The resolved job of a run. Raises DlctlError if it cannot be read."""
    try:
        return config.of_stored(base.read_job(directory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DlctlError(
            f"the run's job cannot be read: {error}", where=str(directory / "job.json")
        ) from error


# ---------------------------------------------------------------- findings


class RollbackLoss(NamedTuple):
    """The cost of rolling back to a checkpoint."""

    steps: int
    """Steps to redo."""
    updates: Mapping[str, int | None] = {}
    """Server -> updates of its shard that are lost; None if the count is unknown."""
    is_exact: bool = True
    """Otherwise servers may have applied more updates than they reported."""

    def text(self) -> str:
        """The loss for people: "60 steps done again, at least 21 updates lost"."""
        parts = [f"{plural(self.steps, 'step')} done again"] if self.steps else []
        if None in self.updates.values():
            parts.append("an unknown number of updates lost")
        elif lost := sum(filter(None, self.updates.values())):
            parts.append(f"{'' if self.is_exact else 'at least '}{plural(lost, 'update')} lost")
        return ", ".join(parts) or "nothing is lost"

    def __bool__(self) -> bool:
        return bool(self.steps) or any(count != 0 for count in self.updates.values())


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of an inspection. The fields are keys of `dlctl recover --json`."""

    alive: list[str]
    """Daemons on all hosts."""
    shards: list[ShardRemains]
    obstacles: list[str]
    """Why the run cannot resume where it stopped; [] if it can."""
    was_at_work: bool
    """Whether all of its daemons were ready at some time since its last start."""
    step: int
    """The last step the run reached."""
    away: dict[str, str]
    """Agents whose hosts are unreachable, and why."""
    only_exits: bool = False
    """The run was ending in order, and all but the exit of its processes was done: it ends when it
    is continued, and needs no shard for that."""

    @property
    def has_updates(self) -> bool:
        """Whether there is anything to lose: updates are applied long before the first step counts.
        For a shard that cannot be inspected, the known version may be stale.
        """
        may_have = (shard.version != 0 or bool(shard.problem) for shard in self.shards)
        return self.step > 0 or any(may_have)

    def loss(self, checkpoint: Good | None) -> RollbackLoss:
        """The cost of rolling back to that checkpoint; None: of starting over."""
        saved_step, saved = 0, dict.fromkeys((shard.name for shard in self.shards), 0)
        if checkpoint is not None:
            saved_step = int(checkpoint[1]["step"])
            saved = {p["name"]: p["state"].get("version") for p in checkpoint[1]["shards"]}
        updates = {s.name: _behind(s.version, saved.get(s.name)) for s in self.shards}
        is_exact = all(shard.is_exact for shard in self.shards)
        return RollbackLoss(max(0, self.step - saved_step), updates, is_exact)


def _behind(version: int | None, saved: Any) -> int | None:
    return None if version is None or type(saved) is not int else max(0, version - saved)


def examine(snapshot: Snapshot, *, ask_hosts: bool = True) -> Findings:
    """Inspect everything but checkpoints; changes nothing. Other hosts are queried only for a dead
    run.

    Raises DlctlError for a directory that is not the run's own (see `dlctl.runs.lock`).
    """
    in_place = lock.check(snapshot)
    memory = read_memory(snapshot.directory)
    job = read_jobfile(snapshot.directory)
    left = look(snapshot, job, ask_hosts=ask_hosts)
    shards = shards_of(snapshot, memory, job, left)
    was_at_work = Memory(memory).has_released if memory else facts.has_begun(snapshot)
    name = str(snapshot.run.get("algorithm") or "")
    survives = not name or "server" in registry.load("algorithms", name).shape.survives
    is_lost = bool(memory) and was_at_work and not survives
    possible = {
        "the directory was moved or restored: stored shards may be of another time": not in_place,
        "the coordinator left no memory to resume from": not memory,
        "this method's state was in the coordinator's process": is_lost,
        OTHER_NUMBERS: snapshot.state == "failed" and OTHER_NUMBERS in snapshot.reason,
    }
    obstacles = [text for text, holds in possible.items() if holds]
    obstacles += [f"{shard.name}: {shard.problem}" for shard in shards if shard.problem]
    if only_exits := Memory(memory).only_exits:
        obstacles = []  # From a checkpoint, a run that was stopped would train again.
    steps = (Memory(memory).work.steps if memory else None, snapshot.run.get("step"))
    step = int(max(values.number(step) or 0.0 for step in steps))
    here = [str(row["name"]) for row in processes.living(snapshot.everybody())]
    alive = [*here, *left.living]
    return Findings(alive, shards, obstacles, was_at_work, step, left.away, only_exits)


def has_begun(snapshot: Snapshot) -> bool:
    """Whether the run may have done anything, by the records on this machine. Raises DlctlError."""
    memory = Memory(read_memory(snapshot.directory))
    return facts.has_begun(snapshot) or memory.has_released or memory.only_exits


def is_led(snapshot: Snapshot) -> bool:
    """Whether the run is live and its coordinator is alive and on record, or runs but cannot write.
    A coordinator in a crash loop is alive for a moment after each restart by its agent.
    """
    is_recorded = snapshot.run.get("updated_by") in (None, snapshot.run.get("pid_start"))
    is_there = snapshot.is_live and snapshot.coordinator_pid is not None
    return is_there and (is_recorded or snapshot.unwritten_s is not None)


def read_memory(directory: Path) -> Json:
    """What the coordinator stored for its successor; {} if that is incomplete."""
    try:
        with closing(RunDb(directory, readonly=True)) as db:
            memory = db.memory()
    except (sqlite3.Error, ValueError) as error:
        raise DlctlError(f"cannot read what the coordinator knew: {error}") from error
    return memory if {RunMemory.KEY, Work.KEY} <= memory.keys() else {}
