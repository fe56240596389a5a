"""The effects that `daemons/` performs for each role, in virtual time: files, computing, processes,
records."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from dlctl import registry
from dlctl.algorithms import engines
from dlctl.algorithms.engines import Operations, TwinPlace
from dlctl.algorithms.needs import Pull
from dlctl.errors import JobFailed
from dlctl.job import inner
from dlctl.job.clients import Clients, Cohort, epoch_samples
from dlctl.job.config import Choice
from dlctl.model.flat import AVERAGED, slice_bounds
from dlctl.model.vector import euclidean_norm
from dlctl.records.best import Best
from dlctl.records.memory import DAEMON, Memory
from dlctl.roles.agent.children import ProcessStarted
from dlctl.roles.coordinator import records as j
from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.protocol.effects import (
    BuffersLoaded,
    BuildModel,
    Compute,
    Computed,
    ComputeStateTaken,
    EngineRan,
    EvaluationRun,
    ExchangeOwn,
    LoadBuffers,
    LocateTask,
    ModelBuilt,
    OnRecord,
    ProcessEnded,
    RestoreComputeState,
    RunEngine,
    RunEvaluation,
    Settled,
    SignalProcess,
    StartProcess,
    StepAlong,
    StopCompute,
    TakeComputeState,
    TaskFailed,
    TaskLocated,
    Unwritten,
)
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.runs.terms import TermLog
from dlctl.sim.arrays import FilesDriver
from dlctl.sim.batch_hosts import BatchHosts
from dlctl.sim.disk import NO_SPACE, SAVE_S, Disk
from dlctl.sim.frozen import FrozenDriver
from dlctl.sim.loops import LoopDriver, LoopOptions
from dlctl.sim.objectives import (
    Batch,
    Objective,
    batch_rows,
    listed,
    opened,
    shard_names,
    stream_rows,
)
from dlctl.sim.process import Process
from dlctl.sim.questions import Asks, QuestionsDriver
from dlctl.sim.shared_models import SharedModels
from dlctl.sim.store import Store
from dlctl.util import listing
from dlctl.util.names import HOME_AGENT
from dlctl.wire.machine import Exit, Send, StopRequested
from dlctl.wire.messages import Array, Json, ModelReady, ProcessExited, Spawned

SPAWN_S = 0.05
TAKE_S = 1e-4
REAP_S = 0.001
"""From the exit of a process to the notification of its agent."""
SSH_S = 0.3
SSH_FAILED = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """How long things take; steps are lognormal around their median."""

    step_s: float = 0.01
    spread: float = 0.2
    """Standard deviation of the logarithm; 0: always `step_s`."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Slot -> factor by which its steps are slower."""
    build_s: float = 0.2
    evaluate_s: float = 0.05
    finish_s: float = 0.0
    """0: the task has no `finish`."""
    loop: LoopOptions = field(default_factory=LoopOptions)
    """For jobs with a training loop of the user's own."""


class Stepping(Protocol):
    """The optimiser of one replica, over its parameters."""

    def step(self, gradient: Array, lr: float) -> None: ...

    def state(self) -> Mapping[str, Array]:
        """The state by the names in a checkpoint; copies."""

    def restore(self, state: Mapping[str, Array]) -> None: ...

    def forget(self) -> None:
        """Reset to the initial state."""

    def packed(self) -> Array:
        """float32[n]: the whole state of the optimiser."""

    def take_packed(self, packed: Array) -> None:
        """Replace the state by that of another optimiser."""


Inner = Callable[[Array], Stepping]
"""Parameters -> their optimiser."""


class PlainSGD:
    """parameters -= lr * gradient; stateless."""

    def __init__(self, parameters: Array) -> None:
        self.parameters = parameters

    def step(self, gradient: Array, lr: float) -> None:
        self.parameters -= lr * gradient

    def state(self) -> Mapping[str, Array]:
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        assert not state

    def forget(self) -> None:
        """Nothing to forget: the optimiser is stateless."""

    def packed(self) -> Array:
        return np.zeros(0, np.float32)

    def take_packed(self, packed: Array) -> None:
        assert not packed.size


