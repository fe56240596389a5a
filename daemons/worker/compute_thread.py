"""The compute thread: model, gradients and evaluations, one after the other. In a worker it is the
main thread, because the task's code may need that: signals, asyncio, GUI toolkits.

The loop's thread handles messages at the same time: torch releases the GIL while it computes. If
the loop is idle when a gradient is done, the worker role handles that event in this thread, and the
next step starts at once: two thread switches take longer than the step of many small models.

Only this thread touches the model; the worker role ensures that no other thread writes to it
meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from daemons.worker.building import build, make_engine
from daemons.worker.data.portion_loader import Loaded, no_errors_from_signals
from daemons.worker.frozen_parameters import FrozenFile
from daemons.worker.hogwild.ranks import BatchesAhead
from daemons.worker.hogwild.workers import share
from daemons.worker.ranks.rank_processes import Ranks, RanksEnded
from daemons.worker.replica import TorchReplica
from daemons.worker.task.failures import ProcessLost, explained, failure_of
from daemons.worker.task.print_streams import copied
from daemons.worker.task.user_task import TaskError, plain, whereabouts
from daemons.worker.work_clock import WorkClock
from dlctl.algorithms import engines
from dlctl.algorithms.base import Shape
from dlctl.algorithms.engines import Operations
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.model.parts import Division
from dlctl.roles.protocol.effects import (
    AnswerWanted,
    BringAnswer,
    BringRows,
    BuffersLoaded,
    BuildModel,
    Compute,
    Computed,
    ComputeStateTaken,
    EngineRan,
    EvaluationRun,
    ExchangeOwn,
    FailedSample,
    LoadBuffers,
    LoadFrozen,
    LocateTask,
    ModelBuilt,
    NameRows,
    RestoreComputeState,
    RowsNamed,
    RowsWanted,
    RunEngine,
    RunEvaluation,
    StepAlong,
    StopCompute,
    TakeComputeState,
    TaskLocated,
    WriteFrozen,
)
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Array, ModelReady, Register

log = logging.getLogger("dlctl")
TEXT_CHARS_MAX = 8_000
"""The largest text in a message, at most 4 bytes a character: it fits into the header."""


Work = tuple[Effect | None, Callable[[], Event | None]]
"""What is done by calling it, and the effect that asked for it; None: the end of the process."""


class ComputeLoop(Protocol):
    """What the compute thread uses of the loop (`Loop`), or of a simulated one."""

    def perform(
        self, kind: type[Effect], how: Callable[[Any], object], *, anywhere: bool = False
    ) -> None: ...

    def post(self, event: Event) -> None: ...

    def offer(self, event: Event) -> None: ...

    def fail(self, error: Exception) -> None: ...


class ComputeThread:
    """Performs effects in the thread that calls `run`, which never returns."""

    def __init__(
        self,
        loop: ComputeLoop,
        job: JobFile,
        place: tuple[Path, Register],
        shape: Shape,
        ranks: Ranks | None = None,
        run: Path | None = None,
    ) -> None:
        """place: the run or host directory, for the frozen parameters and the shared memory, and
        this worker's identity there. shape: of the method. ranks: the other processes of the
        replica, if it has several. run: directory of the run whose stored code is used; None: the
        task's files as they are now.
        """
        self._place = place
        self._shape = shape
        self._division = Division(shape.parts, job)
        self._frozen: Any = None
        self._run = run
        self._engine: Operations | None = None
        self._ranks = ranks
        self._loop = loop
        self._job = job
        self._ahead: Any = None
        """The batches that later ranks compute ahead, if they share the model."""
        self._replica: Any = None
        self._stepper: Any = None
        self._loader: Any = None
        self._averaged: Array = np.zeros(0)
        """float64[n], the averaged buffers of the model before the next batch."""
        self._named: dict[tuple[int, int, int, int], Loaded] = {}
        """(data epoch, portion, number) -> batches that have named their rows."""
        self._has_warned = False
        """The log has the warning that a good batch has left bad buffers."""
        self._brought: queue.SimpleQueue[Array] = queue.SimpleQueue()
        """The rows that `_fetch_rows` waits for."""
        self._answers: queue.SimpleQueue[tuple[Array, ...]] = queue.SimpleQueue()
        """The answers of the head that `_ask_head` waits for."""
        self._stop_ticket = 0
        """The ticket of the newest gradient that is not needed any more; another thread sets it."""
        self._stopped: tuple[tuple[int, int, int, int], Loaded] | None = None
        """The batch whose gradient was stopped, and which is computed next."""
        self._batch_at = (0, 0, 0)
        """(data epoch, portion, number) of the batch that is computed."""
        self._sums: dict[str, Any] = {}
        """How a step starts the sum of its gradient, if there is a group."""
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.clock = WorkClock()
        self._thread = threading.main_thread()
        done: dict[type[Effect], Callable[[Any], Event | None]] = {
            BuildModel: self._build,
            LoadBuffers: self._load_buffers,
            WriteFrozen: lambda effect: self._frozen.write(self._replica, effect.file),
            LoadFrozen: lambda effect: self._frozen.load(self._replica, effect),
            Compute: self._compute,
            NameRows: self._name_rows,
            RunEngine: self._run_engine,
            StepAlong: self._step_along,
            ExchangeOwn: self._exchange_own,
            TakeComputeState: self._take_state,
            RestoreComputeState: self._restore_state,
            RunEvaluation: self._evaluate,
        }
        for kind, how in done.items():
            loop.perform(kind, partial(self._put, how), anywhere=True)
        loop.perform(LocateTask, self._locate)
        loop.perform(BringRows, lambda effect: self._brought.put(effect.values))
        loop.perform(BringAnswer, lambda effect: self._answers.put(effect.arrays))
        loop.perform(StopCompute, self._stop)

    def sum_by(self, begin: Callable[[int, float], Any]) -> None:
        """begin(elements, weight) starts the sum of a gradient (`Compute.sums`) in this thread."""
        if self._ranks is None:
            self._sums = {"begin_sum": begin}

    def device(self) -> Any:
        """The torch.device of the replica's model, once it is built."""
        return self._replica.device

    def _stop(self, effect: StopCompute) -> None:
        """The compute thread looks at it between two batches: torch does not return within one."""
        self._stop_ticket = effect.ticket

    def _put(self, how: Callable[[Any], Event | None], effect: Effect) -> None:
        self._work.put((effect, partial(how, effect)))

    def finish(self, work: Callable[[], None]) -> None:
        """Run this in the compute thread, as its last work."""
        self._work.put((None, work))

    def _locate(self, _: LocateTask) -> None:
        """Log where the task hangs, and notify the role. In another thread, as processes that load
        data may be asked.
        """
        threading.Thread(target=self._find, name="find", daemon=True).start()

    def _find(self) -> None:
        place, stack = whereabouts(self._thread)
        if waits := self._loader is not None and self._loader.waits_for():
            place, stack = waits.place, waits.stack or stack
            log.warning("%s", waits.text)
        log.warning("the task has not returned; it is at %s", place, extra={"detail": stack})
        self._loop.post(TaskLocated(place if stack else ""))

    def next_work(self) -> Work:
        """The oldest queued work, once there is any."""
        return self._work.get()

    def run(self) -> NoReturn:
        """Perform the queued work, in this thread."""
        self._thread = threading.current_thread()
        ours = np.geterr()
        while True:
            try:
                effect, work = self.next_work()
                with self.clock.measured(effect):
                    event = work()
                if event is not None:
                    # The task may have changed numpy's error handling, which is not the role's.
                    with np.errstate(**ours):
                        self._loop.offer(event)
                del event, effect, work  # They may hold large arrays.
            except RanksEnded:
                pass  # Another process of the worker has failed, and this one is about to exit.
            except ProcessLost as error:
                self._loop.fail(error)
            except BaseException as error:
                # A worker without this thread would look alive and never compute again. It may come
                # from a signal handler of the task, while this thread is idle.
                self._loop.post(failure_of(error))

    def _build(self, effect: BuildModel) -> ModelBuilt:
        if self._thread is threading.main_thread():
            no_errors_from_signals()
        if self._ranks is not None:
            self._ranks.start(effect.slot, effect.term)
        processes = self._job.workers.loader_processes
        self._stepper, self._loader, samples, batch_size = build(
            self._job, effect.slot, processes, self._run, finds=effect.finds,
            ranks=self._ranks if self._job.replica.ranks > 1 else None,
        )  # fmt: skip
        replica = self._stepper.replica
        replica.reseed(effect.slot, effect.term)
        self._replica = replica
        part = self._division.of(effect.slot)
        self._make_engine(self._shape.engine or part.engine)
        if self._loader is None:
            return self._build_without_data(replica)
        self._loader.reseed(effect.slot, effect.term)
        if part.asks:
            replica.task.user.ask = self._ask_head
        mark = None
        if "memory" in self._shape.links:
            shared = share(replica, self._place[0])
            whose = "this worker" if shared.is_new else "another worker"
            log.info("the model is in shared memory that %s created", whose)
            mark = shared.mark
        if replica.rows is not None:
            replica.rows.fetch = self._fetch_rows
        self._frozen = FrozenFile(*self._place)
        self._averaged = replica.averaged()
        if self._ranks is not None and self._job.replica.hogwild > 1:
            self._ahead = BatchesAhead(self._ranks, replica, self._loader.identity)
        loader, clients = self._loader, self._loader.clients
        ready = ModelReady(
            "", replica.layout.to_bytes(), samples, replica.task.has("finish"),
            self._frozen.digests(replica), replica.lacks_weights, loader.digest, batch_size,
            loader.shards, clients.sizes if clients is not None else (), loader.names.encode(),
            loader.files,
        )  # fmt: skip
        return ModelBuilt(ready, replica.parameters, self._averaged, mark)

    def _make_engine(self, target: str) -> None:
        """The torch part of the method, and of the worker's part; target: "": it has none."""
        if not target:
            return
        ranks = self._ranks
        met = (ranks.count, ranks.meet()) if ranks is not None else (1, None)
        self._engine = make_engine(self._job, target, self._replica, 0, *met)
        self._stepper.tell(self._engine)

    def _build_without_data(self, replica: TorchReplica) -> ModelBuilt:
        """A worker that only answers others."""
        self._frozen = FrozenFile(*self._place)
        self._averaged = replica.averaged()
        ready = ModelReady("", replica.layout.to_bytes(), 0, frozen=self._frozen.digests(replica))
        return ModelBuilt(ready, replica.parameters, self._averaged, None)

    def _ask_head(self, op: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Ask the head, and wait for its answer: for as long as the run waits for a head."""
        self._loop.post(AnswerWanted(op, self._batch_at, arrays))
        return self._answers.get()

    def _load_buffers(self, effect: LoadBuffers) -> BuffersLoaded:
        self._replica.load_averaged(np.array(effect.averaged))
        self._averaged = self._replica.averaged()
        return BuffersLoaded()

    def _compute(self, effect: Compute) -> Computed:
        """Compute the batches of an effect, up to the first unusable one."""
        if effect.step_samples:
            self._loader.resize(effect.step_samples // self._job.gradient.accumulate)
        with explained(self._job, self._loader.batch_size):
            if effect.rows is None:
                return self._batches(effect)
            rows = self._replica.rows
            rows.begin(effect.rows)
            computed = self._batches(effect)
        self._named.clear()
        return replace(computed, rows=rows.changes())

    def _batches(self, effect: Compute) -> Computed:
        if effect.count == 1:
            return self._batch(effect, effect.number, is_fresh=effect.fresh)
        losses: list[float] = []
        metrics: list[Mapping[str, float]] = []
        failed: tuple[FailedSample, ...] = ()
        for number in range(effect.number, effect.number + effect.count):
            is_first = number == effect.number
            computed = self._batch(effect, number, is_fresh=effect.fresh and is_first)
            failed += computed.failed
            if computed.is_usable:
                losses.append(computed.loss)
                metrics += computed.metrics or ({},)
            if not computed.is_usable or computed.ended_after is not None:
                break
        before = tuple(losses[:-1] if computed.is_usable else losses)
        returned = tuple(metrics) if any(metrics) else ()
        return replace(computed, before=before, metrics=returned, failed=failed)

    def _name_rows(self, effect: NameRows) -> RowsNamed:
        """Load the batches and keep them for `Compute`."""
        if effect.step_samples:
            self._loader.resize(effect.step_samples // self._job.gradient.accumulate)
        place = (effect.data_epoch, effect.start, effect.stop)
        self._named.clear()
        for number in range(effect.number, effect.number + effect.count):
            with explained(self._job, self._loader.batch_size):
                loaded = self._loader.step(*place, number, effect.shard)
            self._named[(*place, number)] = loaded
            if loaded.ended_after is not None:
                break
        steps = [[batch for batch, _ in each.batches] for each in self._named.values()]
        return RowsNamed(self._replica.rows.name(steps))

    def _fetch_rows(self, rows: Array) -> Array:
        while not self._brought.empty():
            self._brought.get()  # The late answer to a request that has timed out.
        self._loop.post(RowsWanted(rows))
        try:
            return self._brought.get(timeout=EVALUATE_S_MAX)
        except queue.Empty:
            raise DlctlError(
                f"the rows that evaluate reads have not arrived for {EVALUATE_S_MAX:.0f} s",
                hint="`dlctl why` shows what the servers that have them wait for",
            ) from None

    def _run_engine(self, effect: RunEngine) -> EngineRan:
        assert self._engine is not None
        with self._all_ranks("run", effect.arrays, op=effect.op):
            arrays = self._engine.run(effect.op, effect.arrays, effect.shapes)
        return EngineRan(arrays)

    def _step_along(self, effect: StepAlong) -> EngineRan:
        self._stepper.along(effect.gradient, effect.rate)
        return EngineRan(())

    def _exchange_own(self, effect: ExchangeOwn) -> EngineRan:
        if effect.take is not None:
            self._stepper.inner.take_packed(effect.take)
        return EngineRan((self._stepper.inner.packed(),))

    def _take_state(self, _: TakeComputeState) -> ComputeStateTaken:
        state = self._stepper.state()
        if self._engine is not None:
            with self._all_ranks("state"):
                state |= engines.to_saved(self._engine.state())
        return ComputeStateTaken(state)

    def _restore_state(self, effect: RestoreComputeState) -> None:
        of_engine = engines.of_saved(effect.arrays)
        others = {k: v for k, v in effect.arrays.items() if not k.startswith(engines.SAVED_AS)}
        self._stepper.restore(others)
        if self._engine is None or not of_engine:
            return
        names, arrays = [*of_engine], [*of_engine.values()]
        with self._all_ranks("restore", arrays, names=names):
            self._engine.restore(of_engine)

    def _all_ranks(
        self, kind: str, arrays: Sequence[Array] = (), **header: Any
    ) -> AbstractContextManager[Any]:
        """The other ranks make the same call while the block runs, and have finished it after."""
        return nullcontext() if self._ranks is None else self._ranks.same(kind, arrays, **header)

    def _batch(self, effect: Compute, number: int, *, is_fresh: bool) -> Computed:
        self._batch_at = effect.data_epoch, effect.portion, number
        if self._ahead is not None and effect.own_lr is not None:
            samples = self._loader.batch_size * self._job.gradient.accumulate
            steps = -((effect.start - effect.stop) // samples)
            taken: Computed | None = self._ahead.take(effect, number, steps, self._averaged)
            if taken is not None:
                return taken
        place = (effect.data_epoch, effect.start, effect.stop, number)
        loaded = self._load(place, effect.shard)
        batches = loaded.batches
        failed = tuple(FailedSample(number, *bad) for bad in loaded.bad)
        if not batches:
            nothing = Computed.of_nothing(self._averaged)
            return replace(nothing, failed=failed, ended_after=loaded.ended_after)
        step = self._stepper.step(
            batches, own_lr=effect.own_lr, gather=effect.gather, norm_max=effect.norm_max,
            epoch=effect.data_epoch, pull=effect.pull, fresh=is_fresh,
            samples=loaded.samples, is_stale=lambda: self._stop_ticket == effect.ticket > 0,
            **self._sums if effect.sums else {},
        )  # fmt: skip
        if step.is_stopped:
            self._stopped = place, loaded
            self._keep_or_restore(is_good=False)
            return Computed.of_stopped(self._averaged, step.computed)
        if self._averaged.size:
            self._keep_or_restore(is_good=step.is_usable)
        return Computed(
            step.loss, step.gradient, self._averaged, step.norm, step.is_usable,
            is_skipped=step.is_skipped, metrics=(step.metrics,) if step.metrics else (),
            failed=failed, ended_after=loaded.ended_after,
        )  # fmt: skip

    def _load(self, place: tuple[int, int, int, int], shard: int) -> Loaded:
        """The batches of a step. The data of one that was stopped is not read again: a stream has
        gone on."""
        stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped[0] == place:
            return stopped[1]
        return self._named.get(place) or self._loader.step(*place, shard)

    def _keep_or_restore(self, *, is_good: bool) -> None:
        """Undo what a batch that is not finite did to the buffers: a running mean that was NaN once
        stays NaN for ever. Even the variance of a good batch may overflow float32.
        """
        before, after = self._averaged, self._replica.averaged()
        # A mask may contain -inf on purpose; only finite values have to stay finite.
        if is_good and np.isfinite(after[np.isfinite(before)]).all():
            self._averaged = after
            return
        self._replica.load_averaged(before)
        if is_good and not self._has_warned:
            log.warning("a batch left NaN or infinity in the model's buffers: they were restored")
            self._has_warned = True

    def _evaluate(self, effect: RunEvaluation) -> EvaluationRun:
        averaged = np.array(effect.averaged, np.float64)
        if effect.finish_with is not None:
            values = effect.parameters, averaged
            text, failed = run_finish(self._replica, *values, effect.finish_with)
            return EvaluationRun(effect.evaluation, {}, text, failed)
        metrics = self._replica.evaluate(effect.parameters, averaged)
        return EvaluationRun(effect.evaluation, metrics)


def run_finish(
    replica: TorchReplica, parameters: Array, averaged: Array, metrics: dict[str, Any]
) -> tuple[str, str]:
    """(what `finish` has printed, which is logged as well, and returned; its error, or "").

    An error is only logged as a warning: no training depends on it.
    """
    returned, failed = "", ""
    with copied(TEXT_CHARS_MAX + 1) as printed:
        try:
            returned = replica.finish(parameters, averaged, metrics)
        except TaskError as error:
            failed = failure_of(error).error
            log.warning("%s", failed, extra={"detail": error.detail})
    parts = (printed.getvalue().rstrip("\n"), returned)
    return plain("\n".join(filter(None, parts)), TEXT_CHARS_MAX), failed
