"""The server role: how the owner of one shard joins a run, is saved, and leaves.

    registering -> assigned a slice -> (restoring, or resuming the stored state) -> serving
                         ^  |
                         +--+ no disk space to rewrite the stored state

`ShardProtocol` is the running shard. A worker's message that arrives before this server has its
slice is dropped: the worker resends it. What is sent may have to wait for commits (`commits.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from dlctl.algorithms.base import Method, Table
from dlctl.algorithms.tables import optimizer_of, side_of
from dlctl.compress.base import Compressor
from dlctl.compress.none import Dense
from dlctl.errors import DlctlError, RemoteProtocolError
from dlctl.job import batches, schedule
from dlctl.job.config import COUNT_MAX, JobFile
from dlctl.job.schedule import Scale
from dlctl.model import cut
from dlctl.model.flat import AVERAGED, Layout
from dlctl.optim import on_shard
from dlctl.optim.averaged import Averaged
from dlctl.optim.base import Optimizer
from dlctl.optim.matrices import MatrixOptimizer, kept_of
from dlctl.records.manifest import OWN
from dlctl.roles.protocol.authz import Authz, allowed_peers_in
from dlctl.roles.protocol.context import COORDINATOR, EXIT_FENCED, REPORT_S, Context
from dlctl.roles.protocol.effects import (
    ArraysLoaded,
    ArraysSaved,
    CoordinatorGone,
    LoadArrays,
    SavedTable,
)
from dlctl.roles.protocol.files import FileSealed, FilesMissing, saved_file
from dlctl.roles.protocol.live_values import LiveValues, Place
from dlctl.roles.protocol.saving import Restoring, Saving
from dlctl.roles.protocol.watchdog import Watchdog
from dlctl.roles.server.abuse_guard import AbuseGuard
from dlctl.roles.server.commits import Commits, Committed
from dlctl.roles.server.reporting import Reporting
from dlctl.roles.server.shard_protocol import ShardProtocol
from dlctl.roles.server.table_shard import TableShard
from dlctl.shards.base import KEPT, Extras, Shard, Spec, Storages, W
from dlctl.shards.errors import Diverged, NoRoom, StateHeld
from dlctl.shards.memory import InMemory
from dlctl.shards.rows import RowSlice, RowTables
from dlctl.util.names import WAITS_FOR_DISK, WAITS_FOR_SPACE
from dlctl.wire import messages as m
from dlctl.wire.machine import (
    Coming,
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Peer,
    Received,
    Reconnected,
    Send,
    Started,
    StopRequested,
)
from dlctl.wire.messages import Register

SLOW_COMMIT_S = 1.0
"""A commit that takes longer is reported."""
LOOK_S = 2.0
"""Interval between two attempts to open a shard for which the disk has no space."""


@dataclass(eq=False)
class Server:
    registration: Register
    job: JobFile
    address: str
    algorithm: Method
    optimizer: type[Optimizer]
    compressor: type[Compressor]
    storages: Storages = field(default_factory=InMemory)
    """Where the shard is stored."""

    def __post_init__(self) -> None:
        self.options = self.algorithm.Options(**self.job.algorithm.options)
        if "server" not in self.algorithm.shape.survives:
            # State shared by the coordinator and all shards cannot be resumed by a single shard.
            self.storages = InMemory()
        self.context = Context(self.job.timeouts.resend_s)
        self.commits = Commits(self.context)
        self.lr = self.job.optimizer.options.get("lr")
        """The learning rate, as long as there is no shard that has it."""
        places: dict[str, Place] = {
            key: (self.options, key) for key in self.algorithm.live_in_shards
        }
        self.live = LiveValues(self.context, self.registration.name, {"lr": (self, "lr"), **places})
        self.authz = Authz(self.context)
        self._waste = AbuseGuard(self.context)
        self._allowed_number = 0
        self._saving = Saving(self.context, self.registration.name)
        self._lifeline = Watchdog()
        self._gathering = Restoring(self.context)
        self._report_at = 0.0
        self._reported: dict[str, Any] = {}
        """The metrics of the last report that has left."""
        self._leaving: m.Shutdown | StopRequested | None = None
        """The server exits as soon as no commit is under way."""
        self._forget_shard()

    def _forget_shard(self) -> None:
        """What a server knows that is not of the run yet."""
        self.serving: ShardProtocol | None = None
        self._welcome: m.Welcome | None = None
        self._reporting: Reporting | None = None
        self._restoring = False
        self._scale: tuple[float, ...] = ()
        """The factors of the learning rate, as last received from the coordinator."""
        self._waits: m.Assign | None = None
        """The server waits for disk space for its stored shard."""
        self._look_at: float | None = None
        """When the server looks for space again."""
        self._recut = False
        """The shard is to be dropped as soon as no commit is under way."""

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        leaving: list[Effect] = []
        if isinstance(event, Committed):
            leaving = self.commits.committed(event.number)
        elif not self._is_ending:
            self._take(event, now)
        if self._recut and not self._is_ending and not self.commits.under_way:
            self._begin_anew(now)
        if not self._is_ending:
            self._report_if_due(now)
            if self._reporting is not None:
                self._reporting.report_changes(now)
        elif self.commits.under_way:
            self._report_disk_if_due(now)
        elif self._leaving is not None:
            self._leave(self._leaving)
        leaving += self.commits.hold(self.context.clear(), now)
        for effect in leaving:
            if isinstance(effect, Send) and isinstance(effect.message, m.Report):
                self._reported = effect.message.metrics
        return leaving

    def _take(self, event: Event, now: float) -> None:
        match event:
            case Received(peer, message, identity):
                self._on_message(peer, message, identity, now)
            case Coming():
                self._on_coming(event)
            case FilesMissing() | FileSealed():
                self._gathering.on_event(event, now)
            case Reconnected(peer):
                self._report_at = now  # A report identifies this connection to the coordinator.
                # Also what was sent since: the coordinator ignores it before that report.
                self.context.retries.again(peer, now, now)
            case DeadlineReached():
                self.context.do(*self.context.retries.due(now))
                if self._waits is not None and self._look_at is not None and now >= self._look_at:
                    self._on_assign(self._waits, now)
                if self._lifeline.is_over(now):
                    self.context.do(Exit(0, "no heartbeat from the coordinator for too long"))
            case ArraysLoaded(arrays, state):
                self._on_restored(arrays, state)
            case ArraysSaved():
                self._saving.on_saved(event)
            case CoordinatorGone():
                self._lifeline.lost(now)
            case Started():
                self._lifeline.heard(now)
                self.context.ask("register", COORDINATOR, self.registration, now)
            case StopRequested():
                self._leaving = event

    @property
    def _is_ending(self) -> bool:
        """Whether only commits are waited for: no event may change anything any more."""
        return self._leaving is not None or self.commits.is_ending

    def deadline(self) -> float | None:
        if self._is_ending:
            return self._report_at if self._welcome and self.commits.under_way else None
        times = [self.context.retries.deadline(), self._lifeline.deadline(), self._look_at]
        times += [self._report_at] if self._welcome else []
        return min((t for t in times if t is not None), default=None)

    def _on_message(self, peer: Peer, message: m.Message, identity: str, now: float) -> None:
        try:
            if peer != COORDINATOR:
                self.authz.check(identity, message)
            self._dispatch(peer, message, identity, now)
        except Diverged as error:
            self.context.do(Exit(1, self.context.fail(self.registration.name, error)))
        except RemoteProtocolError as error:
            what = f"{type(message).__name__} from {identity or repr(peer):.40}"
            self.context.note("warning", f"refused {what}: {error.message}")

    def _on_coming(self, part: Coming) -> None:
        """Part of a message has arrived. An invalid message is refused when all of it has."""
        message = part.message
        if not self._takes_part() or not isinstance(message, m.Push):
            return
        assert self.serving is not None
        if self.authz.may(part.identity, message):
            self.serving.on_push_coming(part.peer, message, part.come)

    def _dispatch(self, peer: Peer, message: m.Message, identity: str, now: float) -> None:
        if type(message) in self._FROM_WORKERS:
            if self.serving is not None and self._takes_part():
                is_useless = self._FROM_WORKERS[type(message)](self.serving, peer, message)
                if is_useless:
                    self._waste.add(identity, now)
            return
        handler = self._FROM_COORDINATOR.get(type(message))
        if handler is None or peer != COORDINATOR:
            # A peer that connects to a server may send only what workers send.
            raise RemoteProtocolError("only workers' messages are taken here")
        self._lifeline.heard(now)
        handler(self, message, now)

    def _takes_part(self) -> bool:
        """Whether workers are answered."""
        return self.serving is not None and not (self._restoring or self.serving.is_paused())

    def _on_allowed_peers(self, message: m.AllowedPeers, now: float) -> None:
        """Take the table of allowed peers; a stale one is ignored."""
        if message.number >= self._allowed_number:
            self._allowed_number = message.number
            self.authz.admit(allowed_peers_in(message.names))
        self.context.send(
            COORDINATOR, m.Noted(self.registration.name, "allowed_peers", message.number)
        )

    # ------------------------------------------------------------ joining the run

    def _on_welcome(self, message: m.Welcome, now: float) -> None:
        if self.context.retries.done("register", now) is not None:
            self._welcome = message
            self.live.begin(message.settings)

    def _on_assign(self, message: m.Assign, now: float) -> None:
        """Open or create the assigned shard. The assignment is resent until it is answered."""
        if self._welcome is None:
            return
        self._look_at = None
        if self.serving is None:
            try:
                self.serving = self._take_charge(message, self._welcome)
            except RemoteProtocolError:
                raise
            except DlctlError as error:
                self._on_unusable_shard(message, error, now)
                return
            self._waits = None
            self._reporting = Reporting(self.context, self.serving)
            self.live.move("lr", (self.serving.shard, "lr"))
            if message.restore and not message.keep:
                self._restore(self.serving)
        if not self._restoring:
            self._answer_assign()

    def _on_recut(self, message: m.Recut, now: float) -> None:
        """The cut for which this server has paused is made, or given up."""
        if self.serving is None or not self.serving.is_paused():
            return
        if not message.is_made:
            self.serving.end_pause(message.cut)
        elif message.cut == self.serving.pause.cut:
            self._recut = True

    def _begin_anew(self, now: float) -> None:
        """Drop the shard, which is in the checkpoint of the new cut, and join the run for another
        one, as a new process would.
        """
        assert self.serving is not None
        for table in self.serving.tables:
            table.shard.storage.close()
        self.storages.discard()
        if self._reporting is not None:
            self._reporting.end()
        self.live.move("lr", (self, "lr"))
        self._forget_shard()
        self.context.ask("register", COORDINATOR, self.registration, now)

    def _take_charge(self, message: m.Assign, welcome: m.Welcome) -> ShardProtocol:
        """Open the shard, new or as stored. Raises DlctlError if that is impossible."""
        layout = Layout.from_bytes(message.layout)
        shards = max(welcome.index + 1, len(message.bounds) - 1)
        if not cut.fits(message.bounds, shards, layout.size()):
            raise RemoteProtocolError("the servers' shards are not the model")
        declared = self.algorithm.shape.tables_of(self.options)
        tables = [self._open(message, welcome, *each) for each in enumerate(declared)]
        serving = ShardProtocol(
            self.context, self.registration.run_id, welcome.token, message, tables,
            self._hands_on,
        )  # fmt: skip
        if message.keep:
            serving.resume()
            version = serving.shard.version
            self.context.note("info", f"resumed the stored shard at version {version}")
        return serving

    @property
    def _hands_on(self) -> bool:
        return self.algorithm.replica.hands_on_buffers(self.options)

    def _open(self, message: m.Assign, welcome: m.Welcome, number: int, table: Table) -> TableShard:
        """Open the shard of one table. Raises DlctlError."""
        layout, servers, index = Layout.from_bytes(message.layout), self.job.servers, welcome.index
        takes_gradients = self.algorithm.pushes_gradients(self.options)
        follows = takes_gradients and table.rule == "optimizer"
        lo, hi = table.bounds(layout, message.bounds, index)
        parts = len(message.bounds) - 1
        optimizer = self._optimizer(layout, lo, hi, table, follows)
        kept = kept_of(optimizer)
        storages = self.storages.of_table(table.name) if number else self.storages
        buffers = 0 if index or number else layout.size(AVERAGED)
        # The most workers that `dlctl scale` accepts, whatever the job says.
        spec = Spec(
            self.registration.run_id, index, lo, hi, optimizer.slots, workers=COUNT_MAX,
            table=table.name if number else "", dtype=table.dtype,
            averaged=buffers, in_commit=buffers if self._hands_on else 0,
            kept=None if kept is None else {n: cut.hi - cut.lo for n, cut in kept.items()},
            replaces=message.cut > 0,
        )  # fmt: skip
        shard = Shard(optimizer, storages.reopen(spec) if message.keep else storages.create(spec))
        if follows:
            if factor := schedule.factor(self.job, message.samples):
                shard.follow(factor)
            gradient = self.job.gradient
            shard.clip_norm = gradient.clip_norm if gradient.clip == "global" else 0.0
        options = self.algorithm.without_live(self.options, self.algorithm.live_in_shards)
        side = side_of(table, self.algorithm, options, shard)
        side.lo, side.batches = lo, batches.cut(self.job)
        side.measures_noise = not number and takes_gradients
        if side.shared_norm is not None:
            side.shared_norm.is_needed = shard.clip_norm > 0 and servers.count > 1
        return TableShard(
            context=self.context, commits=self.commits, declared=table, table=number, index=index,
            term=welcome.term, lo=lo, hi=hi, shard=shard, side=side,
            push_norm_max=servers.push_norm_max, seed=self.job.job.seed,
            rows=RowSlice(RowTables(layout), parts, index) if table.of_rows else None,
            compressor_name="none" if number else self.job.compression.name,
            compressor=Dense if number else self.compressor,
            fetch_values="float32" if number else servers.fetch_values,
            step_samples=message.step_samples,
        )  # fmt: skip

    def _optimizer(
        self, layout: Layout, lo: int, hi: int, table: Table, takes_gradients: bool
    ) -> Optimizer:
        groups = self.job.parameters if takes_gradients else ()
        options = self.job.optimizer.options
        parameters = on_shard.make(self.optimizer, options, groups, layout, lo, hi)
        if isinstance(parameters, MatrixOptimizer):
            for remark in parameters.remarks():
                self.context.note("info", remark)
        if ema := self.job.average.ema:
            parameters = Averaged(parameters, ema)
        workers = self.job.workers.count
        return optimizer_of(table, self.algorithm, self.options, parameters, workers)

    def _on_unusable_shard(self, message: m.Assign, error: DlctlError, now: float) -> None:
        """There is no shard to serve. That of a run under way waits for disk space, whether it is
        stored or in the checkpoint of a cut: another process would fail as well. An unusable state
        must not silently be replaced by zeros, so the error is fatal, unless another process holds
        the state and may release it.
        """
        is_under_way, is_reported = message.keep or message.cut > 0, self._waits is not None
        waits = isinstance(error, NoRoom) and is_under_way
        self._waits, self._look_at = (message, now + LOOK_S) if waits else (None, None)
        if waits and is_reported:
            return
        # The shard cannot move: another place would not have its state.
        hint = "free some space there; the server keeps retrying" if waits else None
        is_fatal = not (waits or isinstance(error, StateHeld))
        words = self.context.fail(self.registration.name, error, hint, is_fatal=is_fatal)
        if not waits:
            self.context.do(Exit(1, words))

    def _restore(self, serving: ShardProtocol) -> None:
        self._restoring = True
        vectors = (W, *(f"slot.{s}" for s in serving.shard.slots))
        extras = ("averaged",) if serving.index == 0 else ()
        lo, hi = serving.parameters.lo, serving.parameters.hi
        layout = Layout.from_bytes(serving.assigned.layout)
        tables = tuple(
            SavedTable(t.declared.name, t.declared.size(layout), t.lo, t.hi, t.declared.dtype)
            for t in serving.tables[1:]
        )
        kept = tuple(
            SavedTable(name, cut.size, cut.lo, cut.hi)
            for name, cut in (kept_of(serving.shard.optimizer) or {}).items()
        )
        own = serving.index if serving.assigned.cut else None
        load = LoadArrays(serving.assigned.restore, vectors, extras, lo, hi, tables, kept, own)
        self._gathering.load(load)

    def _on_restored(self, arrays: Any, state: m.Json) -> None:
        """Restore the state from before the stop (`TableShard.restore`)."""
        assert self.serving is not None
        serving = self.serving
        own = state.get(OWN)
        for table in serving.tables[1:]:
            name = table.declared.name
            table.shard.storage.fill({W: arrays[f"table.{name}"]}, None)
            table.restore(state["tables"][name], own and own["tables"][name])
        shard = serving.shard
        vectors = {W: arrays[W]}
        for name, first in shard.optimizer.slots.items():
            # A new slot, for example of an added worker, gets its initial value.
            saved = arrays.get(f"slot.{name}")
            vectors[name] = np.full(shard.size, first, np.float32) if saved is None else saved
        for name, now in shard.storage.kept.items():
            # Of another optimiser: it begins with zeros, as for a new run.
            vectors[KEPT + name] = arrays.get(KEPT + name, np.zeros_like(now))
        extras = Extras(arrays["averaged"]) if serving.index == 0 else None
        serving.parameters.restore(state, own)
        serving.begin_with(vectors, extras)
        self._restoring = False
        self.context.note("info", f"restored from {serving.assigned.restore}")
        self._answer_assign()

    def _answer_assign(self) -> None:
        assert self.serving is not None
        serving = m.Serving(self.registration.name, self.address, self.serving.initialised)
        self.context.send(COORDINATOR, serving)

    # ------------------------------------------------------------ from the coordinator

    def _on_members(self, message: m.Members, now: float) -> None:
        if self.serving is None:
            return
        if message.scale and message.scale != self._scale:
            self._scale = message.scale
            scale, samples = Scale(*message.scale), self.serving.assigned.samples
            if factor := schedule.factor(self.job, samples, scale):
                self.serving.shard.follow(factor)
        if not self.serving.is_paused():
            self.serving.on_members(frozenset(message.slots))

    def _on_vector_op(self, message: m.VectorOp, now: float) -> None:
        serving = self.serving
        if serving is None or not serving.is_open:
            return
        sums = serving.vectors.run(message)
        of = (message.number, serving.index, serving.vectors.newest)
        self.context.send(COORDINATOR, m.VectorResult(*of, sums))

    # ------------------------------------------------------------ saving

    def _on_save(self, message: m.Save, now: float) -> None:
        """Copy the shard between two pushes; the driver writes the copy while pushes continue."""
        if not self._saving.is_new(message):
            return
        if self.serving is None or not self.serving.initialised:
            why = "the shard has no values yet"
            if self._waits is not None:
                why = "the disk has no room for the shard"
            elif self._welcome is None:
                why = "it is not admitted to the run yet"
            self._saving.without_file(message, why)
            return
        serving, shard = self.serving, self.serving.shard
        if message.is_last:
            serving.close(message.checkpoint)
        arrays = {W: shard.w.copy()}
        arrays |= {f"slot.{n}": a.copy() for n, a in shard.slots.items()}
        arrays |= {f"{KEPT}{n}": a.copy() for n, a in shard.storage.kept.items()}
        for table in serving.tables[1:]:
            arrays[f"table.{table.declared.name}"] = table.shard.w.copy()
        if serving.buffers is not None:
            arrays["averaged"] = serving.buffers.average().copy()
        self._saving.begin(
            message, saved_file(self.registration.name), arrays, self._state(serving)
        )

    def _state(self, serving: ShardProtocol) -> dict[str, Any]:
        is_paused = serving.is_paused()
        tables = {t.declared.name: t.state(for_cut=is_paused) for t in serving.tables[1:]}
        ranges = kept_of(serving.shard.optimizer) or {}
        kept = {name: {"lo": cut.lo, "hi": cut.hi} for name, cut in ranges.items()}
        return {
            "generation": serving.term,
            **serving.parameters.state(for_cut=is_paused),
            **({"kept": kept} if kept else {}),
            **({"tables": tables} if tables else {}),
        }

    # ------------------------------------------------------------ exit and reports

    def _on_shutdown(self, message: m.Shutdown, now: float) -> None:
        self._report_at = now
        self._report_if_due(now)
        self._leaving = message

    def _leave(self, why: m.Shutdown | StopRequested) -> None:
        """Exit, in an orderly way: no commit is under way, and all that was sent has left."""
        if self.serving is not None:
            for table in self.serving.tables:
                table.shard.storage.close()
        if isinstance(why, m.Shutdown) and not why.keep_state:
            self.storages.discard()
        self.context.do(Exit(0, why.reason))

    def phase(self) -> tuple[str, str]:
        """(what this server does, which process it waits for)."""
        if self._waits is not None:
            return WAITS_FOR_SPACE, ""
        if self.serving is None:
            return "waiting for the size of the model", "worker-0"
        if self._restoring:
            return "restoring", ""
        if not self.serving.initialised:
            return "waiting for initial values", "worker-0"
        if self.serving.last_checkpoint:
            return "closed for the last checkpoint", ""
        if self.serving.is_paused():
            return "paused for another cut of the model", COORDINATOR
        for table in self.serving.tables:
            of = f' of table "{table.declared.name}"' if table.table else ""
            what = f"holding step {table.shard.version}{of}"
            if slots := sorted(table.side.waits_for()):
                return what, ", ".join(f"worker-{slot}" for slot in slots)
            norm = table.side.shared_norm
            if table.side.held() or (norm is not None and norm.part()):
                return what, COORDINATOR
        return "serving", ""

    def _report_if_due(self, now: float) -> None:
        if self._welcome is None or now < self._report_at:
            return
        if self._report_disk_if_due(now):
            return
        metrics = self.serving.metrics(now) if self.serving else {}
        metrics["settings"] = self.live.values()
        report = m.Report(
            self.registration.name, self.registration.incarnation, *self.phase(), metrics
        )
        self.context.send(COORDINATOR, report)

    def _report_disk_if_due(self, now: float) -> bool:
        """If a report is due and the disk is slow, tell that, and since when, and nothing else: the
        rest is not durable. Returns whether it did.
        """
        if self._welcome is None or now < self._report_at:
            return False
        self._report_at = now + REPORT_S
        if self.commits.waits_s(now) <= SLOW_COMMIT_S:
            return False
        of = (self.registration.name, self.registration.incarnation, WAITS_FOR_DISK, "")
        metrics = {**self._reported, **self.commits.report(now)}
        self.context.send(COORDINATOR, m.Report(*of, metrics))
        return True

    _FROM_COORDINATOR: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        m.Welcome: _on_welcome,
        m.Assign: _on_assign,
        m.Heard: lambda self, message, now: None,
        m.Members: _on_members,
        m.AllowedPeers: _on_allowed_peers,
        m.VectorOp: _on_vector_op,
        m.Decided: lambda self, message, now: (
            self._reporting and self._reporting.on_decided(message)
        ),
        m.NormTotal: lambda self, message, now: (
            self._reporting and self._reporting.on_total(message)
        ),
        m.Recut: _on_recut,
        m.ChangeSettings: lambda self, message, now: self.live.on_change(message),
        m.Save: _on_save,
        m.Reopen: lambda self, message, now: self.serving and self.serving.reopen(message.last),
        m.FileData: lambda self, message, now: self._gathering.transfers.on_data(message, now),
        m.Dismiss: lambda self, message, now: self.context.do(Exit(EXIT_FENCED, message.reason)),
        m.Shutdown: _on_shutdown,
    }
    _FROM_WORKERS: ClassVar[dict[type, Callable[[ShardProtocol, Peer, Any], bool | None]]] = {
        m.Join: ShardProtocol.on_join,
        m.Initialise: ShardProtocol.on_initialise,
        m.Push: ShardProtocol.on_push,
        m.Fetch: ShardProtocol.on_fetch,
        m.FetchRows: ShardProtocol.on_fetch,
        m.PushBuffers: ShardProtocol.on_push_buffers,
        m.FetchBuffers: ShardProtocol.on_fetch_buffers,
    }
