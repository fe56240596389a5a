"""The worker role: how a replica joins a run, trains in it, and leaves it.

`Joining` handles the join, `Training` the work, `WorkerEvaluations` and `Saves` what interrupts it.
This module passes events and messages on to them, drains, reports, and exits; every request of the
coordinator may arrive twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from dlctl.algorithms.base import Method, ReplicaSide, Site, Start
from dlctl.algorithms.shapes import check_names
from dlctl.compress.base import Compressor
from dlctl.errors import JobFailed, RemoteProtocolError
from dlctl.job import schedule
from dlctl.job.config import JobFile
from dlctl.model.flat import Layout
from dlctl.model.parts import Division
from dlctl.roles.protocol.context import (
    COORDINATOR,
    EXIT_FENCED,
    EXIT_POISONED,
    REPORT_S,
    Context,
)
from dlctl.roles.protocol.effects import (
    ArraysLoaded,
    ArraysSaved,
    BuffersLoaded,
    ComputeStateTaken,
    CoordinatorGone,
    EvaluationRun,
    FrozenLoaded,
    FrozenWritten,
    LoadArrays,
    LoadBuffers,
    ModelBuilt,
    RowsWanted,
    TaskFailed,
    TaskLocated,
)
from dlctl.roles.protocol.files import FileSealed, FilesMissing
from dlctl.roles.protocol.loop_effects import LoopLeft
from dlctl.roles.protocol.saving import Restoring
from dlctl.roles.protocol.watchdog import Watchdog
from dlctl.roles.worker.evaluation import WorkerEvaluations
from dlctl.roles.worker.interface import (
    FROM_COORDINATOR,
    FROM_SHARDS,
    OF_GROUP,
    OF_STEPS,
    Evaluable,
    MakeSteps,
    ReplicaAtWork,
    Savable,
)
from dlctl.roles.worker.joining import Joining
from dlctl.roles.worker.last_read import LastRead
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.saves import Saves
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.services.asking import MODEL, NO_MODEL, pack
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.roles.worker.services.computing import Computing
from dlctl.roles.worker.services.engines import RUNNING, STEPPING
from dlctl.roles.worker.settings import WorkerSettings, WorkTerms
from dlctl.roles.worker.stall import StallDetector
from dlctl.roles.worker.training import Origin, Training
from dlctl.wire import messages as m
from dlctl.wire.machine import (
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Note,
    Peer,
    Received,
    Reconnected,
    Started,
    StopRequested,
)
from dlctl.wire.messages import Register

PASSING = {"computing", "saving", "waiting for data", "fetching", "pushing", RUNNING, STEPPING}
"""Phases that change with every step: they are reported once a second, not at each change."""
BUSY = {"computing", "saving", "evaluating", RUNNING, STEPPING, "building the model", "drained"}
"""Phases in which the worker waits for nobody."""
DETAIL_CHARS_MAX = 16_000
SAVES_MODEL = "worker-0"
"""Whose `run.save` writes the model."""


class AtWork(ReplicaAtWork, Evaluable, Savable, Protocol):
    """A replica that has begun: all that a worker knows of it."""


@dataclass(eq=False)
class Worker:
    registration: Register
    job: JobFile
    algorithm: Method
    compressor: Compressor
    address: str = ""
    """Where this replica listens for others; "" if it does not listen."""
    steps: MakeSteps = Computing
    """Makes the source of the replica's steps."""

    def __post_init__(self) -> None:
        name, shape = self.registration.name, self.algorithm.shape
        self.context = Context(self.job.timeouts.resend_s)
        self.send_queue = SendQueue(self.context.retries)
        self.settings = WorkerSettings(
            self.context, name, self.job, self.algorithm, self.compressor, self.send_queue
        )
        self.members = PeerMembers(self.context, name, connects="peers" in shape.links)
        self.joining = Joining(self.context, self.registration, shape)
        self._division = Division(shape.parts, self.job)
        self.training: AtWork | None = None
        self._restoring = Restoring(self.context)
        self._saves = Saves(self.context, name, self.job, shape)
        self._evaluations = WorkerEvaluations(self.context, name, of_all=shape.model == "mean")
        saves_model = self.job.has_loop and name == SAVES_MODEL
        self._last_read = LastRead(self.context, reads=saves_model)
        self._lifeline = Watchdog()
        self._draining = False
        self._leaves = ""
        """Why the loop of this worker has left the run; "": it has not."""
        self.ended = ""
        """`Shutdown.ended`"""
        self._stalls = StallDetector(self.context)
        self._report_at = 0.0
        self._reported_phase = ""

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        try:
            self._on_event(event, now)
            self._advance(now)
        except JobFailed as failed:
            self._fail(failed.message, failed.hint or "")
        self.context.do(*self.send_queue.flush(now))
        self._report_if_due(now)
        return self.context.clear()

    def deadline(self) -> float | None:
        times = [self.context.retries.deadline(), self.send_queue.deadline()]
        times += [self.joining.rejoin_at, self._lifeline.deadline()]
        times += [self.training.deadline()] if self.training else []
        times += [self._last_read.deadline()]
        times += [self._report_at] if self.joining.identity else []
        return min((t for t in times if t is not None), default=None)

    def _on_event(self, event: Event, now: float) -> None:
        match event:
            case Received(peer, message, identity):
                self._on_message(peer, message, identity, now)
            case RowsWanted(rows) if self.training:
                self._evaluations.want(rows, self.training)
            case EvaluationRun() if self.training:
                self._evaluations.on_run(event, self.training)
            case ComputeStateTaken(arrays):
                self._saves.on_torch_state(arrays)
            case Reconnected(peer, lost_at):
                self._report_at = now  # A report identifies this connection to the coordinator.
                self.joining.on_reconnected(peer, lost_at, now)
            case DeadlineReached():
                self._on_deadline(now)
            case ModelBuilt():
                self.joining.on_model(event, now)
            case ArraysLoaded(arrays, _):
                self._begin(arrays)
            case FilesMissing() | FileSealed():
                self._restoring.on_event(event, now)
            case ArraysSaved():
                self._saves.on_saved(event)
            case FrozenLoaded():
                self.joining.join(now)
            case FrozenWritten():
                self.joining.on_frozen_written(event)
            case BuffersLoaded() if self.training:
                self.training.on_event(event, now)
            case BuffersLoaded():
                self.joining.is_ready = True
            case TaskFailed(error, detail):
                self._fail(error, detail)
            case TaskLocated():
                self._report_at = now if self._stalls.located(event) else self._report_at
            case CoordinatorGone():
                self._lifeline.lost(now)
            case Started():
                self._lifeline.heard(now)
                self.joining.begin(now)
            case StopRequested(reason):
                self.context.do(Exit(0, reason))
            case LoopLeft(reason):
                self._leaves = reason
                if self.training is not None:
                    self.training.on_event(event, now)
                self._on_drain(m.Drain(reason), now)
            case _ if self.training and isinstance(event, OF_STEPS + OF_GROUP):
                self.training.on_event(event, now)

    def _on_message(self, peer: Peer, message: m.Message, identity: str, now: float) -> None:
        is_control = peer == COORDINATOR
        if is_control:
            self._lifeline.heard(now)
        handler = (self._FROM_COORDINATOR if is_control else self._FROM_SERVERS).get(type(message))
        try:
            if isinstance(message, m.PeerRequest) and isinstance(peer, bytes):
                self._on_ask(peer, message, identity)
            elif isinstance(message, m.PeerReply) and not isinstance(peer, bytes):
                if self.training is not None:
                    self.training.on_answer(peer, message, now)
            elif handler is None or not (is_control or self._is_from_shard(peer, message)):
                raise RemoteProtocolError("this connection carries no message of this kind")
            else:
                handler(self, message, now)
        except RemoteProtocolError as error:
            what = f"{type(message).__name__} from {peer!r:.40}"
            self.context.note("warning", f"refused {what}: {error.message}")

    def _is_from_shard(self, peer: Peer, message: m.Message) -> bool:
        """Whether the message is about the shard of the server that sent it."""
        shards = [link.shard for link in self.joining.links if link.peer == peer]
        return bool(shards) and shards == [getattr(message, "shard", *shards)]

    def _on_deadline(self, now: float) -> None:
        self.context.do(*self.context.retries.due(now))
        self.joining.on_deadline(now)
        if self._lifeline.is_over(now):
            self.context.do(Exit(0, "no heartbeat from the coordinator for too long"))

    def _advance(self, now: float) -> None:
        if self.training is None:
            self._begin_if_ready()
        if self.training is None:
            return
        replica, side = self.training, self.training.side
        self._evaluations.advance(replica, now)
        if save := self._last_read.advance(replica, now):
            self._saves.on_save(save, begins=True)
        replica.hold(self._saves.holds(side))
        replica.advance(now)
        if self._leaves and replica.phase().what == "drained":
            self.context.do(Exit(0, self._leaves))
        if self._saves.take_if_clean(replica) and not self._saves.holds(side):
            replica.hold(False)
            replica.advance(now)

    # ------------------------------------------------------------ joining the run

    def _on_welcome(self, message: m.Welcome, now: float) -> None:
        if self.joining.on_welcome(message, now):
            self.settings.begin(message.settings)
            self._listen(now)

    def _on_peers(self, message: m.Peers, now: float) -> None:
        identity = self.joining.identity
        if identity is None or not self.members.on_peers(message, identity.slot):
            return
        if self.training is not None:
            self.training.on_message(message, now)

    def _listen(self, now: float) -> None:
        """Announce the address at which this replica listens for others."""
        identity = self.joining.identity
        if self.address and identity is not None:
            message = m.Listening(identity.slot, identity.term, self.address)
            self.context.ask("listening", COORDINATOR, message, now)

    def _on_ask(self, peer: Peer, message: m.PeerRequest, identity: str) -> None:
        """Answer a replica. Raises RemoteProtocolError for what no replica of this run sends."""
        self.members.authz.check(identity, message)
        me = self.joining.identity
        if self.training is not None:
            self.training.on_ask(peer, message)
        elif me is not None and message.op == MODEL:
            none = m.PeerReply(me.slot, me.term, message.request, NO_MODEL, pack(()))
            self.context.send(peer, none)

    def _on_topology(self, message: m.Topology, now: float) -> None:
        if load := self.joining.on_topology(message, now):
            self._restoring.load(load)

    def _on_joined(self, message: m.Joined, now: float) -> None:
        if self.joining.on_joined(message, now) and self.training is not None:
            self.training.on_message(message, now)

    def _begin_if_ready(self) -> None:
        """A worker requests data only after it has restored its residual, and the run continues
        when all workers have requested data. Before that no worker saves, and a worker that dies is
        replaced by a process that restores the residual again.
        """
        lacks_members = self.members.connects and not self.members.number
        if not self.joining.is_ready or lacks_members:
            return
        if not self.joining.restores():
            self._begin()
        else:
            self.joining.begin_to_restore()
            self._restoring.load(LoadArrays(self.joining.restores()))

    def _begin(self, saved: Mapping[str, m.Array] | None = None) -> None:
        """Start the method; saved: the replica's state from before a stop."""
        model, shape = self.joining.model, self.algorithm.shape
        assert model is not None
        if self.settings.own_rate is not None:
            self.settings.own_rate.factor = schedule.factor(self.job, model.ready.samples)
        side = self._side(model)
        start: Start = "joins" if self.joining.is_under_way() else "new"
        side.begin("restored" if saved else start)
        check_names(side)
        if saved:
            self._saves.restore(side, saved)
        begins = start == "new" or bool(saved)
        if model.mark is not None and begins:
            model.mark[0] = 1  # The shared memory is a model of the run.
        collecting = None
        if "group" in shape.links:
            collecting = Collecting(
                self.context, self.registration.name, self.links.identity,
                self.job.timeouts.silent_s, begins=begins, hands_on=shape.model == "replica",
            )  # fmt: skip
        self.compressor.reseed(*self._seed)
        takes_over = not begins and shape.model != "tables"
        origin = Origin(model.averaged, takes_over, model.mark)
        self.training = Training(
            self, self.algorithm, side, origin, collecting=collecting, steps=self.steps,
            asks=self._division.asked_by(self.links.identity.slot),
        )  # fmt: skip
        if self._draining:
            self.training.drain()

    def _side(self, model: ModelBuilt) -> ReplicaSide:
        """The method's replica side, which has not begun."""
        return self.algorithm.replica(
            Site(
                options=self.settings.options,
                parameters=model.parameters,
                slot=self.links.identity.slot,
                layout=Layout.from_bytes(model.ready.layout),
                rng=np.random.default_rng(self._seed),
                members=self.members.slots,
                has_inner=self.settings.own_rate is not None,
                pushes_all=self.compressor.takes_all,
                role=self._division.of(self.links.identity.slot).role,
            )
        )

    @property
    def _seed(self) -> tuple[int, int, int]:
        return (self.job.job.seed, self.links.identity.slot, self.links.identity.term)

    # ------------------------------------------------------------ the host of the replica

    @cached_property
    def links(self) -> Links:
        identity = self.joining.identity
        assert identity is not None
        joining = self.joining
        of = (self.context, identity, joining.tables, self.send_queue, self.members)
        return Links(*of, joining.flights)

    @cached_property
    def terms(self) -> WorkTerms:
        return self.settings.terms(self.joining.batch_size(self.job))

    def leave_poisoned(self, error: str, detail: str) -> None:
        self.context.do(Note("error", error, {"detail": detail}), Exit(EXIT_POISONED, error))

    # ------------------------------------------------------------ requests

    def _pass_on(self, message: m.Message, now: float) -> None:
        if self.training is not None:
            self.training.on_message(message, now)

    def _on_new_bounds(self, message: m.NewBounds, now: float) -> None:
        is_news = self.joining.on_new_bounds(message, self.send_queue, now)
        if is_news and self.training is not None:
            self.training.cut_anew()

    def _on_evaluate(self, message: m.Evaluate, now: float) -> None:
        if self.training is not None:
            self._evaluations.on_evaluate(message, self.training, now)

    def _on_buffers(self, message: m.Buffers, now: float) -> None:
        if not self.joining.on_buffers(message, now):
            return
        if self.training is None:
            self.context.do(LoadBuffers(message.averaged))
        else:
            self.training.on_message(message, now)
            self._evaluations.on_buffers(message)
            self._last_read.on_buffers(message)

    def _on_save(self, message: m.Save, now: float) -> None:
        if self.training is not None and self._last_read.begin(message, self.training, now):
            return
        begins = self.training is not None or bool(self.joining.restores())
        self._saves.on_save(message, begins=begins)

    # ------------------------------------------------------------ exit

    def _on_drain(self, message: m.Drain, now: float) -> None:
        if not self._draining:
            self.context.note("info", f"draining: {message.reason}")
        self._draining = True
        if self.training is not None:
            self.training.drain()

    def _on_dismiss(self, message: m.Dismiss, now: float) -> None:
        self.context.note("warning", f"dismissed: {message.reason}")
        self.context.do(Exit(EXIT_FENCED, message.reason))

    def _on_shutdown(self, message: m.Shutdown, now: float) -> None:
        self.ended = message.ended
        self._last_read.give_up("before the run has ended")
        self.context.do(Exit(0, message.reason))

    def _fail(self, error: str, detail: str) -> None:
        detail = detail[-DETAIL_CHARS_MAX:]
        self.context.send(COORDINATOR, m.Failed(self.registration.name, error, detail, True))
        self.context.do(Note("error", error, {"detail": detail}), Exit(1, error))

    # ------------------------------------------------------------ reports

    def phase(self) -> str:
        if self.joining.rejoin_at is not None:
            return "waiting for worker-0 to initialise the servers"
        return self.training.phase().what if self.training else self.joining.phase()

    def waiting_for(self) -> str:
        """The daemons that must answer before this worker can continue; "" while it computes."""
        if self.phase() in BUSY:
            return ""
        if self.joining.rejoin_at is not None:
            return "worker-0"
        peers = {peer for _, peer, _ in self.context.retries.waiting()}
        if self.training is not None:
            peers |= set(self.training.phase().whom)
        return ", ".join(sorted(peers))

    def _report_if_due(self, now: float) -> None:
        phase = self.phase()
        changed = phase != self._reported_phase and phase not in PASSING
        if self.joining.identity is None or (now < self._report_at and not changed):
            return
        self._report_at, self._reported_phase = now + REPORT_S, phase
        metrics = self.training.metrics(now) if self.training else {}
        metrics |= {"settings": self.settings.values(), **self.send_queue.waiting(now)}
        metrics["checkpoint"] = self._saves.newest
        if self.training is not None:
            stuck, phase = self._stalls.look(self.training, phase, now)
            metrics |= stuck
        report = m.Report(
            self.registration.name,
            self.registration.incarnation,
            phase,
            self.waiting_for(),
            metrics,
        )
        self.context.send(COORDINATOR, report)
        if phase == "drained":
            self.context.send(COORDINATOR, m.Drained(self.registration.name))

    _FROM_COORDINATOR: ClassVar[dict[type, Callable[[Any, Any, float], object]]] = {
        m.Welcome: _on_welcome,
        m.Topology: _on_topology,
        m.KeepFrozen: lambda self, message, now: self.joining.on_keep_frozen(message),
        m.Peers: _on_peers,
        m.ListeningNoted: lambda self, message, now: self.context.retries.done("listening", now),
        m.Moved: lambda self, message, now: self.joining.on_moved(message, now),
        m.NewBounds: _on_new_bounds,
        m.Heard: lambda self, message, now: None,
        m.PortionNoted: lambda self, message, now: self.context.retries.done(
            ("portion", message.data_epoch, message.portion), now
        ),
        m.SampleNoted: lambda self, message, now: self.context.retries.done(
            ("sample", message.data_epoch, message.sample), now
        ),
        m.ChangeSettings: lambda self, message, now: self.settings.on_change(message, now),
        m.Drain: _on_drain,
        m.Save: _on_save,
        m.FileData: lambda self, message, now: self._restoring.transfers.on_data(message, now),
        m.Evaluate: _on_evaluate,
        m.Dismiss: _on_dismiss,
        m.Shutdown: _on_shutdown,
        **dict.fromkeys(FROM_COORDINATOR, _pass_on),
    }
    _FROM_SERVERS: ClassVar[dict[type, Callable[[Any, Any, float], object]]] = {
        m.Joined: _on_joined,
        m.JoinAgain: lambda self, message, now: self.joining.on_join_again(message, now),
        m.Buffers: _on_buffers,
        m.Dismiss: _on_dismiss,
        **dict.fromkeys(FROM_SHARDS, _pass_on),
    }
