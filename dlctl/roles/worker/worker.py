"""The worker role: how a replica joins a run, trains in it, and leaves it.

`Joining` handles the join, `Training` the work. This module adds live settings, evaluations, saving
and draining; every request of the coordinator may arrive twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dlctl import inner, schedule
from dlctl import messages as m
from dlctl.algorithms import engines
from dlctl.algorithms.base import Method, ReplicaSide, Site, Start
from dlctl.algorithms.shapes import check_names
from dlctl.compress.base import Compressor
from dlctl.config import JobFile
from dlctl.errors import JobFailed, RemoteProtocolError
from dlctl.flat import Layout
from dlctl.machine import (
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
from dlctl.roles.protocol.context import (
    COORDINATOR,
    EXIT_FENCED,
    EXIT_POISONED,
    REPORT_S,
    Birth,
    Context,
)
from dlctl.roles.protocol.effects import (
    ArraysLoaded,
    ArraysSaved,
    BuffersLoaded,
    Computed,
    ComputeStateTaken,
    CoordinatorGone,
    EngineRan,
    EvaluationRun,
    FrozenLoaded,
    FrozenWritten,
    GroupFailed,
    GroupJoined,
    GroupWaits,
    LoadArrays,
    LoadBuffers,
    ModelBuilt,
    Reduced,
    RestoreComputeState,
    RowsNamed,
    RowsWanted,
    StoreOpened,
    TakeComputeState,
    TaskFailed,
    TaskLocated,
)
from dlctl.roles.protocol.files import FileSealed, FilesMissing, saved_file
from dlctl.roles.protocol.live_settings import LiveSettings, Place
from dlctl.roles.protocol.saving import Restoring, Saving
from dlctl.roles.protocol.watchdog import Watchdog
from dlctl.roles.worker.evaluation import Evaluation
from dlctl.roles.worker.joining import Joining
from dlctl.roles.worker.progress import OwnRate
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.services.asking import MODEL, NO_MODEL, Members, pack
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.roles.worker.services.computing import RUNNING, STEPPING
from dlctl.roles.worker.services.taking_over import Sharing
from dlctl.roles.worker.stall import StallDetector
from dlctl.roles.worker.training import Training
from dlctl.util.text import DISCARDED, REFUSED
from dlctl.vector import copy_into, to_host

PASSING = {"computing", "saving", "waiting for data", "fetching", "pushing", RUNNING, STEPPING}
"""Phases that change with every step: they are reported once a second, not at each change."""
BUSY = {"computing", "saving", "evaluating", RUNNING, STEPPING, "building the model", "drained"}
"""Phases in which it waits for nobody."""
DETAIL_CHARS_MAX = 16_000
OF_TORCH = (engines.SAVED_AS, inner.SAVED_AS)
"""Name prefixes of torch's state among the arrays that a replica saves."""
W = "w"
GENERATOR = "dice"
RESERVED = frozenset({W, "averaged", GENERATOR})
"""What a replica saves besides the method's state: its model, under the names that shards have in
checkpoints, and its RNG state."""


