"""What starting a job would do, in rows: who runs where, at which port, with how much of the model.

No host is logged in to: names are looked up, and Slurm is asked for its nodes, nothing else. What
only a host itself knows (its address towards others) is said to be so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlctl import batches, placement
from dlctl.errors import DlctlError
from dlctl.flat import slice_bounds
from dlctl.health.needs import CONTROL, HERE, Model
from dlctl.ops import decide
from dlctl.runs import select
from dlctl.util import values
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.config import Host, JobFile
    from dlctl.ops.decide import Decision

UNIX = "unix socket"
OWN_WAY = "by its way here"
"""The address from which a host reaches the coordinator; only the host itself knows it."""


class Placed(NamedTuple):
    """A daemon, and where it would be."""

    name: str
    host: str
    address: str
    """Where others reach it; "" of daemons to which nobody connects."""
    port: int | None
    """None: any free one, or no port at all."""
    parameters: int | None
    size_bytes: int | None
    """Of a server's shard, its optimiser's state included; None: not known, or no server."""
    batch_size: int | str | None = None
    """Samples of a worker's batch; "auto": a worker finds it."""


def _name(host: Host) -> str:
    return "a node of Slurm's" if host.launcher == "slurm" else host.ssh or HERE


def placed(job: JobFile, model: Model | None) -> list[Placed]:
    """All daemons of a job, in the order in which `status` shows them."""
    agents = placement.agents(job.places)
    first = _coordinator(job)
    rows = [first]
    rows += [Placed(name, _name(host), "", None, None, None) for name, host in agents.items()]
    for name, agent in placement.place(job).items():
        host = agents[agent]
        if name.startswith("server-"):
            rows.append(_server(job, name, host, model, first.address))
        else:
            size = batches.AUTO if batches.is_open(job) else batches.size(job, agent)
            rows.append(Placed(name, _name(host), "", None, None, None, size))
    return rows


def _coordinator(job: JobFile) -> Placed:
    from dlctl.launch import addresses

    address, port = UNIX, None
    if job.uses_tcp:
        port = job.network.port or None
        try:
            place = addresses.of_coordinator("", job) if job.has_other_hosts else None
            address = addresses.host_of(place.bind) if place else addresses.LOOPBACK
        except DlctlError as error:
            address = f"unknown: {error.message}"
    return Placed(CONTROL, HERE, address, port, None, None)


def _server(job: JobFile, name: str, host: Host, model: Model | None, coordinator: str) -> Placed:
    from dlctl.launch import addresses

    index = int(name.rpartition("-")[2])
    parameters = size_bytes = None
    if model is not None:
        lo, hi = slice_bounds(model.parameters, job.servers.count, index)
        parameters = hi - lo
        size_bytes = round(model.stored_bytes * parameters / max(1, model.parameters))
    if not job.uses_tcp:
        return Placed(name, HERE, UNIX, None, parameters, size_bytes)
    port = addresses.port_of(name, job) or None
    own = OWN_WAY if host.is_other else coordinator
    address = host.data or host.bind or own if job.has_other_hosts else addresses.LOOPBACK
    return Placed(name, _name(host), address, port, parameters, size_bytes)


# ---------------------------------------------------------------- which run


def headline(decision: Decision) -> str:
    """What would happen, in a sentence."""
    run = decision.previous.run_id if decision.previous is not None else ""
    state = decision.previous.state if decision.previous is not None else ""
    if decision.way == decide.RESUME and decision.checkpoint is not None:
        step = values.count(decision.checkpoint[1]["step"])
        return f"{run} ({state}) would resume from its checkpoint at step {step}"
    if decision.way == decide.BEGIN_FROM and decision.checkpoint is not None:
        step = values.count(decision.checkpoint[1]["step"])
        return f"a new run would begin with the checkpoint of {run} ({state}) at step {step}"
    if decision.way == decide.KEPT and decision.findings is not None:
        return (
            f"nothing: start refuses, because {run} ({state}) has no checkpoint, and would lose "
            f"all of its {decision.findings.done} with the changed job file"
        )
    if decision.way == decide.GO_ON and decision.findings is not None:
        step = values.count(decision.findings.step)
        return f"{run} would go on where it was, at step {step}: nothing is lost"
    if decision.way == decide.BEGIN and run:
        return f"a new run would begin; {run} ({state}) stays as it is"
    texts = {
        decide.BEGIN: "a new run would begin",
        decide.ALIVE: f"nothing: {run} is already {state}",
        decide.FINISHED: f"nothing: {run} has finished; to train on, change stop in [job]",
        decide.CHANGED: f"nothing: {run} is {state} with another content, so that start refuses",
        decide.AWAY: f"{run} has failed; how it goes on, only its hosts know: --check asks them",
    }
    return texts[decision.way]


