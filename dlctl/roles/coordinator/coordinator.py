"""The coordinator role: the control plane of one run.

It has no parameters and no gradients; while it is down, workers and servers continue on their own.
This file connects its parts: a daemon's way from registration to training, and the run's states

    pending -> starting -> running (degraded) -> stopping -> finished, stopped or failed

All parts read the `RunState`. To act on the run as a whole they call `Control`, which is this
class. The parts: the daemons (`membership`), how they join and find each other (`registration`),
failures (`failure_detector`, `host_failures`), the method's `lead`, the `data` and who has which
part of it (`leases`), how far the run is (`progress`), the `rate` by the number of workers, live
`settings`, adding, removing and restarting daemons (`scaling`), `checkpointing`, `evaluations`,
the `requests` of the command line, the persisted state (`persistence`), and the end of a run
(`shutdown`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dlctl.algorithms.base import Method
from dlctl.errors import DlctlError, NotPermitted, RemoteProtocolError
from dlctl.job import placement, settings
from dlctl.job.config import JobFile
from dlctl.model.flat import Layout
from dlctl.records import evaluated
from dlctl.records.best import Best, Target
from dlctl.records.manifest import FAILURE, MEAN
from dlctl.roles.coordinator import shutdown
from dlctl.roles.coordinator.checkpoint_mirror import CheckpointMirror
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.link_bytes import LinkBytes
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.members.selections import Due
from dlctl.roles.coordinator.persistence import Persistence
from dlctl.roles.coordinator.records import (
    CheckpointBegun,
    CheckpointEnded,
    EventContext,
    KeyRenewed,
    LaunchAgent,
)
from dlctl.roles.coordinator.remote_files import LogMirror
from dlctl.roles.coordinator.requests import ClientRequests, Requests
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.coordinator.status import Reports, StatusReport, Totals
from dlctl.roles.coordinator.supervision.failure_detector import ERROR_CHARS_MAX, FailureDetector
from dlctl.roles.coordinator.supervision.groups import Groups
from dlctl.roles.coordinator.supervision.guests import Guests
from dlctl.roles.coordinator.supervision.host_failures import HostFailures
from dlctl.roles.coordinator.supervision.peers import PeerLists
from dlctl.roles.coordinator.supervision.recutting import Recutting
from dlctl.roles.coordinator.supervision.registration import Past, Registration
from dlctl.roles.coordinator.supervision.scaling import Scaling
from dlctl.roles.coordinator.supervision.taken_hosts import TakenHosts
from dlctl.roles.coordinator.training.bad_samples import BadSamples
from dlctl.roles.coordinator.training.bandwidths import Bandwidths
from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.coordinator.training.frozen import FrozenParameters
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.coordinator.training.norms import Norms
from dlctl.roles.coordinator.training.quorum import Quorums
from dlctl.roles.coordinator.training.run_progress import RunProgress
from dlctl.roles.coordinator.training.scaled_rate import ScaledRate
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.roles.protocol.authz import CLIENT, GUEST, READER, Authz, keys_of
from dlctl.roles.protocol.effects import (
    AgentWaits,
    HostsTaken,
    HostTaken,
    MirrorNews,
    OnRecord,
    ProcessEnded,
    TrackerTrouble,
    Unwritten,
)
from dlctl.roles.protocol.files import (
    CHECKPOINTS,
    FROZEN,
    BytesRead,
    FileSealed,
    MirrorFailed,
    ReadBytes,
    StillReading,
    Transfers,
)
from dlctl.roles.protocol.keyring import Keyring
from dlctl.util.names import RUN_IN_ADDRESS
from dlctl.wire import messages as m
from dlctl.wire.machine import (
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
from dlctl.wire.messages import Json

FAILURE_CHARS = 500


class Coordinator:
    def __init__(
        self, run_id: str, job: JobFile, keyring: Keyring, algorithm: Method, past: Past
    ) -> None:
        self.context = context = EventContext(job.timeouts.resend_s)
        self.members = members = Membership(
            placement.agents(job.places),
            placement.place(job),
            past.incarnations,
            placement.takes_workers(job),
        )
        self.run = run = RunState(run_id, job, algorithm, keyring, context, members)
        members.part_of = run.division.number
        self._restarts = Due[Daemon]("retry_at")
        members.observe(self._restarts)
        self._unready = members.select(("_state", "asked_for_data"), _is_unready_worker)
        self.authz = Authz(context)
        self.clients = ClientRequests(context)
        self.transfers = Transfers(context)
        self.mirror = LogMirror(context, members, past.logs)
        self.registration = Registration(run, past)
        self.frozen = FrozenParameters(
            run, self, self.transfers, past.manifest.get("frozen"), self.registration.introduce
        )
        self.registration.frozen = self.frozen.to_send
        self.lead = MethodLead(run)
        self.data = DataSupply(run, self.lead)
        self.progress = RunProgress(run, self.data, self.lead)
        self.rate = ScaledRate(run, self.data, self.progress)
        self.leases = Leases(run, self.data, self.lead, self.progress)
        self.bad_samples = BadSamples(context, self.data, job.data.bad_samples_max)
        live = settings.of_job(asdict(job), algorithm.live)
        self.settings = SettingChanges(context, members, live)
        self.settings.resume(past.settings)
        target = Target.parse(job.job.stop.target) if job.job.stop.target else None
        self.evaluations = Evaluations(
            context, members, lambda: self.progress.steps, target, job.evaluation.finish_s,
            Best.parse(job.checkpoints.best),
            of_average=job.average.evaluate, without=run.division.without_data,
        )  # fmt: skip
        self.peers = PeerLists(run, self)
        self.groups = Groups(run, self, lambda: self.progress.steps)
        self.quorums = Quorums(run, self.lead.side)
        self.norms = Norms(run)
        address = job.checkpoints.mirror.replace(RUN_IN_ADDRESS, run_id)
        self.uploads = CheckpointMirror(context, address, self._newest_checkpoint)
        self.checkpointing = Checkpointing(
            context, members, job, past.checkpoints, self.transfers, self.uploads,
            self.registration.is_moving,
        )  # fmt: skip
        self.recutting = Recutting(
            run, self, self.lead.side, self.registration, self.quorums, self.checkpointing,
            Bandwidths(members),
        )  # fmt: skip
        self.scaling = Scaling(run, self, self.leases, self.rate)
        self.guests = Guests(
            run, self, past, self.registration, self.scaling, self.rate, self.transfers, self.mirror
        )
        self.rotation = Rotation(run, self, self.clients.answer, self.scaling, self.guests)
        self._build_observers(past)

    def _build_observers(self, past: Past) -> None:
        """The parts that observe all others: failures, status, requests, persistence."""
        run = self.run
        self.taken_hosts = TakenHosts(run, self, self.scaling, self.transfers, self.mirror)
        self.host_failures = HostFailures(
            run,
            self,
            self.leases,
            self.evaluations,
            self.checkpointing,
            self.transfers,
            self.mirror,
            self.taken_hosts,
        )
        self.failure_detector = FailureDetector(
            run, self, self.leases, self.evaluations, self.checkpointing, self.frozen,
            self.scaling, self.host_failures, self.guests,
        )  # fmt: skip
        totals = Totals(past.totals, past.daemons)
        links = LinkBytes(self.members, past.links, past.daemons)
        self.status = StatusReport(
            run,
            self.data,
            self.lead,
            self.progress,
            self.leases,
            self.checkpointing,
            self.evaluations,
            totals,
            links,
            self.settings,
            self.registration,
            self.uploads,
        )
        self.reports = Reports(
            run, self, self.leases, self.evaluations, self.failure_detector, totals, links,
            self.recutting,
        )  # fmt: skip
        self.requests = Requests(
            run, self, self.clients, status=self.status, settings=self.settings,
            checkpointing=self.checkpointing, scaling=self.scaling, rotation=self.rotation,
            guests=self.guests,
        )  # fmt: skip
        self.persistence = Persistence(
            run, self, past,
            (
                run, self.members, self.context, self.progress, self.lead, self.rate, self.data,
                self.leases, self.evaluations, self.checkpointing, self.registration, self.frozen,
                self.quorums, self.norms, self.groups, self.mirror, self.guests,
            ),
            registration=self.registration, lead=self.lead, settings=self.settings,
            evaluations=self.evaluations, checkpointing=self.checkpointing, scaling=self.scaling,
            rotation=self.rotation,
        )  # fmt: skip
        self._dispatch = self._handlers()
        for part in (self.progress, self.lead, self.rate, self.data):
            part.restore(past.manifest.get("data", {}))
        self.evaluations.newest = evaluated.Result.of_keys(past.manifest)

    def _newest_checkpoint(self) -> Json | None:
        return self.checkpointing.newest

    def _handlers(self) -> dict[type, Callable[[Peer, Any, float], None]]:
        """Message of a daemon or a client -> its handler."""
        return {
            m.Register: self._on_register,
            m.Spawned: self.registration.on_spawned,
            m.ModelReady: self._on_model_ready,
            m.Noted: lambda peer, message, now: self.context.noted(
                (message.what, message.name), now, number=message.number
            ),
            m.GroupNoted: self.groups.on_noted,
            m.GroupBroken: self.groups.on_broken,
            m.Listening: self.peers.on_listening,
            m.Serving: self.registration.on_serving,
            m.LeaseRequest: self._on_lease_request,
            m.PortionDone: self._on_portion_done,
            m.SampleFailed: self._on_sample_failed,
            m.VectorResult: self.lead.on_vector_result,
            m.Holding: self.quorums.on_holding,
            m.NormPart: self.norms.on_part,
            m.Report: self._on_report,
            m.WantSlot: self.guests.on_want_slot,
            m.Leaving: self.guests.on_leaving,
            m.Evaluated: self.reports.on_evaluated,
            m.ProcessExited: self.failure_detector.on_exited,
            m.Failed: self.failure_detector.on_failed,
            m.Drained: self._on_drained,
            m.Changed: self.settings.on_changed,
            # A server or worker reads from the checkpoint that it resumes from.
            m.ReadFile: lambda peer, question, now: self.context.do(ReadBytes(peer, question)),
            m.FileData: self._on_file_data,
            m.FrozenKept: self.frozen.on_kept,
            m.Saved: self.checkpointing.on_saved,
            m.Request: self.clients.on_request,
        }

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message, identity):
                self._on_message(peer, message, identity, now)
            case DeadlineReached():
                self._on_deadline(now)
            case ProcessEnded(exited):
                self.failure_detector.on_exit(exited, now)
            case AgentWaits() | HostsTaken():
                self.host_failures.on_event(event, now)
            case HostTaken():
                self.taken_hosts.on_event(event, now)
            case CheckpointBegun() | CheckpointEnded():
                self.checkpointing.on_event(event, now)
            case BytesRead(peer, answer):
                self.context.send(peer, answer)
            case FileSealed():
                self.transfers.on_sealed(event, now)
            case StillReading():
                self.transfers.on_reading(now)
            case MirrorFailed():
                self.mirror.on_failed(event)
            case KeyRenewed():
                self.rotation.on_renewed(event, now)
            case Unwritten(error):
                self.context.unwritten = error
                if not error:
                    self._forgive(now)
            case MirrorNews():
                self.uploads.on_news(event, now)
                self.run.status_due_at = now
            case TrackerTrouble():
                self.context.track(event, now)
                self.run.status_due_at = now
            case OnRecord() if self.run.shutdown is not None:
                self.run.shutdown.is_on_record = True
            case Started():
                self._start(now)
            case StopRequested(reason, at_once):
                self.end("stopped", reason, now, at_once=at_once)
        self._advance(now)
        self.taken_hosts.note_wanted()
        effects = [e for effect in self.context.clear() for e in self._routed(effect)]
        return [*self.persistence.changes(now), *effects]

    def _routed(self, effect: Effect) -> list[Effect]:
        """Resolve a daemon's name to the connection of its newest process."""
        if not isinstance(effect, Send) or isinstance(effect.peer, bytes):
            return [effect]
        daemon = self.members.daemons.get(effect.peer)
        if daemon is None or daemon.peer is None:
            return []
        return [Send(daemon.peer, effect.message)]

    def deadline(self) -> float | None:
        end, is_saving = self.run.shutdown, self.checkpointing.active
        times = [
            self.status.due_at(),
            self.peers.deadline(),
            self.context.retries.deadline(),
            self.settings.deadline(),
            self.failure_detector.deadline(),
            self.mirror.deadline(),
            self.groups.deadline(),
            self.quorums.deadline(),
            self.recutting.deadline(),
            self.checkpointing.deadline() if is_saving or self._may_save() else None,
            self.guests.deadline() if end is None else None,
        ]
        if end is None:
            times += [self.progress.deadline(), None if is_saving else self.leases.backup_due()]
            times.append(self._restarts.first())
        else:
            times.append(end.until)
            times += [d.retry_at for d in self._restarts if self._may_begin(d)]
        return min((t for t in times if t is not None), default=None)

    def _on_message(self, peer: Peer, message: m.Message, identity: str, now: float) -> None:
        handler = self._dispatch.get(type(message))
        try:
            self.authz.check(identity, message)
            if handler is None:
                raise RemoteProtocolError("the coordinator takes no message of this kind")
            handler(peer, message, now)
        except NotPermitted as error:
            self.clients.refuse(peer, message, error)
        except RemoteProtocolError as error:
            what = f"{type(message).__name__} {self.registration.whose(peer, message)}"
            self.context.note("warning", f"refused {what}: {error.message}")

    def _on_deadline(self, now: float) -> None:
        self.context.do(*self.context.retries.due(now))
        self.mirror.on_deadline(now)
        self.settings.on_deadline(now)
        self.checkpointing.on_deadline(now)
        for daemon in self._restarts.by(now):
            if self._may_begin(daemon):
                self.start_daemon(daemon, now)
        self.failure_detector.watch(now)

    def _may_begin(self, daemon: Daemon) -> bool:
        """Whether another incarnation is still useful."""
        end = self.run.shutdown
        if end is None or daemon.role == "agent":
            return end is None or not end.is_leaving()
        if daemon.role == "worker":
            return end.needs(daemon)
        return daemon.role == "server" and end.needs_servers()

    def start_daemon(self, daemon: Daemon, now: float) -> None:
        """Start the next incarnation of a daemon; `status` shows it at once."""
        self.run.status_due_at = now
        daemon.begin(now)
        self.mirror.follow(daemon)
        if daemon.role == "agent":
            secret = self.run.keyring.secret(daemon.name)
            self.context.do(LaunchAgent(daemon.name, daemon.incarnation, secret))
        else:
            text = f"{daemon.name} starts, incarnation {daemon.incarnation}"
            self.context.event("start", daemon.name, text)
            self.registration.request_spawn(daemon, now)

    def _forgive(self, now: float) -> None:
        """The disk has space again: its lack may be what the daemons died of, or wait for."""
        for daemon in self.members.daemons.values():
            daemon.forgive()
            if daemon.retry_at is not None:
                daemon.retry_at = now
        self.registration.readmit(now)

    def presume_dead(self, daemon: Daemon, now: float) -> None:
        self.failure_detector.presume_dead(daemon, now)

    def _advance(self, now: float) -> None:
        """Do what the current state requires."""
        self.scaling.advance(now)
        if self.run.shutdown is None:
            self.guests.advance(now)
            self._advance_run(now)
        else:
            self._advance_ending(self.run.shutdown, now)
        self.peers.advance(now)
        self.groups.advance(now)
        self.quorums.advance(now)
        self.recutting.advance(now)
        self.checkpointing.advance(now)
        self.norms.advance()
        self.requests.tell(now)
        if self.status.due_at() <= now:
            self.status.report(now)

    # ------------------------------------------------------------ starting

    def _start(self, now: float) -> None:
        self.run.started_at = now
        self.guests.begin(now)
        if self.persistence.past.memory:
            self.persistence.resume(now)
            self.admit_members(now)
            return
        self.admit_members(now)
        self.change_state("starting", "", now)
        self.registration.note_lost_residuals()
        self.taken_hosts.note_wanted()
        for agent in self.members.of_role("agent"):
            self.start_daemon(agent, now)

    def _on_register(self, peer: Peer, message: m.Register, now: float) -> None:
        if message.role == GUEST:
            self.guests.on_register(peer, message, now)
            return
        daemon = self.registration.on_register(peer, message, now)
        if daemon is not None and daemon.role == "agent" and daemon.state == "starting":
            daemon.change_state(daemon_states.RUNNING)
            daemon.has_worked, daemon.given_up_at, daemon.waits_for_host = True, None, False
            for hosted in self.members.hosted_by(daemon):
                if hosted.state in daemon_states.HOSTLESS and self.run.shutdown is None:
                    self.start_daemon(hosted, now)

    def _on_model_ready(self, peer: Peer, message: m.ModelReady, now: float) -> None:
        worker = self.members.get(message.name)
        if worker is None or worker.peer != peer or worker.role != "worker":
            return
        try:
            # A refused model changes no state: a run that had not begun can, once it is fixed.
            layout = self.registration.check_model(worker, message.layout)
            self.run.algorithm.shape.check_sizes(layout)
            self.run.division.check(worker.name, worker.index, layout)
            if worker.index in self.run.division.without_data:
                self._admit_model(worker, layout, 0, now)
                return
            self.registration.check_values(worker, message.values)
            is_found = self.data.find_batch_size(message.batch_size)
            if is_found:
                text = f"batch size {message.batch_size}: the largest power of two that fits"
                self.context.event("batch", worker.name, text)
            dataset = Dataset.built(message)
            self.take_dataset(worker.name, dataset, message.order)
            self.frozen.on_model(worker, layout, message, now)
            self.evaluations.has_finish |= message.has_finish
            self._admit_model(worker, layout, message.samples, now, to_all=is_found)
        except RemoteProtocolError:
            raise
        except DlctlError as error:
            text = f"{error.message}; {error.hint}"[:ERROR_CHARS_MAX]
            if self.run.released_at is None and not worker.key:
                self.end("failed", text, now)
            else:
                self.failure_detector.fail(worker, text, now)

    def _admit_model(
        self, worker: Daemon, layout: Layout, samples: int, now: float, *, to_all: bool = False
    ) -> None:
        """A worker has built its model. to_all: others may have waited for it."""
        self.registration.keep_part(worker, layout, samples)
        worker.model_ready = True
        self.peers.advance(now)  # A worker needs the list of peers before it starts.
        self.registration.assign(now)
        self.registration.introduce(None if to_all else worker)

    def take_dataset(self, worker: str, dataset: Dataset, order: str = "") -> None:
        """A worker has built the dataset. Raises DlctlError if it cannot be that of this run."""
        if self.data.take_dataset(worker, dataset, order):
            self.progress.begin()
            self.rate.rescale(self.run.job.workers.count)

    # ------------------------------------------------------------ training

    def _on_report(self, peer: Peer, report: m.Report, now: float) -> None:
        of_guest = report.name.partition("-")[0] == GUEST
        (self.guests if of_guest else self.reports).on_report(peer, report, now)

    def _on_lease_request(self, peer: Peer, message: m.LeaseRequest, now: float) -> None:
        if worker := self._worker(peer, message.slot, message.term):
            self.reports.heard(worker, peer, now)
            self.reports.is_at_work(worker, now)
            self.leases.on_request(message, now)

    def _worker(self, peer: Peer, slot: int, term: int) -> Daemon | None:
        """The live worker. A process that it has replaced is dismissed; one that has failed, too,
        unless the run ends: then it saves what it has, if it can.
        """
        worker = self.members.worker(slot, term)
        if worker is None:
            self.context.send(peer, m.Dismiss(f"worker-{slot} has been replaced"))
        elif worker.error and self.run.shutdown is None:
            self.context.send(peer, m.Dismiss(worker.error))
            return None
        return worker

    @property
    def _started_at(self) -> float:
        """From when on all daemons can get ready. A script may take long until it attaches."""
        return max(self.run.started_at, self.failure_detector.script_at)

    def _advance_run(self, now: float) -> None:
        if self.run.state == "starting":
            if self._has_enough():
                self.change_state("running", "", now)
                self.notify_members()
                self.release(now)
                self.registration.restore, self.registration.under_way = "", True
                self.checkpointing.schedule(now)
            elif self._unready and now - self._started_at > self.run.job.timeouts.ready_s:
                self.end("failed", self.status.not_ready(), now)
        elif self.run.is_working:
            state, reason = self.status.health()
            if state != self.run.state:
                self.change_state(state, reason, now)
            if reason != self.run.reason:
                self.run.reason = reason  # It changes too often for an event each time.
            if fault := self.progress.failed():
                self.end("failed", fault, now)
            elif reason := self.progress.enough(now):
                self.end("finished", reason, now)
            elif self._may_save() and (
                self.checkpointing.is_due(now)
                or (self.evaluations.is_to_save and not self.checkpointing.active)
            ):
                self.evaluations.is_to_save = False
                self.begin_checkpoint(now)
            elif self.progress.evaluation_due():
                self.evaluations.begin(now)
            is_held = self.run.shutdown is not None or self.checkpointing.active
            if not is_held and self.lead.advance(now):
                self.leases.grant(now)

    def _may_save(self) -> bool:
        """Whether a checkpoint may begin that is not for the end, or for another cut."""
        return self.run.shutdown is None and not self.recutting.is_under_way()

    def _has_enough(self) -> bool:
        """Whether the workers may begin: all that the job starts, or `workers.min`."""
        return not (self._unready if self.run.job.workers.min is None else self.run.lacking())

    def release(self, now: float) -> None:
        """Let the workers train: all of them are ready."""
        self.run.released_at = now
        if few := self.status.few_rounds():
            self.context.event("rounds", "", few)
        self.lead.begin()
        self.leases.grant(now)

    def admit_members(self, now: float) -> None:
        sources = self.members.key_sources() | self.guests.key_sources()
        names = [*{*self.members.daemons, *sources, CLIENT, READER}]
        self.authz.admit(keys_of(self.run.keyring, names, sources))
        for server in self.members.of_role("server"):
            if server.registered:
                self.registration.notify_waiting(server, now)

    def notify_members(self, server: Daemon | None = None) -> None:
        """Send servers the active workers, which barriers count; resent at every report."""
        if self.run.state in ("pending", "starting"):
            return
        for receiver in [server] if server is not None else self.members.of_role("server"):
            slots = self.run.division.slots_of(receiver.index, self.members.live_slots())
            members = m.Members(slots, self.rate.scale or ())
            self.context.send(receiver.name, members)

    def _on_portion_done(self, peer: Peer, done: m.PortionDone, now: float) -> None:
        if worker := self._worker(peer, done.slot, done.term):
            self.leases.settle(done, now)
            worker.has_settled |= done.samples > 0
            self.context.send(peer, m.PortionNoted(done.data_epoch, done.portion))

    def _on_sample_failed(self, peer: Peer, message: m.SampleFailed, now: float) -> None:
        self.context.send(peer, m.SampleNoted(message.data_epoch, message.sample))
        worker = self._worker(peer, message.slot, message.term)
        if worker is None:
            return
        if error := self.bad_samples.on_failed(message):
            self.failure_detector.fail(worker, error, now, message.detail)

    def _on_file_data(self, peer: Peer, message: m.FileData, now: float) -> None:
        """Receive a piece of a file. Raises RemoteProtocolError if it was not asked for."""
        is_whole = message.file.startswith((CHECKPOINTS, FROZEN))
        (self.transfers if is_whole else self.mirror).on_data(message, now)

    def begin_checkpoint(
        self,
        now: float,
        listener: Callable[[Json], None] | None = None,
        *,
        of_servers: bool = False,
    ) -> None:
        """Begin one with the run's state now, or join the current one."""
        end = self.run.shutdown
        is_last = end is not None and end.step == shutdown.SAVING
        self.checkpointing.begin(
            self.progress.steps, self.manifest(), now, listener, is_last, of_servers
        )

    def manifest(self) -> Json:
        """The state of the run, for a checkpoint's manifest."""
        end, layout = self.run.shutdown, self.registration.layout
        assert layout is not None
        job, frozen = self.run.job, self.frozen.part
        manifest: Json = {
            "run_id": self.run.run_id,
            "job": job.job.name,
            "samples": self.progress.samples,
            "layout": layout.to_rows(),
            "size": layout.size(),
            "algorithm": job.algorithm.name,
            "optimizer": job.optimizer.name,
            "inner": job.inner.name,
            "data": {
                **self.progress.to_json(), **self.data.to_json(), **self.lead.to_json(),
                **self.rate.to_json(),
            },
            **evaluated.keys(self.evaluations.newest),
            **({"frozen": frozen} if frozen else {}),
            **({MEAN: True} if self.run.algorithm.shape.model == "mean" else {}),
        }  # fmt: skip
        if end is not None and end.state == "failed":
            manifest[FAILURE] = end.reason[:FAILURE_CHARS]
        return manifest

    # ------------------------------------------------------------ the end

    def end(
        self, state: str, reason: str, now: float, save: bool = True,
        grace_s: float | None = None, at_once: bool = False, was_closed: bool = False,
    ) -> None:  # fmt: skip
        """The first reason counts, but a failure during shutdown overrides it."""
        if self.run.shutdown is not None:
            if state == "failed" and self.run.shutdown.state != "failed":
                self.run.shutdown.state, self.run.shutdown.reason = state, reason
            return
        shards_live = all(s.alive or s.retry_at is not None for s in self.members.of_role("server"))
        worked = self.run.released_at is not None and shards_live and not at_once
        wanted = {
            shutdown.DRAINING: worked,
            shutdown.EVALUATING: worked and state == "finished",
            shutdown.SAVING: worked and save,
            shutdown.FINISHING: (worked and state == "finished" and self.evaluations.has_finish),
        }
        self.run.shutdown = RunShutdown(
            state, reason, [step for step, yes in wanted.items() if yes],
            self.run.job.timeouts.grace_s if grace_s is None else grace_s, self.context,
            self.members, self.evaluations, self.checkpointing, self.begin_checkpoint,
            self.run.keeps_shards(), self.mirror, self.uploads, self.run.job.timeouts.mirror_s,
            self.run.division.without_data,
            self.run.job.timeouts.script_s if self.run.job.has_loop else shutdown.EXIT_S,
            was_closed,
        )  # fmt: skip
        self.change_state("stopping", reason, now)
        self.run.shutdown.begin(now)
        self.leases.grant(now)

    def _on_drained(self, peer: Peer, message: m.Drained, now: float) -> None:
        worker = self.members.get(message.name)
        if worker is None or worker.peer != peer:
            return
        self.context.retries.done(("drain", message.name), now)
        if worker.drained:  # It still waits for the request to exit.
            self.context.do(*self.context.retries.resend_now(("shutdown", worker.name), now))
            return
        worker.drained = True
        self.notify_members()
        self.scaling.on_drained(worker, now)

    def _advance_ending(self, end: RunShutdown, now: float) -> None:
        end.advance(now)
        if end.is_leaving() and self.run.state == "stopping":
            # All is done; the agents do the rest on their own.
            self.change_state(end.state, end.reason, now)
            self.status.report(now)
        if end.step == shutdown.OVER:
            self.requests.end()
            self.context.do(Exit(1 if end.state == "failed" else 0, end.reason))

    # ------------------------------------------------------------ the record

    def change_state(self, state: str, reason: str, now: float) -> None:
        self.run.change_state(state, reason)
        self.context.event("state", "", state + (f": {reason}" if reason else ""))
        self.run.status_due_at = now


def _is_unready_worker(daemon: Daemon) -> bool:
    is_ready = daemon.asked_for_data and daemon.state != daemon_states.BACKOFF
    return daemon.role == "worker" and not is_ready and not daemon.key
