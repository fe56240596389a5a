"""How daemons join a run: they are started, register, and receive each other's addresses.

A process registers under the name and incarnation it was started with; only then a worker's slot
or a server's shard gets a new term. The first worker that has built the model
fixes its layout. Then every server is assigned its slice, and when all servers serve, the workers
receive their addresses.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace

from dlctl.errors import DlctlError
from dlctl.job import batches, placement
from dlctl.job.config import Host
from dlctl.job.settings import EVERY_RUN
from dlctl.model.cut import Bounds
from dlctl.model.flat import Layout
from dlctl.model.parts import PartLayouts
from dlctl.optim import bounds
from dlctl.records.memory import Cut, Entry, Memory
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.records import IssueTerm, Owner
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.protocol.authz import keys_of
from dlctl.roles.protocol.token import sign
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json

FINDS_BATCH_SIZE = "worker-0"
BEFORE_ATTACH = "the script has not joined yet: dlctl.attach, then its first batch or step"
"""A phase: nothing else is known of such a worker."""
FEW = 8
"""Waiting workers that are sent the servers' addresses at every arrival of another one."""


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier executions of this run have recorded."""

    terms: dict[str, int] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    checkpoints: int = 0
    """Number of the newest checkpoint so far."""
    restore: str = ""
    """Directory of the checkpoint to resume from, or ""."""
    manifest: Json = field(default_factory=dict)
    settings: Json = field(default_factory=dict)
    """Daemon -> live settings that were set before the stop."""
    memory: Json = field(default_factory=dict)
    """The predecessor's persisted state, if this coordinator continues from it."""
    agents: dict[str, int] = field(default_factory=dict)
    """Agents that are running now -> their incarnations."""
    wall_s: float = 0.0
    """The wall clock when this coordinator begins, in seconds since 1970."""
    gone_s: float = 0.0
    """How long there was no coordinator, by the wall clock; 0.0: unknown."""
    unwritten_s: float = 0.0
    """How long before its death the predecessor could not write to the database."""
    totals: Json = field(default_factory=dict)
    """The run's counters so far, from the last snapshot."""
    links: Json = field(default_factory=dict)
    """The bytes over the links of hosts, likewise."""
    daemons: dict[str, Json] = field(default_factory=dict)
    """The rows of daemons in that snapshot; times of this machine's clock."""
    logs: dict[str, int] = field(default_factory=dict)
    """Bytes of the logs in the run directory, by process: "worker-0.3"."""


