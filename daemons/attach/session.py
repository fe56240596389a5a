"""A worker in the user's own process: its role and connections in a thread beside the user's."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from daemons import parent_watch
from daemons.attach.context import ProgramEnd, ScriptProcess
from daemons.attach.exchange import Exchange, FromRole, InUserThread, Over
from daemons.attach.model_vector import ModelVector
from daemons.attach.stock import SharedStock
from daemons.attach.user_optimizer import UserOptimizer
from daemons.files.arrays import serve_files
from daemons.loop import Loop, Signals
from daemons.time_records import path_of
from daemons.worker.ack_record import Acks
from daemons.worker.connections import open_to_replicas
from daemons.worker.frozen_parameters import FrozenFile
from daemons.worker.task.failures import failure_of
from daemons.worker.task.user_task import whereabouts
from daemons.worker.work_clock import WorkClock
from dlctl import registry
from dlctl.compress import values
from dlctl.job.config import JobFile
from dlctl.job.inner import OF_SCRIPT
from dlctl.launch.addresses import as_dialled
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import (
    BuffersLoaded,
    BuildModel,
    ComputeStateTaken,
    EngineRan,
    ExchangeOwn,
    LoadBuffers,
    LoadFrozen,
    LocateTask,
    ModelBuilt,
    RestoreComputeState,
    RunEvaluation,
    Settled,
    StepAlong,
    TakeComputeState,
    TaskFailed,
    TaskLocated,
    WriteFrozen,
)
from dlctl.roles.protocol.loop_effects import GiveData, KeepModel, LendModel, RecallModel
from dlctl.roles.worker.services.looping import Looping
from dlctl.roles.worker.worker import Worker
from dlctl.wire.machine import Connect, Effect, Event
from dlctl.wire.messages import ModelReady

log = logging.getLogger("dlctl")


def steps_in_loop(job: JobFile) -> bool:
    """Whether the loop calls the `step` of an optimizer of its own. Methods that take gradients, by
    `run.optimizer`, may get one later than they join, or have it on the servers.
    """
    is_replica = registry.load("algorithms", job.algorithm.name).shape.model == "replica"
    return job.inner.name == OF_SCRIPT and not is_replica


class AttachedWorker:
    """An `exchange.Link`, and the `ScriptSession` of its process."""

    is_alone = False

    def __init__(
        self, process: ScriptProcess, model: ModelVector, own: UserOptimizer | None
    ) -> None:
        """Call this in the main thread: it takes over the signals."""
        self.job = process.context.job
        method = registry.load("algorithms", self.job.algorithm.name)
        self.stock = SharedStock(cuts=method.lead.portions == "clients")
        self.inbox: SimpleQueue[FromRole] = SimpleQueue()
        self.recalled = False
        self.slot = int(process.context.registration.name.rpartition("-")[2])
        self.takes_gradients = False
        self.is_restart = process.context.registration.incarnation > 1
        self.exchange: Exchange | None = None
        """Set by whoever begins this session."""
        self._context, self._model = process.context, model
        self.own = own
        """The script's own optimiser, which steps in each replica."""
        self._user = threading.current_thread()
        self._signals = Signals()
        self._frozen = FrozenFile(self._context.directory, self._context.registration)
        self._loop = Loop(
            self._context.log_handler.rotate_if_full, secret=self._context.credentials.secret
        )
        self._machine: Worker | None = None
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self._code = 0
        process.session = self

    def _connect_as_dialled(self, effect: Connect) -> None:
        """Servers listen beside the coordinator, maybe behind forwarded ports."""
        address = as_dialled(effect.address, self._context.control)
        self._loop.transport.connect(effect.peer, address, effect.key)

    # ------------------------------------------------------------ the user's thread

    def join(self, ready: ModelReady) -> None:
        """Join the run with this model and data; `ready` lacks what is known here."""
        digests = self._frozen.digests(self._model)
        layout = self._model.layout.to_bytes()
        ready = ModelReady(
            "", layout, ready.samples, frozen=digests, files=ready.files,
            has_own_data=ready.has_own_data, values=self._values(),
        )  # fmt: skip
        built = ModelBuilt(ready, self._model.vector, self._model.averaged())
        if self.own is None and steps_in_loop(self.job):
            log.warning(
                "dlctl.attach was given no optimizer: the state of the script's is in no "
                "checkpoint, and a process that is started again begins without it; "
                "write dlctl.attach(model, optimizer)"
            )
        self._open(built, has_own_data=ready.has_own_data)
        self._thread.start()

    def _values(self) -> str:
        """See `ModelReady.values`."""
        method = registry.load("algorithms", self.job.algorithm.name)
        is_served = method.shape.model == "tables"
        return "" if is_served else hashlib.sha256(self._model.vector.data).hexdigest()

    def offer(self, event: Event) -> None:
        self._loop.offer(event)

    @property
    def has_joined(self) -> bool:
        return self._thread.ident is not None

    @property
    def is_over(self) -> bool:
        return self.exchange is not None and self.exchange.is_over

    def end(self, end: ProgramEnd) -> int:
        """The script has ended. Returns the exit code of the process."""
        if self.is_over or not self._thread.is_alive():
            self._thread.join()
            if end.is_error:  # The role is gone, and can tell nobody.
                failed = end.failure("", "")
                log.error("%s", failed.error, extra={"detail": failed.detail})
            return self._code or end.code
        hint = "let `for batch in run.loader(...)` or `while not run.ended` end the training"
        return self.fail(end.failure("before the run was over", hint))

    def fail(self, failed: TaskFailed) -> int:
        self._loop.post(failed)
        self._thread.join()
        return self._code

    # ------------------------------------------------------------ the other thread

    def _run(self) -> None:
        assert self._machine is not None
        try:
            self._code = self._loop.run(self._machine)
        except Exception as error:
            log.exception("a bug in dlctl: %s: %s", type(error).__name__, error)
            self._code = 70
        reason = f"exit {self._code}" if self._code else "the worker has left the run"
        self.inbox.put(Over(self._machine.ended, reason))
        self.recalled = True  # The loop notices it at its next step.
        self.stock.wake()

    def _open(self, built: ModelBuilt, *, has_own_data: bool) -> None:
        loop, context, job = self._loop, self._context, self.job
        me, method = context.registration, registry.load("algorithms", job.algorithm.name)
        serve_files(loop, context.directory, me)
        acks = Acks(context.directory, me.name, me.incarnation, job.servers.count)
        loop.perform(Settled, acks.write)
        loop.stop_on_signals(self._signals)
        loop.chores += [parent_watch.watch_parents(loop, context), values.MEMORY.check]
        device = self._model.parameters[0].device if self._model.parameters else "cpu"
        clock = WorkClock()
        loop.record_times(path_of(context.directory, me), clock.times)
        address, _ = open_to_replicas(
            loop, context, method.shape, lambda: torch.device(device), clock
        )
        loop.perform(BuildModel, lambda _: loop.post(built))
        loop.perform(LendModel, self._lend, anywhere=True)
        loop.perform(RecallModel, self._recall, anywhere=True)
        loop.perform(GiveData, self.stock.give, anywhere=True)
        loop.perform(RunEvaluation, self.inbox.put, anywhere=True)
        loop.perform(KeepModel, self.inbox.put, anywhere=True)
        loop.perform(LocateTask, self._locate)
        for kind, how in self._asked().items():
            loop.perform(kind, partial(self._ask, how), anywhere=True)
        if context.is_guest and not self.job.has_other_hosts:
            loop.perform(Connect, self._connect_as_dialled)
        loop.transport.connect(COORDINATOR, context.control, context.credentials.coordinator)
        compressor = registry.load("compressors", job.compression.name)
        self._machine = Worker(
            me, job, method, compressor(compressor.Options(**job.compression.options)), address,
            steps=partial(Looping, has_own_data=has_own_data),
        )  # fmt: skip

    def _lend(self, effect: LendModel) -> None:
        self.recalled = False
        self.inbox.put(effect)

    def _recall(self, _: RecallModel) -> None:
        self.recalled = True
        self.stock.wake()

    def _ask(self, how: Callable[[Any], Event | None], effect: Effect) -> None:
        self.inbox.put(InUserThread(partial(self._answer, how, effect)))

    def _answer(self, how: Callable[[Any], Event | None], effect: Effect) -> Event | None:
        try:
            return how(effect)
        except Exception as error:
            return failure_of(error)

    def _locate(self, _: LocateTask) -> None:
        def find() -> None:
            place, stack = whereabouts(self._user)
            log.warning("the script has not returned; it is at %s", place, extra={"detail": stack})
            self._loop.post(TaskLocated(place if stack else ""))

        threading.Thread(target=find, name="find", daemon=True).start()

    # ------------------------------------------------------------ what the role asks for

    def _asked(self) -> dict[type[Effect], Callable[[Any], Event | None]]:
        return {
            LoadBuffers: self._load_buffers,
            WriteFrozen: lambda effect: self._frozen.write(self._model, effect.file),
            LoadFrozen: lambda effect: self._frozen.load(self._model, effect),
            StepAlong: self._step_along,
            ExchangeOwn: self._exchange_own,
            TakeComputeState: lambda _: ComputeStateTaken(self.own.state() if self.own else {}),
            RestoreComputeState: self._restore,
        }

    def _load_buffers(self, effect: LoadBuffers) -> BuffersLoaded:
        self._model.load_averaged(np.array(effect.averaged))
        return BuffersLoaded()

    def _step_along(self, effect: StepAlong) -> EngineRan:
        assert self.own is not None
        self._model.scatter()
        self.own.step_along(effect.gradient)
        self._model.gather()
        return EngineRan(())

    def _exchange_own(self, effect: ExchangeOwn) -> EngineRan:
        assert self.own is not None
        if effect.take is not None:
            self.own.take_packed(effect.take)
        return EngineRan((self.own.packed(),))

    def _restore(self, effect: RestoreComputeState) -> None:
        if self.own is not None:
            self.own.restore(effect.arrays)
