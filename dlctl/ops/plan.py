"""What starting a job would do, in rows: daemon, host, port, and share of the model.

It logs in to no host; it only resolves names and asks the launcher for the address of a host. What
only a host itself knows (its address towards others) is marked so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.health.needs import CONTROL, HERE, Model, shard_bytes
from dlctl.job import batches, placement
from dlctl.launch import launcher as launchers
from dlctl.ops import cases
from dlctl.ops.decide import Action
from dlctl.records.manifest import kept, layout
from dlctl.runs import select

if TYPE_CHECKING:
    from dlctl.algorithms.base import Method
    from dlctl.job.config import Host, JobFile
    from dlctl.ops.cases import Case

UNIX = "unix socket"
OWN_ADDRESS = "its address towards this host"
"""The address from which a host reaches the coordinator; only the host itself knows it."""


class Placed(NamedTuple):
    """A daemon and its placement."""

    name: str
    host: str
    address: str = ""
    """Where others reach it; "" for daemons that accept no connections."""
    port: int | None = None
    """None: any free port, or none at all."""
    parameters: int | None = None
    size_bytes: int | None = None
    """Bytes of a server's shard with its optimiser state; None: unknown, or no server."""
    matrix_bytes: int | None = None
    """Those among them of what the optimiser keeps beside matrices, as the job has it now."""
    batch_size: int | str | None = None
    """Samples per batch of a worker; "auto": the worker determines it."""
    method_bytes: int | None = None
    """What the method keeps beside the model in a worker, at most; None: unknown, or no worker."""


def placed(job: JobFile, model: Model | None) -> list[Placed]:
    """All daemons of a job, in the order of `status`."""
    agents = placement.agents(job.places)
    first, unnamed = _coordinator(job), f"a {launchers.of(job).noun}"
    hosts = {
        agent: host.name or unnamed if host.is_other else HERE for agent, host in agents.items()
    }
    rows = [first, *(Placed(name, host) for name, host in hosts.items())]
    for name, agent in placement.place(job).items():
        row = Placed(name, hosts[agent])
        if name.startswith("server-"):
            rows.append(_server(job, row, agents[agent], model, first.address))
        else:
            size = batches.AUTO if batches.is_open(job) else batches.size(job, agent)
            rows.append(row._replace(batch_size=size, method_bytes=_method_bytes(job, model)))
    return rows


def _method_bytes(job: JobFile, model: Model | None) -> int | None:
    if model is None:
        return None
    method: Method = registry.load("algorithms", job.algorithm.name)  # This pulls in numpy.
    return method.bytes_kept(job, model.layout)


def _coordinator(job: JobFile) -> Placed:
    from dlctl.launch import addresses

    if not job.uses_tcp:
        return Placed(CONTROL, HERE, UNIX)
    address = addresses.LOOPBACK
    try:
        if job.has_other_hosts:
            address = addresses.host_of(addresses.of_coordinator("", job).bind)
    except DlctlError as error:
        address = f"unknown: {error.message}"
    return Placed(CONTROL, HERE, address, job.network.port or None)


def _server(job: JobFile, row: Placed, host: Host, model: Model | None, control: str) -> Placed:
    """The row of a server with its address and its shard; `control`: the coordinator's address."""
    from dlctl.launch import addresses

    if model is not None:
        size = shard_bytes(job, model, int(row.name.rpartition("-")[2]))
        row = row._replace(
            parameters=size.parameters, size_bytes=size.total, matrix_bytes=size.beside_matrices
        )
    if not job.uses_tcp:
        return row._replace(address=UNIX)
    own = OWN_ADDRESS if host.is_other else control
    address = host.data or host.bind or own if job.has_other_hosts else addresses.LOOPBACK
    return row._replace(address=address, port=addresses.port_of(row.name, job) or None)


# ---------------------------------------------------------------- which run


SHOWN = (Action.REFUSE_CHANGED, Action.REFUSE_KEPT, Action.WAIT_FOR_HOSTS)
"""What `start` refuses and `plan` shows."""


def headline(case: Case) -> str:
    if case.action is Action.WAIT_FOR_HOSTS and case.run is not None:
        return f"{case.run.run_id} has failed; query its hosts for how it can resume (--check)"
    refused = "nothing: start refuses, because " if case.action in SHOWN else ""
    return f"{refused}{cases.headline(case)}"


def is_change(case: Case) -> bool:
    """Whether the job file has anything that is neither effective nor reached already."""
    if case.action is Action.ALREADY_RUNNING:
        return bool(case.changes)
    return case.action is not Action.OVER


def changes(case: Case) -> list[tuple[str, str]]:
    """(difference, the command that applies it live; "" if none does), for the newest run."""
    is_live = case.run is not None and case.run.is_live
    return [(change.text(), change.how_live() if is_live else "") for change in case.changes]


# ---------------------------------------------------------------- files


def files(case: Case, job: JobFile, file: Path) -> Iterator[tuple[str, str]]:
    """(what, where) of everything a run would write."""
    parent = Path(os.path.abspath(file.parent / job.job.run_dir))
    directory = parent / f"{job.job.name}-XXXX"
    if case.run is not None and case.action not in (Action.BEGIN, Action.BEGIN_FROM):
        directory = case.run.directory
    yield "run directory", str(directory)
    yield "checkpoints", f"{directory}/ckpt, the newest {job.checkpoints.keep}"
    if mirror := job.checkpoints.mirror:
        yield "mirror", mirror
    places = {"none": "in the memory of the servers", "process": "/dev/shm"}
    shards = job.servers.state_dir or places.get(job.servers.durability, f"{directory}/state")
    yield "shards", places["none"] if job.servers.durability == "none" else shards
    launcher = launchers.of(job)
    for agent, host in placement.agents(job.places).items():
        if host.is_other:
            folder = launcher.folder(host)
            yield f"on the host of {agent}", f"{folder}/{agent}/{directory.name}"


# ---------------------------------------------------------------- the model
# The size of a job's model, from a checkpoint of an earlier run of the same job file.


def known_model(file: Path, job: JobFile) -> Model | None:
    """The model's size in the newest checkpoint of the newest run that has one, or None."""
    from dlctl.runs import checkpoints

    for run in reversed(select.of_job(select.job_file(file), job.job.name)):
        if found := checkpoints.complete(run.directory):
            manifest = [*found.values()][-1]
            stored_bytes = sum(shard["nbytes"] for shard in manifest["shards"])
            ends = [cut["hi"] for cut in kept(manifest["shards"][-1]).values()]
            from dlctl.optim import bounds  # imported late: it pulls in numpy

            kept_bytes = bounds.FLOAT_BYTES * sum(ends)
            return Model(layout(manifest), stored_bytes, manifest["step"], kept_bytes)
    return None


def remarks(job: JobFile, model: Model | None) -> list[str]:
    """What a user should know about how the servers step this model, a sentence each."""
    from dlctl import jobfile  # imported late, here and below: they pull in numpy and pydantic
    from dlctl.optim import bounds

    return [*jobfile.warnings(job), *([] if model is None else bounds.remarks(job, model.layout))]
