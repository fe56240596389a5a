"""What is left of a run's shards: their living servers, and what those that are gone have kept.

Most of it is on this machine. What is on other hosts is known only by asking them over ssh.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl import config, placement
from dlctl.config import Host
from dlctl.errors import DlctlError
from dlctl.ops import checkpoint_choice, other_hosts
from dlctl.runs import checkpoints, facts, lineage, lock, logs, preferred
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import ENDED, Snapshot, is_here, newest_whole, read_job
from dlctl.util import processes, values
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import escape, grave, plural

if TYPE_CHECKING:
    from dlctl.launch.answers import Answer
    from dlctl.runs.kept_shards import Kept

ITS_SERVER_IS = "its server is "
NO_STATE = f"{ITS_SERVER_IS}gone and left no state"
KEEPS_NOTHING = f'{ITS_SERVER_IS}gone, and durability = "none" keeps nothing'
NOT_ASKED = "its host was not asked"


@dataclass(frozen=True, slots=True)
class Remains:
    """Of all hosts of a run."""

    kept: dict[int, Kept]
    """By shard. The path of what is on another host begins with that host's name."""
    living: list[str]
    """Daemons on other hosts."""
    away: dict[str, str]
    """Agents whose hosts are not known to have anything, and why."""


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    """Of its server."""
    alive: bool
    problem: str
    """Why nobody can go on with it; "" if that can be."""
    version: int | None
    """Updates it has applied, as far as that is known."""
    is_exact: bool
    """Its state says so; otherwise its server has said it last, and may have applied more since."""
    path: str
    """Where its state is kept; "" if there is none."""


def look(snapshot: Snapshot, job: config.JobFile, *, ask_hosts: bool) -> Remains:
    """Look here and, if they are to be asked, on the other hosts, on all at once."""
    from dlctl.runs import kept_shards  # here and below, because it takes numpy along

    hosts = other_hosts.of(snapshot)
    kept = {found.shard: found for found in kept_shards.kept(snapshot.directory, job.servers)}
    if not hosts or not ask_hosts:
        return Remains(kept, [], dict.fromkeys(hosts, NOT_ASKED))
    from dlctl.launch import remote, ssh

    living, away = list[str](), dict[str, str]()
    answers = ssh.ask(hosts, remote.look_request(snapshot.run_id), other_hosts.ANSWER_S)
    for agent, answer in answers.items():
        try:
            daemons, found = _read(hosts[agent], answer)
        except DlctlError as error:
            away[agent] = error.message
            continue
        living += daemons
        kept |= {shard.shard: shard for shard in found}
    return Remains(kept, living, away)


def _read(host: Host, answer: Answer) -> tuple[list[str], list[Kept]]:
    """(daemons that live there, what is kept there). Raises DlctlError if it does not say."""
    from dlctl.launch.answers import explain, value_of

    value = value_of(answer)
    try:
        daemons = [str(row["name"]) for row in value["daemons"]]
        kept = [_kept(host, row) for row in value["kept"]]
    except (KeyError, TypeError) as error:
        raise explain(answer._replace(value={})) from error
    return daemons, kept


def _kept(host: Host, row: Mapping[str, Any]) -> Kept:
    from dlctl.runs.kept_shards import Kept

    known = {key.name: row[key.name] for key in fields(Kept)}
    return Kept(**{**known, "path": Path(f"{host.ssh}:{row['path']}")})


def shards_of(
    snapshot: Snapshot, memory: Mapping[str, Any], job: config.JobFile, remains: Remains
) -> list[Shard]:
    """One per server that the run has: its process first, then what it has kept."""
    placed = placement.place(job)
    return [
        _shard(snapshot, memory, job, remains, index, placed[f"server-{index}"])
        for index in range(job.servers.count)
    ]


def _shard(
    snapshot: Snapshot,
    memory: Mapping[str, Any],
    job: config.JobFile,
    remains: Remains,
    index: int,
    agent: str,
) -> Shard:
    name, kept = f"server-{index}", remains.kept.get(index)
    row = snapshot.daemon(name)
    is_here = agent == HOME_AGENT and processes.is_alive(row.get("pid"), row.get("pid_start"))
    alive = is_here or name in remains.living
    reported = facts.metrics(row).get("version")
    version, is_exact = reported if type(reported) is int else None, False
    if kept is not None and (kept.initialised or not kept.problem):
        version, is_exact = kept.version, not alive
    remembered = memory.get(f"daemon/{name}")
    has_served = isinstance(remembered, Mapping) and bool(remembered.get("has_served"))
    problem = ""
    if has_served and not alive:
        problem = remains.away.get(agent, "") or _state_problem(job, kept)
    return Shard(name, alive, problem, version, is_exact, "" if kept is None else str(kept.path))


