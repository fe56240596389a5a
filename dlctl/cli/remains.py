"""What is left of a run's shards: their living servers, and what those that are gone have kept.

Most of it is on this machine. What is on other hosts is known only by asking them over ssh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl import config, placement
from dlctl.cli import otherhosts, report
from dlctl.cli.snapshot import Snapshot, read_job
from dlctl.config import Host
from dlctl.errors import DlctlError
from dlctl.util import processes
from dlctl.util.names import HOME_AGENT

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

    hosts = otherhosts.of(snapshot)
    kept = {found.shard: found for found in kept_shards.kept(snapshot.directory, job.servers)}
    if not hosts or not ask_hosts:
        return Remains(kept, [], dict.fromkeys(hosts, NOT_ASKED))
    from dlctl.launch import remote, ssh

    living, away = list[str](), dict[str, str]()
    answers = ssh.ask(hosts, remote.look_request(snapshot.run_id), otherhosts.ANSWER_S)
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


def shards(
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
    reported = report.metrics(row).get("version")
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
