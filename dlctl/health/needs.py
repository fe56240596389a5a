"""What a job requires of every host, and which hosts have to reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dlctl.job import placement
from dlctl.job.config import Host, JobFile
from dlctl.model.flat import Layout
from dlctl.util.hostnames import HERE as HERE
from dlctl.util.names import HOME_AGENT

CONTROL = "coordinator"
SHM_BYTES_MIN = 64 << 20
"""Shared memory for the shards of a model whose size is not known yet."""
STATE_PARTS = 2.2
"""A shard is stored twice, with areas for pending changes: `dlctl/shards/image.py`."""
STATE_MARGIN_BYTES = 16 << 20


class Model(NamedTuple):
    """Size of the model, from an earlier checkpoint of the same job, or as the task builds it."""

    layout: Layout
    stored_bytes: int
    """Bytes of all parameters and optimiser slots in the checkpoint."""
    step: int | None
    """The step at which the checkpoint was made; None: there is none, the task has built it."""
    kept_bytes: int = 0
    """Those of the stored bytes that the optimiser keeps beside matrices."""

    @property
    def parameters(self) -> int:
        """Trainable ones."""
        return self.layout.size()

    def figures(self) -> dict[str, int | None]:
        return {
            "parameters": self.parameters,
            "stored_bytes": self.stored_bytes,
            "step": self.step,
        }


class ShardBytes(NamedTuple):
    parameters: int
    total: int
    beside_matrices: int
    """Bytes among them of what the optimiser keeps beside matrices, as the job has it now."""


class HostNeed(NamedTuple):
    name: str
    """The agent's name in the job file, or `HERE`."""
    host: Host
    servers: tuple[str, ...]
    workers: int
    threads: int
    """Requested by each worker; 0: a share of the cores."""
    loader_processes: int
    """Processes that load data, for each worker; they pass batches in shared memory."""
    device: str
    daemons: int
    """On the coordinator's host all daemons of the job; elsewhere the host's own and its agent."""
    shm_bytes: int
    """Shared memory for the shards on this host; 0: none."""
    is_model_known: bool

    @property
    def is_here(self) -> bool:
        return not self.host.is_other


NOTHING = HostNeed(HERE, Host(), (), 0, 0, 0, "auto", 1, 0, False)
"""What this machine needs while it has no job."""


def of(job: JobFile, model: Model | None, *, others: bool = True) -> dict[str, HostNeed]:
    """Agent -> what its host needs, that of the coordinator first. others: the other hosts, too;
    some launchers do not know theirs before the start.
    """
    placed = placement.place(job)
    return {
        agent: _need(job, model, agent, host, [d for d, a in placed.items() if a == agent])
        for agent, host in placement.agents(job.places).items()
        if others or not host.is_other
    }


def _need(
    job: JobFile, model: Model | None, agent: str, host: Host, daemons: Sequence[str]
) -> HostNeed:
    servers = tuple(name for name in daemons if name.startswith("server-"))
    total = job.servers.count + job.workers.count + len(placement.agents(job.places)) + 1
    return HostNeed(
        name=host.name or HERE,
        host=host,
        servers=servers,
        workers=len(daemons) - len(servers),
        threads=job.workers.threads,
        loader_processes=job.workers.loader_processes,
        device=job.workers.device,
        daemons=total if agent == HOME_AGENT else len(daemons) + 1,
        shm_bytes=_shm_bytes(job, model, servers),
        is_model_known=model is not None,
    )


def _shm_bytes(job: JobFile, model: Model | None, servers: Sequence[str]) -> int:
    if not servers or job.servers.state_dir or job.servers.durability != "process":
        return 0
    if model is None:
        return SHM_BYTES_MIN
    sizes = (shard_bytes(job, model, int(name.rpartition("-")[2])) for name in servers)
    return (
        round(sum(size.total for size in sizes) * STATE_PARTS) + len(servers) * STATE_MARGIN_BYTES
    )


def shard_bytes(job: JobFile, model: Model, index: int) -> ShardBytes:
    """What a server stores. Raises UsageError for more servers than the model can be cut for."""
    from dlctl.optim import bounds  # imported late: it pulls in numpy

    lo, hi = bounds.of_job(job, model.layout)[index : index + 2]
    elements_bytes = (model.stored_bytes - model.kept_bytes) * (hi - lo)
    beside = bounds.matrix_bytes(job, model.layout, lo, hi)
    return ShardBytes(hi - lo, round(elements_bytes / max(1, model.parameters)) + beside, beside)


class NeededLink(NamedTuple):
    source: str
    """Agent of the host that connects."""
    target: str
    """Agent of the host that accepts the connection."""
    daemons: tuple[str, ...]
    """`CONTROL` and servers, in the order in which they are tried."""


def links(needs: Mapping[str, HostNeed]) -> list[NeededLink]:
    """All links between hosts that the run needs: every host to the coordinator, and workers to
    servers.
    """
    found = []
    for source, need in needs.items():
        for target, other in needs.items():
            daemons: tuple[str, ...] = (CONTROL,) if target == HOME_AGENT else ()
            daemons += other.servers if need.workers else ()
            if source != target and daemons:
                found.append(NeededLink(source, target, daemons))
    return found


def rounds(links: Iterable[NeededLink]) -> list[list[NeededLink]]:
    """Links grouped into rounds, which are measured one after another: in each, every host has at
    most one link.
    """
    left, found = list(links), []
    while left:
        busy: set[str] = set()
        now = []
        for link in left:
            if busy.isdisjoint(link[:2]):
                busy.update(link[:2])
                now.append(link)
        left = [link for link in left if link not in now]
        found.append(now)
    return found