@dataclass(eq=False)
class Worker:
    birth: Birth
    job: JobFile
    algorithm: Method
    compressor: Compressor
    address: str = ""
    """Where this replica listens for others; "" if it does not listen."""

    def __post_init__(self) -> None:
        birth, algorithm, compressor = self.birth, self.algorithm, self.compressor
        self.context = Context(self.job.timeouts.resend_s)
        self.send_queue = SendQueue(self.context.retries)
        self.options = algorithm.Options(**self.job.algorithm.options)
        has_inner = self.job.inner.name != inner.NONE
        self._own_rate = OwnRate(self.job.inner.options["lr"]) if has_inner else None
        limiters = self.send_queue.limiters.items()
        places: dict[str, Place] = {
            **{direction: (limiter, "bytes_per_s") for direction, limiter in limiters},
            "push_window": (self.send_queue, "push_window_bytes"),
            **{key: (compressor, key) for key in compressor.live},
            **{key: (self.options, key) for key in algorithm.live},
        }
        if self._own_rate is not None:
            places["inner_lr"] = (self._own_rate, "lr")
        self.live = LiveSettings(self.context, birth.name, places)
        self.training: Training | None = None
        self.joining = Joining(self.context, birth, algorithm.shape)
        self._lifeline = Watchdog()
        self.members = Members(self.context, birth.name, connects="peers" in algorithm.shape.links)
        self._draining = False
        self._saving = Saving(self.context, birth.name)
        self._gathering = Restoring(self.context)
        self._evaluation: Evaluation | None = None
        self._evaluated: m.Evaluated | None = None
        """The last answer, in case it was lost."""
        self._save: m.Save | None = None
        """Requested; taken when no step is unpushed, so the residual has only what pushes left."""
        self._saves: tuple[m.Save, dict[str, m.Array], m.Json] | None = None
        """A save that lacks only torch's state: its arrays, and their state."""
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
        times += [self._report_at] if self.joining.identity else []
        return min((t for t in times if t is not None), default=None)

    def _on_event(self, event: Event, now: float) -> None:
        match event:
            case Received(peer, message, identity):
                self._on_message(peer, message, identity, now)
            case Computed() if self.training:
                self.training.on_computed(event, now)
            case StoreOpened() | GroupJoined() | Reduced() | GroupWaits() | GroupFailed():
                if self.training is not None and self.training.collecting is not None:
                    self.training.collecting.on_event(event, now)
            case RowsWanted(rows) if self.training and self._evaluation:
                self._evaluation.want(rows, self.training)
            case RowsNamed() if self.training:
                self.training.computing.on_rows_named(event)
            case EngineRan() if self.training:
                self.training.engines.on_ran(event, now)
            case ComputeStateTaken(arrays):
                self._save_whole(arrays)
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
                self._gathering.on_event(event, now)
            case ArraysSaved():
                self._saving.on_saved(event)
            case FrozenLoaded():
                self.joining.join(now)
            case FrozenWritten():
                self.joining.on_frozen_written(event)
            case BuffersLoaded():
                self.joining.is_ready = True
            case EvaluationRun():
                self._on_evaluated(event)
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

    def _on_message(self, peer: Peer, message: m.Message, identity: str, now: float) -> None:
        is_control = peer == COORDINATOR
        if is_control:
            self._lifeline.heard(now)
        handler = (self._FROM_COORDINATOR if is_control else self._FROM_SERVERS).get(type(message))
        try:
            if isinstance(message, m.Ask) and isinstance(peer, bytes):
                self._on_ask(peer, message, identity)
            elif isinstance(message, m.Answer) and not isinstance(peer, bytes):
                if self.training is not None:
                    self.training.asking.on_answer(peer, message, now)
            elif handler is None or not (is_control or self._is_from_shard(peer, message)):
                raise RemoteProtocolError("it has no business here")
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
        if self._evaluation is not None:
            self._evaluation.advance(self.training, self.context, now)
        self.training.computing.draining = self._draining
        self.training.computing.holds = self._holds(self.training.side)
        self.training.advance(now)
        if self._save_if_clean(self.training) and not self._holds(self.training.side):
            self.training.computing.holds = False
            self.training.advance(now)
        bad = self.training.bad_gradients
        if bad.steps_in_row >= self.job.workers.nonfinite_steps_max:
            self._leave_poisoned(
                f"{DISCARDED} for {bad.steps_in_row} steps in a row",
                f"last: {bad.last}. A smaller lr or inner.lr may help; nothing was pushed.",
            )
        elif bad.pushes_in_row >= self.job.workers.refused_pushes_max:
            self._leave_poisoned(
                f"{bad.pushes_in_row} {REFUSED}: {bad.reason}",
                f"they were of {bad.last}; the servers' values are unchanged.",
            )

    # ------------------------------------------------------------ joining the run

    def _on_welcome(self, message: m.Welcome, now: float) -> None:
        if self.joining.on_welcome(message, now):
            self.live.begin(message.settings)
            self._listen(now)

    def _on_peers(self, message: m.Peers, now: float) -> None:
        identity = self.joining.identity
        if identity is None or not self.members.on_peers(message, identity.slot):
            return
        if self.training is not None:
            self.training.side.members = self.members.slots

    def _listen(self, now: float) -> None:
        """Announce the address at which this replica listens for others."""
        identity = self.joining.identity
        if self.address and identity is not None:
            message = m.Listening(identity.slot, identity.epoch, self.address)
            self.context.ask("listening", COORDINATOR, message, now)

    def _on_ask(self, peer: Peer, message: m.Ask, identity: str) -> None:
        """Raises RemoteProtocolError for what no replica of this run would send."""
        self.members.authz.check(identity, message)
        me = self.joining.identity
        if self.training is not None:
            self.training.answering.on_ask(peer, message)
        elif me is not None and message.op == MODEL:
            none = m.Answer(me.slot, me.epoch, message.request, NO_MODEL, pack(()))
            self.context.send(peer, none)

    def _on_topology(self, message: m.Topology, now: float) -> None:
        if load := self.joining.on_topology(message, now):
            self._gathering.load(load)

    def _on_joined(self, message: m.Joined, now: float) -> None:
        if self.joining.on_joined(message, now) and self.training is not None:
            self.training.on_joined_again(message.shard)

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
            self._gathering.load(LoadArrays(self.joining.restores()))

    def _begin(self, saved: Mapping[str, m.Array] | None = None) -> None:
        """Start the method; saved: the replica's state from before a stop."""
        model, identity = self.joining.model, self.joining.identity
        assert model is not None
        assert identity is not None
        seed = (self.job.job.seed, identity.slot, identity.epoch)
        side = self.algorithm.replica(
            Site(
                options=self.options,
                parameters=model.parameters,
                slot=identity.slot,
                layout=Layout.from_bytes(model.ready.layout),
                rng=np.random.default_rng(seed),
                members=self.members.slots,
                has_inner=self._own_rate is not None,
                pushes_all=self.compressor.takes_all,
            )
        )
        if self._own_rate is not None:
            self._own_rate.factor = schedule.factor(self.job, model.ready.samples)
        start: Start = "joins" if self.joining.is_under_way() else "new"
        side.begin("restored" if saved else start)
        check_names(side)
        if saved:
            self._restore_model(side, saved)
            of_torch = {name: saved[name] for name in saved if name.startswith(OF_TORCH)}
            if own := saved.keys() - RESERVED - of_torch.keys():
                side.restore({name: saved[name] for name in own})
            if of_torch:
                self.context.do(RestoreComputeState(of_torch))
            if GENERATOR in saved:
                side.rng.bit_generator.state = json.loads(saved[GENERATOR].tobytes())
        shape, begins = self.algorithm.shape, start == "new" or bool(saved)
        if model.mark is not None and begins:
            model.mark[0] = 1  # The shared memory is a model of the run.
        takes_over = not begins and shape.model != "tables"
        collecting = None
        if "group" in shape.links:
            collecting = Collecting(
                self.context, self.birth.name, identity, self.job.timeouts.silent_s, begins=begins,
                hands_on=shape.model == "replica",
            )  # fmt: skip
        self.compressor.reseed(*seed)
        self.training = Training(
            context=self.context,
            identity=identity,
            tables=self.joining.tables,
            send_queue=self.send_queue,
            method=self.algorithm,
            side=side,
            compressor=self.compressor,
            compression=self.job.compression.name,
            batch_size=self.joining.batch_size(self.job) * self.job.gradient.accumulate,
            lease_ahead_s=self.job.data.lease_ahead_s,
            averaged=model.averaged,
            push_norm_max=self.job.servers.push_norm_max,
            members=self.members,
            collecting=collecting,
            own_rate=self._own_rate,
            takes_over=takes_over,
            sharing=Sharing(model.mark) if takes_over and model.mark is not None else None,
        )

    def _on_group(self, message: m.Group, now: float) -> None:
        if self.training is not None and self.training.collecting is not None:
            self.training.collecting.on_group(message, now)

    def _restore_model(self, side: ReplicaSide, saved: Mapping[str, m.Array]) -> None:
        """Restore the replica's own model, if the run's models are those of the replicas."""
        if self.algorithm.shape.model != "tables" and W in saved:
            copy_into(side.parameters, saved[W])
            self.context.do(LoadBuffers(saved["averaged"]))

    def _own_model(self, training: Training) -> dict[str, m.Array]:
        """The complete model of this replica, if the run's models are those of the replicas."""
        if self.algorithm.shape.model == "tables":
            return {}
        return {
            W: to_host(training.side.parameters).copy(),
            "averaged": np.array(training.computing.averaged),
        }

    def _on_change(self, message: m.Change, now: float) -> None:
        for limiter in self.send_queue.limiters.values():
            limiter.spend(0, now)
        self.live.on_change(message)

    # ------------------------------------------------------------ evaluating and saving

    def _on_evaluate(self, message: m.Evaluate, now: float) -> None:
        if self._evaluated is not None and self._evaluated.evaluation == message.evaluation:
            self.context.send(COORDINATOR, self._evaluated)
        elif self.training is not None and not self.training.has_model():
            if self.training.parked:  # Else the coordinator retries.
                none = m.Evaluated(message.evaluation, self.birth.name, {}, NO_MODEL)
                self.context.send(COORDINATOR, none)
        elif self.training is not None and self._evaluation is None:
            is_of_all = self.algorithm.shape.model == "mean"
            self._evaluation = Evaluation.begin(message, self.training, now, is_of_all=is_of_all)

    def _on_buffers(self, message: m.Buffers, now: float) -> None:
        if not self.joining.on_buffers(message, now):
            return
        if self.training is None:
            self.context.do(LoadBuffers(message.averaged))
        elif self._evaluation is not None:
            self._evaluation.buffers = message

    def _on_evaluated(self, run: EvaluationRun) -> None:
        assert self.training is not None
        more, self._evaluation = self._evaluation, None
        self.training.is_paused = False
        mean = more.mean if more is not None and run.metrics else None
        self._evaluated = m.Evaluated(
            run.evaluation, self.birth.name, run.metrics, run.error, run.text,
            {} if mean is None else mean.figures(),
        )  # fmt: skip
        self.context.send(COORDINATOR, self._evaluated)

    def _on_save(self, message: m.Save, now: float) -> None:
        if self._saves is not None or not self._saving.is_new(message):
            return
        if self.training is None and not self.joining.restores():
            self._saving.without_file(message, "")
        else:
            self._save = message

    def _holds(self, side: ReplicaSide) -> bool:
        """Whether no batch may begin until a save has taken its state. Torch's state is requested
        asynchronously, and the next batch could be computed first. Its arrays are not copied, which
        could take twice the memory of the model, so batches wait until they are written.
        """
        is_taken = self._save is None and self._saves is None
        if is_taken:
            return self._saving.is_writing() and self._keeps_more()
        return self._is_quiet_to_save(side)

    def _keeps_more(self) -> bool:
        """Whether torch has state of this replica besides the servers' parameters."""
        of_inner = not inner.keeps_nothing(self.job.inner)
        has_scale = self.job.gradient.precision == "fp16"
        return of_inner or bool(self.algorithm.shape.engine) or has_scale

    def _is_quiet_to_save(self, side: ReplicaSide) -> bool:
        """Whether the saved state changes with every step, not only with pushes."""
        is_in_replicas = self.algorithm.shape.model != "tables" or side.keeps_position
        return self._keeps_more() or is_in_replicas

    def _save_if_clean(self, training: Training) -> bool:
        """Take the requested save if no step is unpushed. Unpushed gradients belong to unfinished
        portions, which a resumed run leases again, so they must not be in the residual as well.
        Torch's state is consistent with it as long as nothing is computed. Returns whether the save
        was taken or answered.
        """
        message = self._save
        if message is None or training.writing.has_unpushed_steps():
            return False
        if self._is_quiet_to_save(training.side) and training.is_at_work():
            return False
        if self.algorithm.shape.model != "tables" and training.is_paused:
            return False
        self._save = None
        if not training.has_model():
            self._saving.without_file(message, "")  # It holds no model of this run.
            return True
        side = training.side
        arrays = {name: to_host(vector).copy() for name, vector in side.state().items()}
        if taken := RESERVED & arrays.keys():
            raise TypeError(f"{type(side).__module__}: state() may not name {sorted(taken)}")
        dice = json.dumps(side.rng.bit_generator.state).encode()
        arrays[GENERATOR] = np.frombuffer(dice, np.uint8)
        own = self._own_model(training)
        state = {"steps": training.writing.steps}
        if own:
            state |= {"lo": 0, "hi": own[W].size, "version": training.writing.steps}
        self._saves = (message, arrays | own, state)
        if self._keeps_more():
            self.context.do(TakeComputeState())
        else:
            self._save_whole({})
        return True

    def _save_whole(self, of_torch: Mapping[str, m.Array]) -> None:
        assert self._saves is not None
        (message, arrays, state), self._saves = self._saves, None
        self._saving.begin(message, saved_file(self.birth.name), {**arrays, **of_torch}, state)

    # ------------------------------------------------------------ exit

    def _on_drain(self, message: m.Drain, now: float) -> None:
        if not self._draining:
            self.context.note("info", f"draining: {message.reason}")
        self._draining = True

    def _on_dismiss(self, message: m.Dismiss, now: float) -> None:
        self.context.note("warning", f"dismissed: {message.reason}")
        self.context.do(Exit(EXIT_FENCED, message.reason))

    def _on_shutdown(self, message: m.Shutdown, now: float) -> None:
        self.context.do(Exit(0, message.reason))

    def _fail(self, error: str, detail: str) -> None:
        detail = detail[-DETAIL_CHARS_MAX:]
        self.context.send(COORDINATOR, m.Failed(self.birth.name, error, detail, True))
        self.context.do(Note("error", error, {"detail": detail}), Exit(1, error))

    def _leave_poisoned(self, error: str, detail: str) -> None:
        """Leave the run with the exit code for unusable results."""
        self.context.do(Note("error", error, {"detail": detail}), Exit(EXIT_POISONED, error))

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
        metrics |= {"settings": self.live.values(), **self.send_queue.waiting(now)}
        metrics["checkpoint"] = self._saving.newest
        if self.training is not None:
            stuck, phase = self._stalls.look(self.training, phase, now)
            metrics |= stuck
        report = m.Report(
            self.birth.name, self.birth.incarnation, phase, self.waiting_for(), metrics
        )
        self.context.send(COORDINATOR, report)
        if phase == "drained":
            self.context.send(COORDINATOR, m.Drained(self.birth.name))

    def _on_parameters(self, message: m.Parameters | m.SparseParameters, now: float) -> None:
        if self.training is not None:
            self.training.fetcher.on_parameters(message, now)

    _FROM_COORDINATOR: ClassVar[dict[type, Callable[[Any, Any, float], object]]] = {
        m.Welcome: _on_welcome,
        m.Topology: _on_topology,
        m.KeepFrozen: lambda self, message, now: self.joining.on_keep_frozen(message),
        m.Peers: _on_peers,
        m.Group: _on_group,
        m.ListeningNoted: lambda self, message, now: self.context.retries.done("listening", now),
        m.Moved: lambda self, message, now: self.joining.on_moved(message, now),
        m.Heard: lambda self, message, now: None,
        m.Lease: lambda self, message, now: self.training and self.training.on_lease(message, now),
        m.PortionNoted: lambda self, message, now: self.context.retries.done(
            ("portion", message.data_epoch, message.portion), now
        ),
        m.SampleNoted: lambda self, message, now: self.context.retries.done(
            ("sample", message.data_epoch, message.sample), now
        ),
        m.Change: _on_change,
        m.Drain: _on_drain,
        m.Save: _on_save,
        m.FileData: lambda self, message, now: self._gathering.transfers.on_data(message, now),
        m.Evaluate: _on_evaluate,
        m.Dismiss: _on_dismiss,
        m.Shutdown: _on_shutdown,
    }
    _FROM_SERVERS: ClassVar[dict[type, Callable[[Any, Any, float], object]]] = {
        m.Joined: _on_joined,
        m.JoinAgain: lambda self, message, now: self.joining.on_join_again(message, now),
        m.Parameters: _on_parameters,
        m.SparseParameters: _on_parameters,
        m.Ack: lambda self, message, now: self.training and self.training.on_ack(message, now),
        m.Buffers: _on_buffers,
        m.Dismiss: _on_dismiss,
    }