def _state_problem(job: config.JobFile, kept: Kept | None) -> str:
    if job.servers.durability == "none":
        return KEEPS_NOTHING
    if kept is None:
        return NO_STATE
    # Without values yet it is as good as new: the workers initialise it.
    return "" if kept.version == 0 and not kept.initialised and _is_whole(kept) else kept.problem


def _is_whole(kept: Kept) -> bool:
    from dlctl.runs.kept_shards import NO_VALUES

    return kept.problem == NO_VALUES


def obstacle(shard: Shard) -> str:
    return f"shard of {shard.name}: {shard.problem}"


def read_jobfile(directory: Path) -> config.JobFile:
    """The resolved job of a run. Raises DlctlError if it cannot be read."""
    try:
        return config.from_dict(config.JobFile, read_job(directory))
    except (KeyError, TypeError, AttributeError) as error:
        raise DlctlError(
            f"the run's job cannot be read: {error}", where=str(directory / "job.json")
        ) from error


# ---------------------------------------------------------------- what can be done with it
# A run goes on if its coordinator's memory and every shard is there: nothing is lost then.
# Otherwise it resumes from its newest good checkpoint. None does without a host that is needed.


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

    Raises DlctlError for a directory that is not the run's own (see `dlctl.runs.lock`), or if the
    checkpoint that is wanted is not there, or damaged.
    """
    in_place = lock.check(snapshot)
    memory = read_memory(snapshot.directory)
    job = read_jobfile(snapshot.directory)
    left = look(snapshot, job, ask_hosts=ask_hosts and _has_died(snapshot))
    shards = shards_of(snapshot, memory, job, left)
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
    ends = causes_of(snapshot, living, is_there=is_there, is_led=is_led(snapshot))
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
    return facts.has_begun(snapshot) or _was_at_work(snapshot, read_memory(snapshot.directory))


def _was_at_work(snapshot: Snapshot, memory: Json) -> bool:
    return _has_released(memory) if memory else facts.has_begun(snapshot)


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
    return [escape(line) for line in found]


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


# ---------------------------------------------------------------- who is gone
# Who of a run that has died is gone, and what is known of how: `dlctl recover` begins with it.


LAST_LINES = 3
WITHOUT_A_WORD = "its log says nothing of it, as after SIGKILL or a power failure"


def causes_of(snapshot: Snapshot, living: list[str], *, is_there: bool, is_led: bool) -> list[str]:
    """Who is gone, and what is known of how; a line each, last words below. `is_there`, `is_led`:
    of the coordinator, see `has_coordinator` and `is_led`.
    """
    lines = []
    if snapshot.run.get("state") == "failed" and snapshot.reason:
        lines.append(f"the run has failed: {snapshot.reason}")
    if not is_led and snapshot.run.get("state") not in ENDED:
        lines += _coordinator_end(snapshot, is_there=is_there)
    for row in snapshot.daemons:
        if row["name"] not in living:
            lines += _end_of(snapshot, row)
    return lines


def _coordinator_end(snapshot: Snapshot, *, is_there: bool) -> list[str]:
    if snapshot.run.get("pid") is None:
        return []
    heard = values.ago(snapshot.run.get("updated_at"), snapshot.now)
    if is_there:
        since = values.number(snapshot.run.get("updated_at"))
        failed = logs.ends_at_once(snapshot.directory, "coordinator", since)
        starts = f"coordinator: it is being started (pid {snapshot.run['pid']}, last heard {heard})"
        return [starts, *([f"  | {failed}"] if failed else [])]
    gone = f"coordinator: gone (pid {snapshot.run['pid']}, last heard {heard})"
    words = _troubles(snapshot.directory, "coordinator")
    return [gone if words else f"{gone}; {WITHOUT_A_WORD}", *words]


def _troubles(directory: Path, name: str) -> list[str]:
    """What the last lines of a daemon's newest log say of any trouble."""
    files = logs.list_files(directory).get(name, [])
    newest = [file for file in files if file.incarnation == files[-1].incarnation]
    lines = logs.tail(newest, LAST_LINES * 4)
    grave = [line.text for line in lines if line.severity >= logs.LEVELS.index("warning")]
    return [f"  | {text}" for text in grave[-LAST_LINES:]]


def _end_of(snapshot: Snapshot, row: Mapping[str, Any]) -> list[str]:
    """Of one that is not known to live."""
    last, name = row.get("last_exit"), str(row["name"])
    if is_here(row) and row.get("pid") is not None:
        return [f"{name}: gone (pid {row['pid']})"]
    if not isinstance(last, Mapping) or not last.get("code"):
        return []
    words = last.get("last_lines")
    lines = _grave([str(word) for word in words] if isinstance(words, list) else [])
    return [f"{name}: {facts.exited(last)} {values.ago(last.get('at'), snapshot.now)}", *lines]


def _grave(lines: list[str]) -> list[str]:
    """The last lines that say more than that all is well."""
    return [f"  | {line}" for line in grave(lines)[-LAST_LINES:]]