def price(decision: Decision, job: JobFile) -> list[str]:
    """What of a run would be done again, and how nothing would be; what of it would go on with
    another method or optimiser; a line each.
    """
    from dlctl.ops import decide, otherwise

    ways = (decide.RESUME, decide.KEPT, decide.BEGIN_FROM)
    if decision.previous is None or decision.way not in ways:
        return []
    lines = [again] if (again := decide.done_again(decision)) else []
    if decision.could_go_on and (again or decision.way == decide.KEPT):
        lines.append(decide.without_loss(decision))
    good = decision.checkpoint
    if good is not None and (translation := otherwise.translated(good, job)) is not None:
        lines.append(otherwise.in_words(good, translation, job))
    return lines


def is_change(decision: Decision) -> bool:
    """Whether the job file says anything that is neither in force nor reached already."""
    if decision.way == decide.ALIVE:
        return bool(decision.changes)
    return decision.way != decide.FINISHED


def changes(decision: Decision) -> list[tuple[str, str]]:
    """(what differs, the command that changes it now; "" if none does), of the newest run."""
    is_live = decision.previous is not None and decision.previous.is_live
    return [(change.text(), change.how_live() if is_live else "") for change in decision.changes]


# ---------------------------------------------------------------- files


def files(decision: Decision, job: JobFile, file: Path) -> Iterator[tuple[str, str]]:
    """(what, where) of all that a run would write."""
    parent = Path(os.path.abspath(file.parent / job.job.run_dir))
    directory = parent / f"{job.job.name}-XXXX"
    if decision.previous is not None and decision.way not in (decide.BEGIN, decide.BEGIN_FROM):
        directory = decision.previous.directory
    run = directory.name
    yield "run directory", str(directory)
    yield "checkpoints", f"{directory}/ckpt, the newest {job.checkpoints.keep}"
    yield "shards", _shards(job, run)
    for agent, host in placement.agents(job.places).items():
        if host.ssh:
            folder = host.dir or "~/.local/state/dlctl/hosts"
            yield f"on {host.ssh}", f"{folder}/{agent}/{run}, until the run has ended"
        elif host.is_other:
            folder = job.slurm.scratch or "/tmp/dlctl-slurm-USERID"
            yield f"on the node of {agent}", f"{folder}/{agent}/{run}, until the run has ended"
    if job.has_other_hosts:
        yield "sent there", _sent(job, file)


def _shards(job: JobFile, run: str) -> str:
    if job.servers.durability == "none":
        return "in the memory of the servers"
    if job.servers.state_dir:
        return f"{job.servers.state_dir}/{run}"
    if job.servers.durability == "disk":
        return "state/ in the run directory of each host, durable"
    return "/dev/shm, or state/ in the run directory of each host where there is no room"


def _sent(job: JobFile, file: Path) -> str:
    """Raises UsageError if the task's files cannot be sent, as `start` would."""
    from dlctl.launch import taskfiles

    home = Path(os.path.abspath(file.parent))
    found = taskfiles.collect(home, job.job.task, home / job.job.run_dir)
    size = values.size(sum(map(len, found.files.values())))
    return f"{plural(len(found.files), 'Python file')}, {size}, to each host"


# ---------------------------------------------------------------- the model
# How large a job's model is, as an earlier run of the same job file has saved it.


def known_model(file: Path, job: JobFile) -> Model | None:
    """By the newest checkpoint of the newest run that has one; None if there is none."""
    from dlctl.runs import checkpoints

    for run in reversed(select.of_job(select.job_file(file), job.job.name)):
        if found := checkpoints.complete(run.directory):
            manifest = [*found.values()][-1]
            stored_bytes = sum(shard["nbytes"] for shard in manifest["shards"])
            return Model(manifest["size"], stored_bytes, manifest["step"])
    return None