class Registration(Owner):
    PERSISTED = frozenset({"layout", "bounds", "cut"})

    def __init__(self, run: RunState, past: Past) -> None:
        self.run = run
        self.context = run.context
        self.members = run.members
        self.keyring = run.keyring
        self.past = past
        self.restore = past.restore
        """The checkpoint to restore, until the workers are released: later processes have nothing
        in it, and it may have been removed.
        """
        self.under_way = False
        """The workers have been released."""
        self._values = ""
        """`ModelReady.values` of the first training loop that has reported them."""
        self.layout: Layout | None = None
        self.bounds: Bounds = ()
        """Of the servers' shards; (): the layout is not known yet."""
        self.cut = Cut(0, 0, "", ())
        self._parts = PartLayouts(run.division)
        self._bytes, self._samples = b"", 0
        self._before = Layout.from_rows(past.manifest["layout"]) if past.manifest else None
        self._terms = dict(past.terms)
        self._agents = placement.agents(run.job.places)
        self._waiting = run.members.select(
            ("model_ready", "asked_for_data"),
            lambda d: d.role == "worker" and d.model_ready and not d.asked_for_data,
            lambda d: d.index,
        )
        self.frozen: Callable[[], bytes | None] = lambda: b""
        """The digests of the run's frozen parameters; None: not settled yet, so not to be sent."""

    def memory(self) -> Iterator[Entry]:
        yield Entry("layout", None if self.layout is None else self.layout.to_rows())
        yield Entry("bounds", [*self.bounds] or None)
        yield Entry(Cut.KEY, self.cut if self.cut.number else None)

    def recall(self, memory: Memory, now: float) -> None:
        if cut := memory.piece(Cut):
            self.cut = Cut(cut.number, cut.clock, cut.directory, tuple(cut.terms))
        if rows := memory.value("layout"):
            self.bounds = tuple(memory.value("bounds", ()))
            self.keep_layout(Layout.from_rows(rows), memory.work.dataset_samples)

    def keep_layout(self, layout: Layout, samples: int) -> None:
        """The layout of the run's model, and the samples of its dataset."""
        if layout != self.layout:
            self.bounds = self._shards_of(layout)
            self.layout, self._bytes = layout, layout.to_bytes()
        self._samples = samples

    def _shards_of(self, layout: Layout) -> Bounds:
        """The bounds of the servers' shards: those that are on record, or else new ones. Raises
        UsageError for more servers than the model can be cut for.
        """
        return self.bounds or bounds.of_job(self.run.job, layout)

    def keep_part(self, worker: Daemon, layout: Layout, samples: int = 0) -> None:
        """A worker has built this: the model of the run, or its part of that."""
        if whole := self._parts.built(worker.index, layout, samples):
            self.keep_layout(*whole)

    def whose(self, peer: Peer, message: m.Message) -> str:
        """Which daemon a message is about, and its sender, for the log: "of worker-0 from agent-0".

        Only names of this run are repeated; other text of the message is not.
        """
        claimed = [getattr(message, "name", "")]
        claimed += [f"worker-{message.slot}"] if hasattr(message, "slot") else []
        claimed += [f"server-{message.shard}"] if hasattr(message, "shard") else []
        about = [name for name in claimed if name in self.members.daemons]
        sender = [d.name for d in self.members.daemons.values() if d.peer == peer]
        of = [f"of {name}" for name in about if name not in sender]
        return " ".join([*of, f"from {sender[0] if sender else 'a connection that is no daemon'}"])

    def note_lost_residuals(self) -> None:
        """A run that resumes with fewer workers loses the residuals of the missing ones."""
        saved = {worker["name"] for worker in self.past.manifest.get("workers", [])}
        for name in sorted(saved - set(self.members.daemons)):
            text = f"what {name} had not pushed is lost: the run resumes with fewer workers"
            self.context.event("lost", name, text)

    # ------------------------------------------------------------ processes

    def request_spawn(self, daemon: Daemon, now: float) -> None:
        """Have the agent start this incarnation."""
        daemon.agent_incarnation = self.members.agent_of(daemon).incarnation
        secret = self.keyring.secret(daemon.keys_of)
        job = self._job() if daemon.key else b""
        message = m.Spawn(daemon.name, daemon.role, daemon.incarnation, secret, job)
        self.context.ask(("spawn", daemon.name), daemon.agent, message, now)

    def _job(self) -> bytes:
        """The job, for a guest, whose machine has no file of this run. The other hosts are none of
        its business."""
        job = replace(self.run.job, hosts=())
        return zlib.compress(json.dumps(asdict(job)).encode())

    def on_spawned(self, peer: Peer, message: m.Spawned, now: float) -> None:
        daemon = self.members.get(message.name, message.incarnation)
        if daemon is not None and self.members.agent_of(daemon).peer == peer:
            daemon.agent_incarnation = self.members.agent_of(daemon).incarnation
            self.context.retries.done(("spawn", message.name), now)
            daemon.pid = message.pid
            if self.run.job.has_loop and daemon.role == "worker" and not daemon.registered:
                daemon.phase = BEFORE_ATTACH

    def on_register(self, peer: Peer, message: m.Register, now: float) -> Daemon | None:
        """The daemon, if it is the incarnation that was started last; any other is sent away."""
        daemon = self.members.get(message.name, message.incarnation)
        if message.run_id != self.run.run_id or daemon is None or not daemon.alive:
            self.context.send(peer, m.Dismiss(f"{message.name} is not (or no longer) of this run"))
            return None
        daemon.heard(peer, now)
        # The name from the job file, if it has one.
        daemon.host = message.host
        if not daemon.key and (name := self._agents[daemon.agent].name):
            daemon.host = name
        daemon.pid = message.pid
        if daemon.registered and not self.is_of_old_cut(daemon):
            # Its welcome may wait until the term is on record; send a heartbeat meanwhile.
            self.context.send(daemon.name, m.Heard())
        else:
            daemon.registered, daemon.phase = True, "starting"
            self._issue_term(daemon)
        self._admit(daemon, now)
        return daemon

    def readmit(self, now: float) -> None:
        """The database can be written again: send what had to be on record first, without waiting
        until the daemons ask again.
        """
        for daemon in self.members.daemons.values():
            if daemon.registered and daemon.state == "starting" and daemon.role != "agent":
                self._admit(daemon, now)

    def _admit(self, daemon: Daemon, now: float) -> None:
        self._welcome(daemon, now)
        if daemon.role == "server":
            # An assignment that arrived before the welcome was ignored.
            self.context.retries.drop(("assign", daemon.name))
            self.assign(now)

    def _issue_term(self, daemon: Daemon) -> None:
        if daemon.role != "agent":
            daemon.term = self._terms[daemon.name] = self._terms.get(daemon.name, 0) + 1
            self.context.do(IssueTerm(daemon.name, daemon.term))

    def _welcome(self, daemon: Daemon, now: float) -> None:
        token, settings = b"", daemon.settings
        if daemon.role == "worker":
            token = sign(self.keyring.token_key, self.run.run_id, daemon.index, daemon.term)
            limits = self.run.job.limits
            texts = {field.name: getattr(limits, field.name) for field in fields(limits)}
            settings = {key: EVERY_RUN.parse(key, text) for key, text in texts.items()} | settings
        elif daemon.role == "server":
            token = self.keyring.token_key
            self.notify_waiting(daemon, now)
        finds = daemon.name == FINDS_BATCH_SIZE and batches.is_open(self.run.job)
        welcome = m.Welcome(daemon.name, daemon.index, daemon.term, token, settings, finds)
        self.context.send(daemon.name, welcome)

    def notify_waiting(self, server: Daemon, now: float) -> None:
        """Send a server the public keys of the current workers, which may connect to it."""
        workers = [worker.name for worker in self._workers_of(server)]
        if names := keys_of(self.keyring, workers, self.members.key_sources()):
            allowed_peers = m.AllowedPeers(self.context.next_number(), json.dumps(names).encode())
            self.context.ask(("allowed_peers", server.name), server.name, allowed_peers, now)

    # ------------------------------------------------------------ the model and the servers

    def check_model(self, worker: Daemon, layout: bytes) -> Layout:
        """The layout that a worker has built. Raises DlctlError if it differs from that of the
        other workers, of this run so far or of its checkpoint, or is too small for the servers.
        """
        built, known = Layout.from_bytes(layout), self.layout or self._before
        known = self._parts.known(worker.index, known)
        if known is not None and built != known:
            what = "the model of the script" if self.run.job.has_loop else "model()"
            hint = f"{what} must have the same layers in every process"
            if self.restore or self.under_way:
                hint = (
                    f"undo the change of {what} and start again, or start with --fresh to begin a "
                    f"new run; {hint}"
                )
            raise DlctlError(
                f"{worker.name} builds another model than this run has had: "
                f"{built.difference(known)}",
                hint=hint,
            )
        if not self.run.division.is_divided:
            self._shards_of(built)
        return built

    def check_values(self, worker: Daemon, values: str) -> None:
        """values: `ModelReady.values`. Raises DlctlError if the training loops of a new run begin
        with different ones: the replicas would never be the same model.
        """
        if not values or self.restore or self.under_way:
            return
        self._values = self._values or values
        if values != self._values:
            raise DlctlError(
                f"the model of {worker.name} begins with other values than those of the other "
                "workers",
                hint="call torch.manual_seed(0) before the model is made, or load the same weights "
                "in every worker",
            )

    def assign(self, now: float) -> None:
        """Assign every server its slice, as soon as the size of the model is known."""
        if self.layout is None:
            return
        servers = self.members.of_role("server")
        for server in servers:
            key = ("assign", server.name)
            is_new = server.registered and not self.is_of_old_cut(server)
            if is_new and not server.address and key not in self.context.retries:
                samples = (self._samples, batches.bound(self.run.job))
                is_moving = self.cut.number and not server.has_served
                restore = self.cut.directory if is_moving else self.restore
                how = (restore, server.has_served, *samples, self.cut.number)
                assign = m.Assign(self.bounds, self._bytes, *how)
                self.context.ask(key, server.name, assign, now)

    def on_serving(self, peer: Peer, message: m.Serving, now: float) -> None:
        server = self.members.get(message.name)
        if server is None or server.peer != peer:
            return
        self.context.retries.done(("assign", server.name), now)
        server.address = message.address
        server.change_state(daemon_states.RUNNING)
        was_moving = self.is_moving()
        if server.has_served and not was_moving:
            self.notify_moved(server, now)
        server.has_served = True
        self.introduce()
        if was_moving:
            self._announce(now)

    # ------------------------------------------------------------ another cut

    def recut(self, cut: Cut, bounds: Bounds) -> None:
        """The servers have other parts of the model from now on, and have to join again."""
        self.cut, self.bounds = cut, bounds
        for server in self.members.of_role("server"):
            server.address, server.has_served = "", False
            self.context.retries.drop(("assign", server.name))
            self.context.send(server.name, m.Recut(cut.number, is_made=True))

    def is_of_old_cut(self, daemon: Daemon) -> bool:
        """Whether this server's process has not joined again since the newest cut."""
        return daemon.role == "server" and self.cut.ends(daemon.index, daemon.term)

    def is_moving(self) -> bool:
        """Whether a server does not serve its part of the newest cut yet."""
        servers = self.members.of_role("server")
        return self.cut.number > 0 and not all(server.has_served for server in servers)

    def _announce(self, now: float) -> None:
        """Tell the workers the newest cut and where its servers are, once all serve: since they had
        other parts any of them may have been replaced, and the next process listen elsewhere.
        """
        if self.is_moving():
            return
        self.tell_bounds(now)
        for server in self.members.of_role("server"):
            self.notify_moved(server, now)

    def tell_bounds(self, now: float, worker: Daemon | None = None) -> None:
        """Tell the workers, or this one, the newest cut, which all servers serve."""
        if not self.cut.number or self.is_moving():
            return
        new = m.NewBounds(self.cut.number, self.bounds, self.cut.clock)
        for each in self.members.of_role("worker") if worker is None else [worker]:
            if each.alive and each.model_ready:
                self.context.ask(("bounds", each.name), each.name, new, now)

    def host_of(self, agent: str) -> Host | None:
        """The entry of a host in the job file, by its agent."""
        return self._agents.get(agent)

    def _workers_of(self, server: Daemon) -> list[Daemon]:
        """The workers that may know a server."""
        workers = self.members.of_role("worker")
        slots = self.run.division.slots_of(server.index, [w.index for w in workers])
        return [worker for worker in workers if worker.index in slots]

    def notify_moved(self, server: Daemon, now: float) -> None:
        """Notify the workers that know an earlier process of this server of the new one."""
        public = self.keyring.public(server.name)
        moved = m.Moved(server.index, server.term, server.address, public)
        for worker in self._workers_of(server):
            if worker.alive and worker.model_ready:
                key = (f"moved{server.index}", worker.name)
                self.context.ask(key, worker.name, moved, now)

    def introduce(self, newcomer: Daemon | None = None) -> None:
        """Send the waiting workers the servers' addresses, once all servers serve. If only one
        worker is new, the others have been sent them: they are sent them again if they are few.
        """
        waiting = list(self._waiting)
        servers = self.members.of_role("server")
        addresses = tuple(server.address for server in servers)
        frozen = self.frozen()
        if frozen is None or not all(addresses) or batches.is_open(self.run.job):
            return
        if newcomer is not None and len(waiting) > FEW:
            waiting = [worker for worker in waiting if worker is newcomer]
        for worker in waiting:
            self.context.send(worker.name, self._topology(worker, servers, frozen))

    def _topology(self, worker: Daemon, servers: list[Daemon], frozen: bytes) -> m.Topology:
        """What a worker is told of the servers: of those that it may know."""
        division = self.run.division
        known = division.shards_of(worker.index, len(servers))
        mine = [servers[shard] for shard in known]
        base = self.bounds[known.start] if mine else 0
        bounds = tuple(end - base for end in self.bounds[known.start : known.stop + 1])
        # Before the release no worker has pushed anything, so a replacement restores what its
        # predecessor restored.
        initialise = division.initialises(worker.index) and not self.restore
        return m.Topology(
            tuple(server.address for server in mine),
            tuple(self.keyring.public(server.name) for server in mine),
            bounds, initialise, self.restore, self.under_way,
            b"" if division.number(worker.index) else frozen,
            batches.size(self.run.job, worker.agent), known.start, base,
            self.cut.number,
        )  # fmt: skip
