"""The worker role: how a replica comes into a run, works in it, and leaves it.

    registering -> building the model -> waiting for the servers -> joining -> (restoring) -> at
    work

`Training` is the work. Around it stand live settings, evaluations, saving and draining; whatever
the coordinator asks for may be asked twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dlctl import messages as m
from dlctl.algorithms.base import Algorithm
from dlctl.compress.base import Compressor
from dlctl.config import JobFile
from dlctl.errors import RemoteProtocolError
from dlctl.flat import slice_bounds
from dlctl.machine import (
    Connect,
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Note,
    Peer,
    Received,
    Started,
    StopRequested,
)
from dlctl.roles.channel import Channel, Fenced, Identity
from dlctl.roles.desk import COORDINATOR, EXIT_FENCED, REPORT_S, Birth, Desk
from dlctl.roles.effects import (
    ArraysLoaded,
    ArraysSaved,
    BuffersLoaded,
    BuildModel,
    Computed,
    EvaluationRun,
    LoadArrays,
    LoadBuffers,
    ModelBuilt,
    TaskFailed,
)
from dlctl.roles.evaluation import Evaluation
from dlctl.roles.live import LiveSettings
from dlctl.roles.outbox import Outbox
from dlctl.roles.saving import Saving
from dlctl.roles.training import Training
from dlctl.vector import copy_into, to_host

REJOIN_S = 0.1
"""Between two looks whether another worker has initialised a shard."""
PASSING = {"computing", "waiting for data", "fetching", "pushing"}
"""Phases that come and go with every step: they are reported once a second and not at each change.
"""
DETAIL_CHARS_MAX = 16_000


class Worker:
    def __init__(
        self, birth: Birth, job: JobFile, algorithm: Algorithm, compressor: Compressor
    ) -> None:
        self.birth = birth
        self.job = job
        self.algorithm = algorithm
        self.compressor = compressor
        self.desk = Desk(job.timeouts.resend_s)
        self.outbox = Outbox(self.desk.outstanding)
        self.options = algorithm.Options(**job.algorithm.options)
        self.live = LiveSettings(self.desk, self.options, algorithm.live, self.outbox, compressor)
        self.training: Training | None = None
        self._phase = "registering"
        self._identity: Identity | None = None
        self._model: ModelBuilt | None = None
        self._topology: m.Topology | None = None
        self._channels: list[Channel] = []
        self._rejoin_at: float | None = None
        self._draining = False
        self._saving = Saving(self.desk, birth.name)
        self._evaluation: Evaluation | None = None
        self._evaluated: m.Evaluated | None = None
        """The last answer, in case it was lost."""
        self._save: m.Save | None = None
        """Asked for; done as soon as the residual holds nothing but what pushes have left."""
        self._report_at = 0.0
        self._reported_phase = ""

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        try:
            self._on_event(event, now)
            self._advance(now)
        except Fenced as fenced:
            self.desk.note("warning", f"another process has this slot now: {fenced}")
            self.desk.do(Exit(EXIT_FENCED, "fenced"))
        self.desk.do(*self.outbox.flush(now))
        self._report_if_due(now)
        return self.desk.clear()

    def deadline(self) -> float | None:
        times = [self.desk.outstanding.deadline(), self.outbox.deadline(), self._rejoin_at]
        times += [self.training.deadline()] if self.training else []
        times += [self._report_at] if self._identity else []
        return min((t for t in times if t is not None), default=None)

    def _on_event(self, event: Event, now: float) -> None:
        match event:
            case Received(peer, message):
                self._on_message(peer, message, now)
            case Computed() if self.training:
                self.training.on_computed(event, now)
            case DeadlineReached():
                self._on_deadline(now)
            case ModelBuilt():
                self._on_model(event, now)
            case ArraysLoaded(arrays, _):
                self._on_restored(arrays)
            case ArraysSaved():
                self._saving.on_saved(event)
            case BuffersLoaded() if self.training is None:
                self._begin()
            case EvaluationRun(number, metrics):
                self._on_evaluated(number, metrics)
            case TaskFailed(error, detail):
                self._fail(error, detail)
            case Started():
                self.desk.ask("register", COORDINATOR, self.birth.register(), now)
            case StopRequested(reason):
                self.desk.do(Exit(0, reason))

    def _on_message(self, peer: Peer, message: m.Message, now: float) -> None:
        is_control = peer == COORDINATOR
        handler = (self._FROM_COORDINATOR if is_control else self._FROM_SERVERS).get(type(message))
        try:
            if handler is None or not (is_control or self._is_from_shard(peer, message)):
                raise RemoteProtocolError("it has no business here")
            handler(self, message, now)
        except RemoteProtocolError as error:
            what = f"{type(message).__name__} from {peer!r:.40}"
            self.desk.note("warning", f"refused {what}: {error.message}")

    def _is_from_shard(self, peer: Peer, message: m.Message) -> bool:
        """Whether a server speaks for its own shard."""
        shards = [channel.shard for channel in self._channels if channel.peer == peer]
        return shards == [getattr(message, "shard", *shards)] if shards else False

    def _on_deadline(self, now: float) -> None:
        self.desk.do(*self.desk.outstanding.due(now))
        if self._rejoin_at is not None and self._rejoin_at <= now:
            self._rejoin_at = None
            self.desk.do(*(c.join(now) for c in self._channels if not c.initialised))

    def _advance(self, now: float) -> None:
        if self.training is None:
            return
        if self._evaluation is not None:
            self._evaluation.advance(self.training, self.desk, now)
        self.training.draining = self._draining
        self.training.advance(now)
        self._save_if_clean(self.training)
        if self.training.nonfinite_in_row >= self.job.workers.nonfinite_steps_max:
            steps, last = self.training.nonfinite_in_row, self.training.last_poison
            self._fail(
                f"the loss or its gradient was not finite for {steps} steps in a row",
                f"last: {last}. A smaller lr or local_lr may help; nothing of it was pushed.",
            )

    # ------------------------------------------------------------ joining the run

    def _on_welcome(self, message: m.Welcome, now: float) -> None:
        if self.desk.outstanding.done("register", now) is None:
            return
        self._identity = Identity(self.birth.run_id, message.index, message.term, message.token)
        self.live.apply(message.settings, now)
        self._phase = "building the model"
        self.desk.do(BuildModel(message.index, message.term))

    def _on_model(self, event: ModelBuilt, now: float) -> None:
        self._model = event
        self._phase = "waiting for the servers"
        ready = m.ModelReady(self.birth.name, event.layout, event.samples)
        self.desk.ask("model", COORDINATOR, ready, now)

    def _on_topology(self, message: m.Topology, now: float) -> None:
        if self.desk.outstanding.done("model", now) is None or self._identity is None:
            return
        self._topology = message
        self._phase = "joining the servers"
        for shard, address in enumerate(message.addresses):
            channel = Channel(shard, self._identity, self.desk.outstanding)
            self._channels.append(channel)
            self.desk.do(Connect(channel.peer, address), channel.join(now))

    def _on_joined(self, message: m.Joined, now: float) -> None:
        assert self._model is not None
        channel = self._channels[message.shard]
        bounds = slice_bounds(len(self._model.parameters), len(self._channels), message.shard)
        if (message.lo, message.hi) != bounds:
            raise RemoteProtocolError(f"its slice is {message.lo}:{message.hi}")
        self.desk.do(*channel.on_joined(message, now))
        if not channel.initialised:
            self._initialise_or_wait(channel, now)
        elif self.training is None and all(c.joined and c.initialised for c in self._channels):
            self._load_buffers(channel.identity, now)

    def _initialise_or_wait(self, channel: Channel, now: float) -> None:
        assert self._model is not None
        assert self._topology is not None
        if not self._topology.initialise:
            self._rejoin_at = now + REJOIN_S
            return
        model, me = self._model, channel.identity
        values = to_host(model.parameters)[channel.lo : channel.hi].copy()
        extras = (model.averaged, model.constant)
        averaged, constant = extras if channel.shard == 0 else (extras[0][:0], extras[1][:0])
        initialise = m.Initialise(me.slot, me.epoch, values, averaged, constant)
        self.desk.ask(("join", channel.shard), channel.peer, initialise, now, values.nbytes)

    def _load_buffers(self, me: Identity, now: float) -> None:
        """Every shard is there. BatchNorm goes on with the run's statistics, not with new ones."""
        assert self._model is not None
        if self._model.averaged.size or self._model.constant.size:
            self._phase = "loading the buffers"
            self.desk.ask("buffers", "server-0", m.FetchBuffers(me.slot, me.epoch, 0), now)
        else:
            self._begin()

    def _begin(self) -> None:
        """Put the method to work."""
        assert self._model is not None
        assert self._identity is not None
        assert self._topology is not None
        side = self.algorithm.worker(self.options, self._model.parameters, self._identity.slot)
        self.training = Training(
            self.desk, self._identity, self._channels, self.outbox, side, self.compressor,
            self.job.workers.batch_size, self._model.averaged,
        )  # fmt: skip
        if self._topology.restore:
            self.desk.do(LoadArrays(self._topology.restore))

    def _on_restored(self, arrays: Any) -> None:
        """The residual of before the stop. Gradients that were made meanwhile are added to it."""
        assert self.training is not None
        residual = self.training.side.residual
        saved = arrays.get("residual")
        if saved is not None and saved.size == len(residual):
            made_since = to_host(residual).copy()
            copy_into(residual, saved + made_since)

    # ------------------------------------------------------------ settings

    def _on_change(self, message: m.Change, now: float) -> None:
        before = self.live.values()
        self.live.apply(message.settings, now)
        self.desk.answer_change(message, self.birth.name, before, self.live.values())

    # ------------------------------------------------------------ evaluating and saving

    def _on_evaluate(self, message: m.Evaluate, now: float) -> None:
        if self._evaluated is not None and self._evaluated.evaluation == message.evaluation:
            self.desk.send(COORDINATOR, self._evaluated)
        elif self.training is not None and self._evaluation is None:
            self._evaluation = Evaluation.begin(message.evaluation, self.training, now)

    def _on_buffers(self, message: m.Buffers, now: float) -> None:
        assert self._model is not None
        sizes = (message.averaged.size, message.constant.size)
        if sizes != (self._model.averaged.size, self._model.constant.size):
            raise RemoteProtocolError(f"it has {sizes} averaged and constant values")
        if self.desk.outstanding.done("buffers", now) is None:
            return
        if self.training is None:
            self.desk.do(LoadBuffers(message.averaged, message.constant))
        elif self._evaluation is not None:
            self._evaluation.buffers = message

    def _on_evaluated(self, number: int, metrics: dict[str, Any]) -> None:
        assert self.training is not None
        self._evaluation = None
        self.training.resume()
        self._evaluated = m.Evaluated(number, self.birth.name, metrics, "")
        self.desk.send(COORDINATOR, self._evaluated)

    def _on_save(self, message: m.Save, now: float) -> None:
        if not self._saving.is_new(message):
            return
        if self.training is None:
            self._saving.without_file(message, "")
        else:
            self._save = message

    def _save_if_clean(self, training: Training) -> None:
        """Gradients that are not pushed belong to portions that are not done: a run that goes on
        from here leases these again, so they must not be in the residual as well.
        """
        message = self._save
        if message is None or training.has_unpushed_steps():
            return
        self._save = None
        arrays = {"residual": to_host(training.side.residual).copy()}
        file = f"{self.birth.name}.safetensors"
        self._saving.begin(message, file, arrays, {"steps": training.steps})

    # ------------------------------------------------------------ ends

    def _on_drain(self, message: m.Drain, now: float) -> None:
        if not self._draining:
            self.desk.note("info", f"draining: {message.reason}")
        self._draining = True
        if self.training is not None and self.training.parked and not self.training.busy():
            self.desk.send(COORDINATOR, m.Drained(self.birth.name))

    def _on_dismiss(self, message: m.Dismiss, now: float) -> None:
        self.desk.note("warning", f"dismissed: {message.reason}")
        self.desk.do(Exit(EXIT_FENCED, message.reason))

    def _on_shutdown(self, message: m.Shutdown, now: float) -> None:
        self.desk.do(Exit(0, message.reason))

    def _fail(self, error: str, detail: str) -> None:
        detail = detail[-DETAIL_CHARS_MAX:]
        self.desk.send(COORDINATOR, m.Failed(self.birth.name, error, detail, True))
        self.desk.do(Note("error", error, {"detail": detail}), Exit(1, error))

    # ------------------------------------------------------------ reports

    def phase(self) -> str:
        if self._rejoin_at is not None:
            return "waiting for worker-0 to initialise the servers"
        return self.training.phase() if self.training else self._phase

    def waiting_for(self) -> str:
        """The daemons that must answer before this worker can go on; "" while it computes."""
        if self.phase() in ("computing", "evaluating", "building the model", "drained"):
            return ""
        if self._rejoin_at is not None:
            return "worker-0"
        peers = {peer for _, peer, _ in self.desk.outstanding.waiting()}
        return ", ".join(sorted(peers))

    def _report_if_due(self, now: float) -> None:
        phase = self.phase()
        changed = phase != self._reported_phase and phase not in PASSING
        if self._identity is None or (now < self._report_at and not changed):
            return
        self._report_at, self._reported_phase = now + REPORT_S, phase
        metrics = self.training.metrics(now) if self.training else {}
        metrics["settings"] = self.live.values()
        if self.training is not None and (stuck_s := self.training.stuck_s(now)):
            metrics["stuck_s"] = round(stuck_s, 1)
            what = "in one evaluation" if phase == "evaluating" else "in one batch"
            phase = f"{what} for {stuck_s:.0f} s"
        report = m.Report(
            self.birth.name, self.birth.incarnation, phase, self.waiting_for(), metrics
        )
        self.desk.send(COORDINATOR, report)
        if phase == "drained":
            self.desk.send(COORDINATOR, m.Drained(self.birth.name))

    def _on_portion_noted(self, message: m.PortionNoted, now: float) -> None:
        self.desk.outstanding.done(("portion", message.data_epoch, message.portion), now)

    def _on_work(self, message: m.Parameters | m.Ack | m.Lease, now: float) -> None:
        """What makes sense only while training."""
        match message:
            case _ if self.training is None:
                pass
            case m.Parameters():
                self.training.fetcher.on_parameters(message, now)
            case m.Ack():
                self.training.on_ack(message, now)
            case m.Lease():
                self.training.on_lease(message, now)

    _FROM_COORDINATOR: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        m.Welcome: _on_welcome,
        m.Topology: _on_topology,
        m.Lease: _on_work,
        m.PortionNoted: _on_portion_noted,
        m.Change: _on_change,
        m.Drain: _on_drain,
        m.Save: _on_save,
        m.Evaluate: _on_evaluate,
        m.Dismiss: _on_dismiss,
        m.Shutdown: _on_shutdown,
    }
    _FROM_SERVERS: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        m.Joined: _on_joined,
        m.Parameters: _on_work,
        m.Ack: _on_work,
        m.Buffers: _on_buffers,
        m.Dismiss: _on_dismiss,
    }
