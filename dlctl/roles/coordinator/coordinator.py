"""The coordinator role: the control plane of one run.

It has no parameters and no gradients; if it is away, workers and servers go on with what they have.
This file is how its parts meet: a daemon's way from registering to work, and the run's way

    pending -> starting -> running (degraded) -> stopping -> finished, stopped or failed

The parts: who is there (`membership`), how they get to know of each other (`arrivals`), what
follows when they die (`losses`), who gets which data (`work`), live settings (`changes`), who comes
and goes (`scaling`), `checkpointing`, `evaluations`, the requests of the command line (`clients`),
what the next coordinator has to know (`memory`), and how a run comes to its end (`ending`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dlctl import messages as m
from dlctl import placement
from dlctl.algorithms.base import Method
from dlctl.config import JobFile
from dlctl.errors import DlctlError, NotPermitted, RemoteProtocolError
from dlctl.machine import (
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Peer,
    Received,
    Send,
    Started,
    StopRequested,
)
from dlctl.messages import Json
from dlctl.roles.coordinator import shutdown
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.clients import Clients
from dlctl.roles.coordinator.contents import leaves_residuals, manifest_of
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.failure_detector import FailureDetector
from dlctl.roles.coordinator.host_failures import HostFailures
from dlctl.roles.coordinator.membership import Daemon, Membership
from dlctl.roles.coordinator.persistence import Persistence
from dlctl.roles.coordinator.records import (
    CheckpointBegun,
    CheckpointEnded,
    History,
    KeyRenewed,
    LaunchAgent,
)
from dlctl.roles.coordinator.registration import Past, Registration
from dlctl.roles.coordinator.remote_files import HostFiles
from dlctl.roles.coordinator.reports import Reports
from dlctl.roles.coordinator.requests import Verbs
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.scaling import Scaling
from dlctl.roles.coordinator.scheduler import Scheduler
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.coordinator.status import StatusReport
from dlctl.roles.protocol.authz import CLIENT, READER, Authz, keys_of
from dlctl.roles.protocol.effects import AgentWaits, HostsTaken, OnRecord, ProcessEnded, Unwritten
from dlctl.roles.protocol.keyring import Keyring
from dlctl.roles.protocol.travelling import BytesRead, FileSealed, MirrorFailed, StillReading


class Coordinator:
    def __init__(
        self, run_id: str, job: JobFile, keyring: Keyring, algorithm: Method, past: Past
    ) -> None:
        self.job = job
        self.algorithm = algorithm
        self.state = "pending"
        self.reason = ""
        self.context = History(job.timeouts.resend_s)
        self.agents = placement.agents(job.places)
        takers = placement.takes_workers(job)
        self.members = Membership(self.agents, placement.place(job), past.incarnations, takers)
        self.authz = Authz(self.context)
        self.arrivals = Registration(self.context, self.members, run_id, job, keyring, past)
        side = algorithm.lead(algorithm.Options(**job.algorithm.options))
        self.work = Scheduler(self.context, self.members, job, side)
        self.changes = SettingChanges(self.context, self.members, job.optimizer.options)
        self.evaluations = Evaluations(self.context, self.members, lambda: self.work.steps)
        self.files = HostFiles(self.context, self.members)
        self.arrivals.on_start = self.files.mirror.follow
        self.checkpointing = Checkpointing(
            self.context, self.members, job.checkpoints.keep, job.checkpoints.every_s,
            past.checkpoints, self.files.transfers, leaves_residuals=leaves_residuals(job),
        )  # fmt: skip
        self.rotation = Rotation(self)
        self.verbs = Verbs(self)
        self.clients = Clients(self.context, self.verbs.table(), self.verbs.looks())
        self.losses = FailureDetector(self)
        self.hosts = HostFailures(self)
        self.scaling = Scaling(self)
        self.reports = Reports(self)
        self.ending: RunShutdown | None = None
        self.overview = StatusReport(self)
        self.memory = Persistence(self, past)
        self.started_at = 0.0
        if past.manifest:
            self.work.restore(past.manifest.get("data", {}))
            self.evaluations.newest = past.manifest.get("evaluation")

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message, identity):
                self._on_message(peer, message, identity, now)
            case DeadlineReached():
                self._on_deadline(now)
            case ProcessEnded():
                self.losses.on_exit(event, now)
            case AgentWaits() | HostsTaken():
                self.hosts.on_event(event, now)
            case CheckpointBegun() | CheckpointEnded():
                self.checkpointing.on_event(event, now)
            case BytesRead() | FileSealed() | StillReading() | MirrorFailed():
                self.files.on_event(event, now)
            case KeyRenewed():
                self.rotation.on_renewed(event, now)
            case Unwritten(error):
                self.context.unwritten = error
            case OnRecord() if self.ending is not None:
                self.ending.is_on_record = True
            case Started():
                self._start(now)
            case StopRequested(reason, at_once):
                self.end("stopped", reason, now, at_once=at_once)
        self._advance(now)
        effects = [e for effect in self.context.clear() for e in self._routed(effect)]
        return [*self.memory.changes(now), *effects]

    def _routed(self, effect: Effect) -> list[Effect]:
        """Daemons are addressed by name here; a message goes to the connection of the newest
        process.
        """
        if not isinstance(effect, Send) or isinstance(effect.peer, bytes):
            return [effect]
        daemon = self.members.daemons.get(effect.peer)
        if daemon is None or daemon.peer is None:
            return []
        return [Send(daemon.peer, effect.message)]

    def deadline(self) -> float | None:
        times = [self.context.retries.deadline(), self.overview.due_at]
        times += [self.changes.deadline(), self.losses.deadline(), *self.files.deadlines()]
        times += [self.rotation.deadline()]
        if self.ending is None:
            times += [self.checkpointing.deadline(), self.work.deadline(), self.scaling.deadline()]
        else:
            times += [self.ending.until]
            times += [self.checkpointing.deadline()] if self.checkpointing.active else []
        times += [d.retry_at for d in self.members.daemons.values() if self._may_begin(d)]
        return min((t for t in times if t is not None), default=None)

    def _on_message(self, peer: Peer, message: m.Message, identity: str, now: float) -> None:
        handler = self._HANDLERS.get(type(message))
        try:
            self.authz.check(identity, message)
            if handler is None:
                raise RemoteProtocolError("it has no business here")
            handler(self, peer, message, now)
        except NotPermitted as error:
            self.clients.refuse(peer, message, error)
        except RemoteProtocolError as error:
            what = f"{type(message).__name__} {self.arrivals.whose(peer, message)}"
            self.context.note("warning", f"refused {what}: {error.message}")

    def _on_deadline(self, now: float) -> None:
        self.context.do(*self.context.retries.due(now))
        self.files.on_deadline(now)
        self.changes.on_deadline(now)
        self.checkpointing.on_deadline(now)
        self.scaling.on_deadline(now)
        for daemon in self.members.daemons.values():
            if daemon.retry_at is not None and daemon.retry_at <= now and self._may_begin(daemon):
                self.begin_anew(daemon, now)
        self.losses.watch(now)

    def _may_begin(self, daemon: Daemon) -> bool:
        """Whether another incarnation would still be of use."""
        if self.ending is None:
            return True
        needed = {"agent": not self.ending.is_leaving(), "server": self.ending.needs_servers()}
        return needed.get(daemon.role, False)

    def begin_anew(self, daemon: Daemon, now: float) -> None:
        """Start the next incarnation of a daemon, and have `status` know of it at once."""
        self.overview.due_at = now
        if daemon.role == "agent":
            daemon.begin(now)
            self.files.mirror.follow(daemon)
            secret = self.arrivals.keyring.secret(daemon.name)
            self.context.do(LaunchAgent(daemon.name, daemon.incarnation, secret))
        else:
            self.arrivals.spawn(daemon, now)

    def keeps_shards(self) -> bool:
        """Whether the next process of a shard can go on where the one before was."""
        return self.job.servers.durability != "none" and "server" in self.algorithm.shape.survives

    def _advance(self, now: float) -> None:
        """What follows from the state as it is now."""
        self.rotation.advance(now)
        self.scaling.handover.advance(now)
        if self.ending is None:
            self._advance_run(now)
        else:
            self._advance_ending(self.ending, now)
        self.verbs.tell(now)
        self.overview.report_if_due(now)

    # ------------------------------------------------------------ starting

    def _start(self, now: float) -> None:
        self.started_at = now
        if self.memory.is_there():
            self.memory.go_on(now)
            self.admit_members(now)
            return
        self.admit_members(now)
        self.change_state("starting", "", now)
        self.arrivals.note_lost_residuals()
        for agent in self.members.of("agent"):
            self.begin_anew(agent, now)

    def _on_register(self, peer: Peer, message: m.Register, now: float) -> None:
        daemon = self.arrivals.on_register(peer, message, now)
        if daemon is not None and daemon.role == "agent" and daemon.state == "starting":
            daemon.state = "running"
            self.hosts.is_back(daemon)
            for hosted in self.members.hosted_by(daemon):
                if hosted.state == "pending" and self.ending is None:
                    self.arrivals.spawn(hosted, now)

    def _on_model_ready(self, peer: Peer, message: m.ModelReady, now: float) -> None:
        worker = self.members.get(message.name)
        if worker is None or worker.peer != peer or worker.role != "worker":
            return
        try:
            if self.arrivals.layout is None:
                self.work.open_dataset(message.samples)
            self.arrivals.on_model(worker, message.layout, now)
        except DlctlError as error:
            self.end("failed", f"{error.message}; {error.hint}", now)

    # ------------------------------------------------------------ at work

    def _on_lease_request(self, peer: Peer, message: m.LeaseRequest, now: float) -> None:
        worker = self.members.worker(message.slot, message.epoch)
        if worker is None:
            self.context.send(peer, m.Dismiss(f"worker-{message.slot} has been replaced"))
            return
        self.reports.heard(worker, peer, now)
        self.reports.is_at_work(worker, now)
        self.work.on_request(message, now)

    def _advance_run(self, now: float) -> None:
        if self.state == "starting":
            if all(w.asked_for_data and w.state != "backoff" for w in self.members.of("worker")):
                self.change_state("running", "", now)
                self.tell_members()
                self.work.release(now)
                self.arrivals.restore = ""
                self.checkpointing.schedule(now)
            elif now - self.started_at > self.job.timeouts.ready_s:
                self.end("failed", self.overview.not_ready(), now)
        elif self.state in ("running", "degraded"):
            self._update_health(now)
            if reason := self.work.enough(now):
                self.end("finished", reason, now)
            elif self.checkpointing.is_due(now):
                self.begin_checkpoint(now, None)
            elif self.work.evaluation_due():
                self.evaluations.begin(now)

    def _update_health(self, now: float) -> None:
        state, reason = self.overview.health()
        if state != self.state:
            self.change_state(state, reason, now)
        self.reason = reason  # An event for every change of it would be too many.

    def admit_members(self, now: float) -> None:
        """The daemons of this run may connect to us, and its clients; to servers its workers."""
        names = [*self.members.daemons, CLIENT, READER]
        self.authz.admit(keys_of(self.arrivals.keyring, names))
        for server in self.members.of("server"):
            if server.registered:
                self.arrivals.tell_guests(server, now)

    def tell_members(self, server: Daemon | None = None) -> None:
        """Barriers count the workers that take part. Sent again with every server's report."""
        if self.state in ("pending", "starting"):
            return
        for told in [server] if server is not None else self.members.of("server"):
            self.context.send(told.name, m.Members(self.members.live_slots()))

    def _on_portion_done(self, peer: Peer, done: m.PortionDone, now: float) -> None:
        worker = self.members.worker(done.slot, done.epoch)
        if worker is None:
            self.context.send(peer, m.Dismiss(f"worker-{done.slot} has been replaced"))
            return
        self.work.on_portion_done(done, now)
        self.context.send(peer, m.PortionNoted(done.data_epoch, done.portion))

    def _on_vector_result(self, peer: Peer, message: m.VectorResult, now: float) -> None:
        if self.work.driving is not None:
            self.work.driving.on_result(message, now)
            self.work.grant(now)

    def begin_checkpoint(self, now: float, listener: Callable[[Json], None] | None) -> None:
        is_last = self.ending is not None and self.ending.step == shutdown.SAVING
        self.checkpointing.begin(self.work.steps, manifest_of(self), now, listener, is_last)

    # ------------------------------------------------------------ the end

    def end(
        self, state: str, reason: str, now: float, save: bool = True,
        grace_s: float | None = None, at_once: bool = False,
    ) -> None:  # fmt: skip
        """Bring the run to an end. The first reason counts, but a failure on the way out is one.

        at_once: all is done but ending the processes, or can be of no use to anybody.
        """
        if self.ending is not None:
            if state == "failed" and self.ending.state != "failed":
                self.ending.state, self.ending.reason = state, reason
            return
        shards_live = all(s.alive or s.retry_at is not None for s in self.members.of("server"))
        worked = self.work.released_at is not None and shards_live and not at_once
        wanted = {
            shutdown.DRAINING: worked,
            shutdown.EVALUATING: worked and state == "finished",
            shutdown.SAVING: worked and save,
        }
        self.ending = RunShutdown(
            state, reason, [step for step, yes in wanted.items() if yes],
            self.job.timeouts.grace_s if grace_s is None else grace_s, self.context, self.members,
            self.evaluations, self.checkpointing, self._save_last, self.keeps_shards(),
            self.files.mirror,
        )  # fmt: skip
        self.work.stopped = True
        self.change_state("stopping", reason, now)
        self.ending.begin(now)
        self.work.grant(now)
        self.verbs.tell_stopping(False, now)

    def _save_last(self, now: float) -> None:
        """After the drain: what the workers had accrued is in the shards now."""
        self.begin_checkpoint(now, None)

    def _on_drained(self, peer: Peer, message: m.Drained, now: float) -> None:
        worker = self.members.get(message.name)
        if worker is None or worker.peer != peer:
            return
        self.context.retries.done(("drain", message.name), now)
        if worker.drained:  # It still waits for its orders.
            self.context.do(*self.context.retries.resend_now(("shutdown", worker.name), now))
            return
        worker.drained = True
        self.tell_members()
        self.scaling.on_drained(worker, now)

    def _advance_ending(self, end: RunShutdown, now: float) -> None:
        if end.advance(now):
            self.verbs.tell_stopping(False, now)
        if end.is_leaving() and self.state == "stopping":
            # All is done; what is still to come, the agents do by themselves.
            self.change_state(end.state, end.reason, now)
            self.overview.report(now)
        if end.step == shutdown.OVER:
            self.verbs.tell_stopping(True, now)
            self.context.do(Exit(1 if end.state == "failed" else 0, end.reason))

    # ------------------------------------------------------------ what is written down

    def change_state(self, state: str, reason: str, now: float) -> None:
        self.state, self.reason = state, reason
        self.context.event("state", "", state + (f": {reason}" if reason else ""))
        self.overview.due_at = now

    _HANDLERS: ClassVar[dict[type, Callable[[Any, Peer, Any, float], None]]] = {
        m.Register: _on_register,
        m.Spawned: lambda self, peer, message, now: self.arrivals.on_spawned(peer, message, now),
        m.ModelReady: _on_model_ready,
        m.GuestsNoted: lambda self, peer, message, now: self.arrivals.on_guests_noted(message, now),
        m.MovedNoted: lambda self, peer, message, now: self.arrivals.on_moved_noted(message, now),
        m.Serving: lambda self, peer, message, now: self.arrivals.on_serving(peer, message, now),
        m.LeaseRequest: _on_lease_request,
        m.PortionDone: _on_portion_done,
        m.VectorResult: _on_vector_result,
        m.Report: lambda self, peer, message, now: self.reports.on_report(peer, message, now),
        m.Evaluated: lambda self, peer, message, now: self.reports.on_evaluated(message, now),
        m.ProcessExited: lambda self, peer, message, now: self.losses.on_exited(peer, message, now),
        m.Failed: lambda self, peer, message, now: self.losses.on_failed(peer, message, now),
        m.Drained: _on_drained,
        m.Changed: lambda self, peer, message, now: self.changes.on_changed(message, now),
        m.ReadFile: lambda self, peer, message, now: self.files.on_question(peer, message),
        m.FileData: lambda self, peer, message, now: self.files.on_data(message, now),
        m.Saved: lambda self, peer, message, now: self.checkpointing.on_saved(message, now),
        m.Request: lambda self, peer, message, now: self.clients.on_request(peer, message, now),
    }