def plain_inner(choice: Choice) -> Inner | None:
    """Optimisers that need no torch; a simulation of another one passes a function like this."""
    if choice.name == inner.NONE:
        return None
    options = inner.InnerSGDOptions(**choice.options)
    assert choice.name == "sgd", f"{choice.name} is torch's"
    assert options == inner.InnerSGDOptions(lr=options.lr), "plain SGD has a rate, and nothing else"
    return PlainSGD


class ComputeDriver:
    """One worker's thread for its model.

    It checks two invariants of the worker role: the model is not written to while a gradient is
    computed, and no gradient is used once the next one is begun.
    """

    def __init__(
        self,
        process: Process,
        objective: Objective,
        seed: int,
        options: ComputeOptions,
        rng: np.random.Generator,
        method: str = "",
        twin: str = "",
        method_options: Any = None,
        own: Inner | None = None,
        *,
        files: FilesDriver,
        cohort: Callable[[int], Cohort] = Cohort,
        memory: SharedModels | None = None,
        has_loop: bool = False,
        accumulate: int = 1,
    ) -> None:
        """twin: "module:Class", the engine of this method in numpy; "" if it has none.
        method_options: of the method, for the twin. own: creates the replica's own optimiser for
        its parameters; None: it has none. cohort: `Lead.cohort`. memory: of all hosts, if their
        replicas share the model. has_loop: a training loop of the user's own computes.
        accumulate: batches of one step.
        """
        self._memory = memory
        self._accumulate = accumulate
        self._mark: Array | None = None
        self._cohort = cohort
        self.process = process
        self.objective = objective
        self.seed = seed
        self.options = options
        self.rng = rng
        self.computed = 0
        self._lengths: tuple[int, ...] = getattr(objective, "lengths", ())
        """Samples of each shard, if the dataset is a stream."""
        self._names = getattr(objective, "names", ()) or shard_names(len(self._lengths))
        self._clients: Clients | None = getattr(objective, "clients", None)
        self.parameters = objective.initial()
        self._gradient = np.empty_like(self.parameters)
        # Not zeros: new files are zero-filled, so a missing write would go unnoticed.
        self._averaged = np.ones(objective.layout.size(AVERAGED))
        self._who = (0, 0)
        self._counts: dict[int, int] = {}
        self._own_samples = 0
        self._free_at = 0.0
        self._stop_ticket = 0
        """The ticket of the newest gradient that is not needed any more."""
        self._is_taken = self._is_stepping = False
        """Whether torch's state was requested, and is not returned yet."""
        self.frozen = FrozenDriver(process, objective, files)
        self._own = own
        self._inner = own(self.parameters) if own is not None else None
        self._asking: QuestionsDriver | None = None
        """Of a part whose computations ask."""
        self._answered: tuple[float, Array] | None = None
        """Loss and gradient of the batch, where these came of answers."""
        if isinstance(objective, Asks):
            self._asking = QuestionsDriver(process)
        self._engine: Operations | None = None
        if twin:
            place = TwinPlace(objective, self.parameters, method_options)
            self._engine = Operations(registry.attribute(twin)(place), method)
            process.perform(RunEngine, self._run_engine)
        self._perform_all()
        if has_loop:
            self._begin_loop(method)

    def _begin_loop(self, method: str) -> None:
        """A training loop of the user's own computes."""
        loop = self.options.loop
        self._own_samples = loop.own_samples
        cuts = registry.load("algorithms", method).lead.portions == "clients"
        LoopDriver(
            self.process, self, loop, samples=self.objective.samples, seed=self.seed, rng=self.rng,
            cuts=cuts,
        )  # fmt: skip

    def _perform_all(self) -> None:
        """What every worker's compute thread does."""
        process = self.process
        for kind, how in (
            (BuildModel, self._build),
            (LoadBuffers, self._load_buffers),
            (Compute, self._compute),
            (StopCompute, self._stop),
            (RunEvaluation, self._evaluate),
            (StepAlong, self._step_along),
            (ExchangeOwn, self._exchange_own),
            (TakeComputeState, self._take_state),
            (RestoreComputeState, self._restore_state),
            (Settled, self._settled),
            (LocateTask, lambda _: process.post(TaskLocated("/home/me/train.py:51"))),
        ):
            process.perform(kind, how)

    def _settled(self, effect: Settled) -> None:
        self._counts[effect.shard] = effect.count
        self.process.acks = json.dumps([effect.term, sorted(self._counts.items())]).encode()

    def _build(self, effect: BuildModel) -> None:
        self._who = (effect.slot, effect.term)
        layout = self.objective.layout
        if self._memory is not None:
            self.parameters, self._mark = self._memory.join(self.process, self.parameters)
            self._inner = self._own(self.parameters) if self._own is not None else None
        ready = ModelReady(
            "", layout.to_bytes(), self._samples(), has_finish=bool(self.options.finish_s),
            frozen=self.frozen.build(effect.slot), batch_size=FOUND if effect.finds else 0,
            shards=len(self._lengths),
            clients=() if self._clients is None else self._clients.sizes,
            names=listing.ROW.join(listed(self._names, effect.slot)).encode(),
            has_own_data=bool(self._own_samples),
        )  # fmt: skip
        built = ModelBuilt(ready, self.parameters, self._averaged, self._mark)
        self.process.post(built, self.options.build_s)

    def _samples(self) -> int:
        """The samples of a data epoch; 0: the dataset is a stream."""
        if self._clients is not None:
            return epoch_samples(self._clients.sizes, self._cohort(len(self._clients.sizes)))
        return 0 if self._lengths or self._own_samples else self.objective.samples

    def _load_buffers(self, effect: LoadBuffers) -> None:
        self._averaged = effect.averaged.copy()
        self._later(0.0, lambda: self.process.post(BuffersLoaded()))

    def _compute(self, effect: Compute) -> None:
        assert not self._is_taken, "a batch is begun while torch's state is taken"
        if self._is_stepping:
            self._later(0.0, lambda: self._compute(effect))
            return
        self._gradient[:] = np.nan
        before, parts = self.parameters.copy(), self._accumulate
        self._pass(effect, before, self.step_s() / parts, parts)

    def _stop(self, effect: StopCompute) -> None:
        self._stop_ticket = effect.ticket

    def _pass(self, effect: Compute, before: Array, takes_s: float, left: int) -> None:
        """One of the batches that the gradient accumulates. left: with this one."""

        def then() -> None:
            if left == 1:
                self._ask(effect, before)
            elif self._stop_ticket == effect.ticket > 0:
                assert np.array_equal(before, self.parameters), "changed under a gradient"
                computed = 1 - (left - 1) / self._accumulate
                self.process.post(Computed.of_stopped(self._averaged, computed))
            else:
                self._pass(effect, before, takes_s, left - 1)

        self._later(takes_s, then)

    def _ask(self, effect: Compute, before: Array) -> None:
        """Finish the step, once the questions of its batch are answered, if it has any."""
        if self._asking is None:
            self._finish(effect, before)
            return
        assert isinstance(self.objective, Asks)
        batch = Batch(self._rows(effect), *self._who, self.computed)
        key = effect.data_epoch, effect.portion, effect.number

        def then(computed: tuple[float, Array]) -> None:
            self._answered = computed
            self._finish(effect, before)

        self._asking.begin(self.objective.asking(before, batch, key), key, then)

    def step_s(self) -> float:
        """How long the next step takes."""
        spread = np.exp(self.options.spread * self.rng.standard_normal())
        return self.options.step_s * self.options.slow.get(self._who[0], 1.0) * float(spread)

    def _later(self, takes_s: float, do: Callable[[], None]) -> None:
        """Run tasks sequentially, as a thread does."""
        timeline = self.process.timeline
        self._free_at = max(self._free_at, timeline.now) + takes_s
        timeline.at(self._free_at, lambda: do() if self.process.alive else None)

    def _finish(self, effect: Compute, before: Array) -> None:
        is_alone = self._memory is None
        is_same = np.array_equal(before, self.parameters)
        assert is_same or not is_alone, "the model was changed under a gradient"
        losses: list[float] = []
        for number in range(effect.number, effect.number + effect.count):
            is_fresh = effect.fresh and number == effect.number
            seen = before if number == effect.number else self.parameters
            try:
                computed = self._batch(replace(effect, number=number, fresh=is_fresh), seen)
            except JobFailed as error:
                self.process.post(TaskFailed(error.message, ""))
                return
            if computed.is_usable:
                losses.append(computed.loss)
            if not computed.is_usable or computed.ended_after is not None:
                break
        before_it = losses[:-1] if computed.is_usable else losses
        self.process.post(replace(computed, before=tuple(before_it)))

    def _batch(self, effect: Compute, seen: Array) -> Computed:
        """seen: the parameters of the gradient, which other processes may have changed since."""
        rows = self._rows(effect)
        length = effect.stop - effect.start
        lo, hi = slice_bounds(length, -(-length // effect.step_samples), effect.number)
        ended_after = len(rows) if len(rows) < hi - lo else None
        if not len(rows):
            assert ended_after == 0, f"{effect} has no rows"
            self.computed += 1
            return Computed.of_nothing(self._averaged)
        loss = self.measure(rows, seen)
        norm = euclidean_norm(self._gradient)
        is_usable = effect.is_usable(loss, norm)
        if self._engine is not None and not is_usable:
            self._engine.discard_step()
        computed = Computed(
            loss, self._gradient, self._averaged, norm, is_usable, ended_after=ended_after
        )
        if effect.own_lr is not None and is_usable:
            self.own_step(effect.own_lr, effect.pull, fresh=effect.fresh)
        return computed if effect.gather else replace(computed, gradient=None)

    def measure(self, rows: Array, seen: Array) -> float:
        """The loss of a batch at these parameters; its gradient is in `gradient`."""
        batch = Batch(rows, *self._who, self.computed)
        self.computed += 1
        if self._engine is not None:
            self._engine.begin_step(len(rows), 1.0)
            self._engine.see_batch(batch, 1.0)
        loss, self._gradient[:] = self._answered or self.objective.gradient(seen, batch)
        self._answered = None
        self._averaged = self.objective.averaged(self._averaged, batch)
        return loss

    def own_step(self, lr: float, pull: Pull | None, *, fresh: bool) -> None:
        """Of the replica's own optimiser, along the newest gradient."""
        assert self._inner is not None, "this replica has no optimiser of its own"
        if fresh:
            self._inner.forget()
        if pull is not None:
            displacement = self.parameters - pull.toward
            self._gradient += np.float32(pull.strength) * displacement
        self._inner.step(self._gradient, lr)

    @property
    def gradient(self) -> Array:
        """float32[d], the newest."""
        return self._gradient

    @property
    def averaged(self) -> Array:
        """float64[n], the model's buffers after the newest gradient."""
        return self._averaged

    def _rows(self, effect: Compute) -> Array:
        portion, batch = (effect.start, effect.stop), (effect.number, effect.step_samples)
        if effect.shard >= 0:
            if self._clients is None:
                shard = opened(self._names, self._who[0], effect.shard)
                return stream_rows(self._lengths, shard, portion, batch)
            lo, hi = slice_bounds(
                effect.stop - effect.start, -(-(effect.stop - effect.start) // batch[1]), batch[0]
            )
            return self._clients.rows(
                effect.data_epoch, effect.shard, effect.start + lo, effect.start + hi
            )
        assert 0 <= effect.start < effect.stop <= self.objective.samples
        return batch_rows(self.objective.samples, self.seed, effect.data_epoch, portion, batch)

    def _run_engine(self, effect: RunEngine) -> None:
        before = [array.copy() for array in effect.arrays]

        def finish() -> None:
            assert self._engine is not None
            assert all(map(np.array_equal, before, effect.arrays)), "changed under an operation"
            arrays = self._engine.run(effect.op, effect.arrays, effect.shapes)
            self.process.post(EngineRan(arrays))

        self._later(self.step_s(), finish)

    def _step_along(self, effect: StepAlong) -> None:
        before = effect.gradient.copy()
        self._is_stepping = True

        def finish() -> None:
            self._is_stepping = False
            assert self._inner is not None, "this replica has no optimiser of its own"
            assert np.array_equal(before, effect.gradient), "changed under a step"
            self._inner.step(effect.gradient, effect.rate)
            self.process.post(EngineRan(()))

        self._later(0.0, finish)

    def _exchange_own(self, effect: ExchangeOwn) -> None:
        def finish() -> None:
            assert self._inner is not None, "this replica has no optimiser of its own"
            if effect.take is not None:
                self._inner.take_packed(effect.take)
            self.process.post(EngineRan((self._inner.packed(),)))

        self._later(0.0, finish)

    def _take_state(self, _: TakeComputeState) -> None:
        self._is_taken = True

        def taken() -> None:
            self._is_taken = False
            self.process.post(ComputeStateTaken(self._state()))

        self._later(TAKE_S, taken)

    def _state(self) -> dict[str, Array]:
        state = dict(self._inner.state()) if self._inner is not None else {}
        return state | (engines.to_saved(self._engine.state()) if self._engine else {})

    def _restore_state(self, effect: RestoreComputeState) -> None:
        if self._engine is not None:
            self._engine.restore(engines.of_saved(effect.arrays))
        if self._inner is not None:
            self._inner.restore(
                {k: v for k, v in effect.arrays.items() if k.startswith(inner.SAVED_AS)}
            )

    def _evaluate(self, effect: RunEvaluation) -> None:
        takes_s = self.options.evaluate_s
        if self._asking is not None:
            self._evaluate_asking(effect)
            return
        try:
            ran = EvaluationRun(effect.evaluation, self.objective.evaluate(effect.parameters))
        except JobFailed as error:
            failed = TaskFailed(error.message, "")
            self._later(takes_s, lambda: self.process.post(failed))
            return
        if effect.finish_with is not None:
            text = f"{effect.finish_with} of {ran.metrics}"
            ran, takes_s = replace(ran, metrics={}, text=text), self.options.finish_s
        self._later(takes_s, lambda: self.process.post(ran))

    def _evaluate_asking(self, effect: RunEvaluation) -> None:
        assert self._asking is not None
        assert isinstance(self.objective, Asks)

        asking, objective, given = self._asking, self.objective, effect.finish_with

        def then(metrics: Json) -> None:
            ran = EvaluationRun(effect.evaluation, metrics)
            if given is not None:
                ran = replace(ran, metrics={}, text=f"{given} of {metrics}")
            self._later(self.options.evaluate_s, lambda: self.process.post(ran))

        def ask() -> None:
            asking.begin(objective.evaluating(effect.parameters), (0, 0, 0), then)

        if given is None:
            ask()
        else:
            self._later(self.options.finish_s, ask)


FOUND = 8
"""Largest batch size that fits into memory."""
Spawner = Callable[[str, str, int, str, str], Process]
"""(role, name, incarnation, secret key, coordinator's public key) -> the process, not started yet.
"""


class ChildrenDriver:
    """The processes that an agent starts, or takes over from a predecessor that died."""

    def __init__(self, process: Process, spawn: Spawner) -> None:
        self.process = process
        self.spawn = spawn
        self._children: dict[tuple[str, int], Process] = {}
        process.perform(StartProcess, self._start)
        process.perform(SignalProcess, self._signal)

    def adopt(self, child: Process) -> None:
        """Notify this agent of the child's exit, and let it signal the child, from now on."""
        name, incarnation = child.name, child.incarnation
        self._children[name, incarnation] = child
        child.ended = lambda status: self.process.post(
            ProcessEnded(ProcessExited(name, incarnation, status, tuple(child.last_lines))), REAP_S
        )

    def end_all(self, why: str) -> None:
        """Stop what it has started, as each does itself when its parent is gone
        (`daemons/parent_watch.py`).
        """
        for child in self._children.values():
            if child.alive:
                child.post(StopRequested(why), REAP_S)

    def _start(self, effect: StartProcess) -> None:
        spawn = effect.spawn
        child = self.spawn(
            spawn.role, spawn.name, spawn.incarnation, spawn.secret, self.process.coordinator_key
        )
        child.agent = self.process.name
        self.adopt(child)
        self.process.post(ProcessStarted(Spawned(spawn.name, spawn.incarnation, child.pid)))

    def _signal(self, effect: SignalProcess) -> None:
        child = self._children.get((effect.name, effect.incarnation))
        if child is not None and child.alive:
            child.signal(effect.signal)


def _recorded(store: Store) -> dict[str, int]:
    """The newest incarnation of every daemon that an earlier coordinator has started."""
    rows = {name: row["incarnation"] for name, row in store.daemons.items()}
    remembered = {name: row["incarnation"] for name, row in Memory(store.memory).under(DAEMON)}
    return rows | remembered


class RecordsDriver:
    """The coordinator's persistent records, and the agents that it places or finds.

    While the disk is full its rows are buffered, and are lost if it dies; it continues, as
    `daemons/coordinator/records.py` does. Terms are in their file before these
    rows are written, and are not issued before that. An orderly end waits for room: here, room is
    freed in time.
    """

    def __init__(
        self,
        process: Process,
        store: Store,
        spawn: Spawner,
        note: Callable[[str], None],
        wall_s: Callable[[], float],
        unreachable: Collection[str],
        disk: Disk,
        batch: BatchHosts,
    ) -> None:
        """`unreachable`: agents on whose hosts nothing can be started."""
        self.batch = batch
        self.process = process
        self.store = store
        self.spawn = spawn
        self.note = note
        self.wall_s = wall_s
        self.unreachable = unreachable
        self.disk = disk
        self._rows: list[Callable[[], None]] = []
        """Writes of rows that are not persisted yet."""
        self._terms = TermLog(store.terms_file)
        self._lasting = Lasting()
        self._trouble = ""
        self._agents: dict[str, Process] = {}
        self._incarnations = _recorded(store)
        """The newest incarnation of each agent that any coordinator has placed, found here or not.
        """
        for kind, how in (
            (Send, self._send),
            (Exit, self._exit),
            (j.IssueTerm, self._issue),
            (j.PutOnRecord, self._put_on_record),
            (j.Remember, self._remember),
            (j.AddEvent, self._event),
            (j.AddMetric, self._metric),
            (j.StatusSnapshot, self._snapshot),
            (j.BeginCheckpoint, self._begin),
            (j.CompleteCheckpoint, self._complete),
            (j.RecordCheckpoint, self._checkpoint),
            (j.RenewKey, self._renew_key),
            (j.LaunchAgent, self._launch),
            (j.WantHosts, lambda effect: self.batch.want(effect.agents)),
            (j.KillAgent, self._kill),
        ):
            process.perform(kind, how)

    def _send(self, effect: Send) -> None:
        self._commit()
        if not self._lasting.may_leave(effect.message):
            return  # The receiver will request it again.
        self.process.network.send(self.process, effect.peer, effect.message)

    def _exit(self, effect: Exit) -> None:
        self._write_rows()
        self.process.leave(effect)

    # ------------------------------------------------------------ rows

    def _keep(self, write: Callable[[], None]) -> None:
        self._rows.append(write)
        self._commit()

    def _commit(self) -> None:
        """Persist all buffered rows, or none."""
        trouble = NO_SPACE if self.disk.full else ""
        if trouble != self._trouble:
            self._trouble = trouble
            self.process.post(Unwritten(trouble))
        if not trouble:
            self._write_rows()

    def _write_rows(self) -> None:
        self._terms.append()
        rows, self._rows = self._rows, []
        for write in rows:
            write()
        if self._lasting.written():
            self.process.post(OnRecord())

    def _remember(self, effect: j.Remember) -> None:
        """State for the next coordinator of this run; None: delete it."""
        key, value = effect.key, json.loads(json.dumps(effect.value))
        self._lasting.remembers(key, value)

        def write() -> None:
            if value is None:
                self.store.memory.pop(key, None)
            else:
                self.store.memory[key] = value

        self._rows.append(write)  # It is persisted with what follows, such as a term.

    def _issue(self, effect: j.IssueTerm) -> None:
        self._lasting.issues_term()

        self._terms.issue(effect.name, effect.term)
        self._rows.append(partial(self.store.issued.append, (effect.name, effect.term)))
        if not self.disk.full:
            self._terms.append()  # The coordinator may die before the rows are written.

    def _put_on_record(self, _: j.PutOnRecord) -> None:
        self._lasting.await_all()
        self._commit()

    def _event(self, effect: j.AddEvent) -> None:
        json.dumps(effect.data)
        self.note(f"event {effect.kind} {effect.daemon}: {effect.text}")
        row = (self.process.timeline.now, effect.kind, effect.daemon, effect.text)
        stamp = self.wall_s()

        def write() -> None:
            self.store.events.append(row)
            self.store.stamps.append(stamp)

        self._keep(write)

    def _metric(self, effect: j.AddMetric) -> None:
        json.dumps(effect.values)
        row = (self.process.timeline.now, effect.daemon, effect.step, effect.values)
        self._keep(partial(self.store.metrics.append, row))

    def _snapshot(self, effect: j.StatusSnapshot) -> None:
        run, daemons = json.loads(json.dumps([effect.run, effect.daemons]))
        self._keep(partial(self.store.run.update, run))
        self._keep(partial(self.store.daemons.update, {row["name"]: row for row in daemons}))

    def _checkpoint(self, effect: j.RecordCheckpoint) -> None:
        row = json.loads(json.dumps(effect.value))
        self._keep(partial(self.store.checkpoints.update, {effect.number: row}))

    # ------------------------------------------------------------ checkpoints and keys

    def _begin(self, effect: j.BeginCheckpoint) -> None:
        directory = f"ckpt/{effect.step:012d}-{effect.number}"
        self.store.files.setdefault(directory, {})
        self.process.post(j.CheckpointBegun(effect.number, directory, ""))

    def _complete(self, effect: j.CompleteCheckpoint) -> None:
        if self.disk.full:
            self.process.post(j.CheckpointEnded(effect.number, NO_SPACE), SAVE_S)
            return
        self.store.manifests[effect.directory] = json.loads(json.dumps(effect.manifest))
        kept = sorted(self.store.manifests, key=lambda d: int(self.store.manifests[d]["number"]))
        wanted = Best.parse(effect.best)
        best = wanted and wanted.of((d, self.store.manifests[d]) for d in kept)
        for directory in (d for d in kept[: -effect.keep] if d != best):
            del self.store.manifests[directory]
            del self.store.files[directory]
        self.process.post(j.CheckpointEnded(effect.number, ""), SAVE_S)

    def _renew_key(self, effect: j.RenewKey) -> None:
        if self.disk.full:
            self.process.post(j.KeyRenewed(NO_SPACE))
            return
        self.store.key_number += 1
        self.process.post(j.KeyRenewed(""))

    def adopt(self, agent: Process) -> None:
        """Let this coordinator kill the agent, and learn of the agent's exit on its own host."""
        self._agents[agent.name] = agent
        name, incarnation = agent.name, agent.incarnation
        if name == HOME_AGENT:
            agent.ended = lambda status: self.process.post(
                ProcessEnded(ProcessExited(name, incarnation, status, ())), REAP_S
            )

    def _launch(self, effect: j.LaunchAgent) -> None:
        """Another host is reached over ssh: it terminates an earlier agent, or is unreachable."""
        self._incarnations[effect.name] = effect.incarnation
        if self.batch.take_order(effect, self._launch):
            return
        if effect.name in self.unreachable:
            refused = ProcessExited(
                effect.name, effect.incarnation, SSH_FAILED, ("No route to host",)
            )
            self.process.post(ProcessEnded(refused), SSH_S)
            return
        older = self._agents.get(effect.name)
        if older is not None:
            older.signal(9)
        key = self.process.coordinator_key
        self.adopt(self.spawn("agent", effect.name, effect.incarnation, effect.secret, key))

    def _kill(self, effect: j.KillAgent) -> None:
        """Kill an agent; on another host it then counts as gone (as in `launch/remote.py`)."""
        agent = self._agents.get(effect.name)
        self.batch.cancel(effect.name)
        if agent is not None and effect.name not in self.unreachable:
            agent.signal(9)
        if effect.name != HOME_AGENT:
            incarnation = self._incarnations.get(effect.name, 0)
            unseen = ProcessExited(effect.name, incarnation, STATUS_UNKNOWN, ())
            self.process.post(ProcessEnded(unseen), SSH_S)
