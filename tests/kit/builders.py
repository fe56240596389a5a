"""Parts of workers and servers, made in one place for all tests: a new field is given here once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlctl.algorithms.base import MODEL, Method, ReplicaSide, ShardSide, Site
from dlctl.compress.base import Compressor
from dlctl.compress.none import Dense
from dlctl.compress.values import Precision
from dlctl.job.config import JobFile
from dlctl.job.inner import NONE
from dlctl.model.cut import Bounds, Unit, cut
from dlctl.model.flat import Layout
from dlctl.optim.base import Optimizer
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.context import Context
from dlctl.roles.server.commits import Commit, Commits, Committed
from dlctl.roles.server.server import Server
from dlctl.roles.server.shard_protocol import ShardProtocol
from dlctl.roles.server.table_shard import TableShard
from dlctl.roles.worker.interface import MakeSteps
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.progress import OwnRate
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.roles.worker.services.computing import Computing
from dlctl.roles.worker.settings import WorkTerms
from dlctl.roles.worker.shard_client import Identity, ServerLink, ShardClient
from dlctl.roles.worker.training import Origin, Training
from dlctl.shards.base import Shard, Storages
from dlctl.shards.memory import InMemory
from dlctl.sim.objectives import layout_of
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Array, Assign, Joined, Register

OWN_LR = 0.01


def site(
    options: Any,
    parameters: Array,
    slot: int = 0,
    *,
    layout: Layout | None = None,
    members: frozenset[int] = frozenset({0}),
    seed: int = 0,
    has_inner: bool = False,
) -> Site:
    """Where a replica runs."""
    return Site(
        options=options,
        parameters=parameters,
        slot=slot,
        layout=layout or layout_of(parameters.size),
        rng=np.random.default_rng([seed, slot]),
        members=members,
        has_inner=has_inner,
    )


def replica(method: Method, parameters: Array, options: Any = None, slot: int = 0) -> ReplicaSide:
    """A replica that has begun a new run."""
    has_inner = method.inner.name != NONE
    side = method.replica(site(options or method.Options(), parameters, slot, has_inner=has_inner))
    side.begin("new")
    return side


def even(size: int, servers: int) -> Bounds:
    """The bounds of shards that differ by at most one element."""
    return cut([Unit("all", size)], [1.0] * servers)


def identity(slot: int = 0, term: int = 1, token: bytes = b"", run_id: str = "run") -> Identity:
    return Identity(run_id, slot, term, token)


def client(
    context: Context, me: Identity | None = None, shard: int = 0, lo: int = 0, hi: int = 0
) -> ShardClient:
    """Of the parameters on a shard that is not joined yet."""
    return ShardClient(ServerLink(shard, me or identity(), context), 0, lo, hi)


def joined(client: ShardClient, term: int = 1, now: float = 0.0) -> ShardClient:
    """The same, known to its server."""
    client.link.join(now)
    answer = Joined(client.shard, term, 0, client.lo, client.hi, True, 0)
    assert client.link.on_joined(answer, now)
    return client


def joined_tables(
    method: Method, context: Context, size: int, servers: int, me: Identity | None = None
) -> list[list[ShardClient]]:
    """All tables of a method with so many parameters, on servers that know the worker."""
    shards = range(servers) if method.shape.needs_servers else ()
    bounds = even(size, servers) if servers else (0,)
    parameters = [client(context, me, i, *bounds[i : i + 2]) for i in shards]
    tables = [parameters] if parameters else []
    for number, table in enumerate(method.shape.tables[1:], 1):
        cuts = [table.bounds(layout_of(size), bounds, i) for i in shards]
        tables.append(
            [ShardClient(c.link, number, *cut) for c, cut in zip(parameters, cuts, strict=True)]
        )
    for each in parameters:
        joined(each)
    return tables


def training(
    context: Context,
    tables: list[list[ShardClient]],
    method: Method,
    side: ReplicaSide,
    *,
    me: Identity | None = None,
    send_queue: SendQueue | None = None,
    compressor: Compressor | None = None,
    batch_size: int = 1,
    lease_ahead_s: float = 0.0,
    push_norm_max: float = 1e9,
    members: PeerMembers | None = None,
    collecting: Collecting | None = None,
    own_lr: float = OWN_LR,
    steps: MakeSteps | None = None,
    asks: int = -1,
    stops_between_batches: bool = False,
) -> Training:
    """A replica at work. own_lr: of its own optimiser, if the method has one."""
    queue = send_queue or SendQueue(context.retries)
    members = members or PeerMembers(context, "worker-0", connects=False)
    terms = WorkTerms(
        batch_size=batch_size,
        lease_ahead_s=lease_ahead_s,
        push_norm_max=push_norm_max,
        compressor=compressor or Dense(Dense.Options()),
        compression="none",
        own_rate=OwnRate(own_lr),
        nonfinite_steps_max=sys.maxsize,
        refused_pushes_max=sys.maxsize,
        stops_between_batches=stops_between_batches,
    )
    host = NoWorker(Links(context, me or identity(), tables, queue, members), terms)
    return Training(
        host, method, side, Origin(np.zeros(0)), collecting=collecting, steps=steps or Computing,
        asks=asks,
    )  # fmt: skip


@dataclass(frozen=True)
class NoWorker:
    """What a replica asks of its worker, without one."""

    links: Links
    terms: WorkTerms

    def leave_poisoned(self, error: str, detail: str) -> None:
        raise AssertionError(f"{error}: {detail}")


# ---------------------------------------------------------------- servers


def server(
    method: Method,
    job: JobFile,
    *,
    index: int = 0,
    term: int = 1,
    run_id: str = "run-1",
    optimizer: type[Optimizer] = SGD,
    compressor: type[Compressor] = Dense,
    storages: Storages | None = None,
) -> Server:
    """A server's process that has just been started."""
    registration = Register(run_id, "server", f"server-{index}", term, 1, "here", "0")
    return Server(
        registration, job, "ipc://x", method, optimizer, compressor, storages or InMemory()
    )


def handled(server: Server, event: Event, now: float = 0.0) -> list[Effect]:
    """What a server does about an event once the commits that it begins are on a disk."""
    effects = server.handle(event, now)
    done: list[Effect] = []
    while effects:
        effect = effects.pop(0)
        if isinstance(effect, Commit):
            effect.write.perform()
            effects += server.handle(Committed(effect.number), now)
        else:
            done.append(effect)
    return done


def serving(
    shard: Shard,
    side: ShardSide,
    assigned: Assign,
    *,
    term: int = 1,
    compressor: tuple[str, type[Compressor]] = ("none", Dense),
    fetch_values: Precision = "float32",
    run_id: str = "run-1",
    key: bytes = b"the key",
) -> ShardProtocol:
    """A server at work on these parameters."""
    context = Context(1.0)
    lo, hi, *_ = assigned.bounds
    table = TableShard(
        context=context, commits=Commits(context), declared=MODEL, table=0, index=0,
        term=term, lo=lo, hi=hi, shard=shard, side=side,
        compressor_name=compressor[0], compressor=compressor[1], push_norm_max=1e9,
        fetch_values=fetch_values, step_samples=1024,
    )  # fmt: skip
    made = ShardProtocol(context, run_id, key, assigned, [table])
    made.initialised = True
    return made
