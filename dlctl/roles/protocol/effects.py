"""Effects that roles request from their daemons besides messages, and the events that answer.

A role does not change the arrays in an effect until the answer has arrived.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import NamedTuple

from dlctl.algorithms.needs import Pull
from dlctl.model.vector import Vector
from dlctl.util.record import record
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Array, Json, ModelReady, ProcessExited, Spawn

# ---------------------------------------------------------------- the database (coordinator)


@record
class OnRecord(Event):
    """The write of `PutOnRecord` is on the disk."""


@record
class Unwritten(Event):
    """The run's database has become unwritable, or writable again."""

    error: str
    """Why it is unwritable; "": it is writable."""


@record
class TrackerTrouble(Event):
    """A tracker (wandb, mlflow) has stopped to take the run's figures, or takes them again."""

    tracker: str
    why: str
    """"": it takes them again."""
    dropped: int
    """Rows that it will never get, so far."""


@record
class MirrorNews(Event):
    """The state of the uploads to the mirror of the checkpoints."""

    mirrored: Json
    """number, step and nbytes of the newest complete one there; {}: none, or unknown yet."""
    age_s: float
    """How long ago it was saved."""
    asked: int
    """The newest checkpoint that was to be uploaded, by its number; 0: none."""
    pending: bool
    """It waits, or is under way."""
    sent: tuple[int, int]
    """Bytes of the one under way, and of all of it."""
    why: str
    """Why uploads fail; "" if they do not."""
    cause: str


# ---------------------------------------------------------------- borrowed hosts (coordinator)


@record
class AgentWaits(Event):
    """There is no host for this agent yet: it is queued."""

    name: str
    incarnation: int
    why: str


@record
class HostsTaken(Event):
    """The owner of the hosts reclaims them, or is about to."""

    kind: str
    """saving: soon, possibly returning them later; ending: soon, for good; over: now."""
    reason: str


@record
class HostTaken(Event):
    """The owner of the host of one agent reclaims it, or is about to; the launcher asks for another
    one as soon as the agent is to be started again.
    """

    name: str
    incarnation: int
    is_gone: bool
    """With all processes there."""
    why: str


# ---------------------------------------------------------------- files (servers and workers)


@record
class SaveArrays(Effect):
    """Write `file` into a checkpoint directory, durably; answered by `ArraysSaved`."""

    checkpoint: int
    directory: str
    file: str
    arrays: Mapping[str, Array]


@record
class ArraysSaved(Event):
    checkpoint: int
    sha256: str
    nbytes: int
    error: str
    """"" on success."""


class SavedTable(NamedTuple):
    """A table besides the parameters, of which a server loads the elements [lo, hi)."""

    name: str
    size: int
    lo: int
    hi: int
    dtype: str = "float32"


@record
class LoadArrays(Effect):
    """Read this daemon's state from a checkpoint directory; answered by `ArraysLoaded`.

    A server gets the elements [lo, hi) of its vectors, independent of how they were sliced when
    they were written, and the first server also the extras; a worker gets its own file, or nothing
    if it had none.
    """

    directory: str
    vectors: tuple[str, ...] = ()
    """Slots among them that the checkpoint does not have are left out."""
    extras: tuple[str, ...] = ()
    lo: int = 0
    hi: int = 0
    tables: tuple[SavedTable, ...] = ()
    """The tables to load; their arrays are named "table.<name>"."""
    kept: tuple[SavedTable, ...] = ()
    """What the optimiser keeps beside matrices, all of them concatenated: the arrays are named
    "kept.<name>". Those that the checkpoint does not have in this size are left out."""
    own: int | None = None
    """The number of a shard whose saved state is wanted beside that of the elements, as
    `manifest.OWN`."""


@record
class ArraysLoaded(Event):
    arrays: Mapping[str, Array]
    state: Json


# ---------------------------------------------------------------- the model (workers)


@record
class BuildModel(Effect):
    """Import the task, build model and dataset; answered by `ModelBuilt`."""

    slot: int
    term: int
    finds: bool = False
    """Find the largest batch size that fits into memory."""


@record
class ModelBuilt(Event):
    ready: ModelReady
    """The message to the coordinator, to which the worker adds its name."""
    parameters: Vector
    """float32[d]: the model itself, not a copy."""
    averaged: Array
    """float64[n], initial values of the averaged buffers."""
    mark: Array | None = None
    """uint8[1], shared like the model if the replicas of this host share it, not a copy. Nonzero:
    the shared model is a model of the run.
    """


@record
class WriteFrozen(Effect):
    """Write the frozen parameters to this file on this host; answered by `FrozenWritten`."""

    file: str


@record
class FrozenWritten(Event):
    file: str
    sha256: str
    nbytes: int
    error: str
    """"" on success."""


@record
class LoadFrozen(Effect):
    """Load the run's frozen parameters with these digests into the model; answered by
    `FrozenLoaded`, preceded by `FilesMissing` on another host.
    """

    digests: bytes


@record
class FrozenLoaded(Event):
    """The model has the run's frozen parameters."""


@record
class LoadBuffers(Effect):
    """Load the servers' buffers into the model; answered by `BuffersLoaded`."""

    averaged: Array


@record
class BuffersLoaded(Event):
    """The model has the run's buffers."""


@record
class Compute(Effect):
    """The gradient of one batch: number `number` of the portion [start, stop) of `data_epoch`."""

    data_epoch: int
    start: int
    stop: int
    number: int
    own_lr: float | None = None
    """The learning rate with which the replica's own optimiser steps along a usable gradient."""
    gather: bool = True
    """Whether the gradient is to be returned."""
    norm_max: float = sys.float_info.max
    """A gradient with a larger Euclidean norm is unusable."""
    count: int = 1
    """Total number of consecutive batches, each with an own step; the first unusable one ends it.
    """
    step_samples: int = 0
    """Maximum samples per batch, by which the portion is divided; 0: as in the job file."""
    shard: int = -1
    """The number of the stream's shard, or of the client; -1: the dataset has neither."""
    pull: Pull | None = None
    """A pull that is added to the gradient before the own step."""
    fresh: bool = False
    """The replica's own optimiser resets its state before the first of these batches."""
    rows: Array | None = None
    """float32[n]: the rows that these batches need (`NameRows`)."""
    sums: bool = False
    """The next `Reduce` is of this gradient, weighted by its samples, so it may begin early."""
    portion: int = 0
    """The number of the portion."""
    ticket: int = 0
    """What `StopCompute` names it by."""

    def is_usable(self, loss: float, norm: float) -> bool:
        """Whether the result is finite and not too large; else it is discarded."""
        return math.isfinite(loss) and norm <= self.norm_max


@record
class StopCompute(Effect):
    """The gradient with this ticket is not needed any more. If it is still being computed, that
    ends before the next of the batches that it accumulates, with `Computed.is_stopped`.
    """

    ticket: int


class FailedSample(NamedTuple):
    """A sample that could not be loaded."""

    number: int
    """The number of the batch, which was computed without this sample."""
    sample: int
    """The index of the sample in the dataset."""
    error: str
    detail: str


@record
class Computed(Event):
    loss: float
    gradient: Vector | None
    """float32[d], of the mean loss; valid until the next `Compute`. None: not requested."""
    averaged: Array
    """float64[n], the buffers after this step."""
    norm: float
    """Euclidean, of the gradient; not finite if an element or the sum of their squares is not."""
    is_usable: bool
    """Whether the gradient is usable (`Compute`); of several batches, the last computed one's."""
    before: tuple[float, ...] = ()
    """The losses of the batches before it, all usable."""
    is_skipped: bool = False
    """The gradient is unusable because the scale of the loss was too large (float16), or because
    none of its samples could be loaded: no fault of the replica.
    """
    metrics: tuple[Mapping[str, float], ...] = ()
    """Further metrics of the task's loss, per usable batch; (): none."""
    failed: tuple[FailedSample, ...] = ()
    """Samples missing from these batches; a batch that lacks all its samples is skipped."""
    ended_after: int | None = None
    """The stream's shard ended in the last batch, after this number of its samples; 0: there was
    nothing to compute. None: the batch was complete."""
    rows: Array | None = None
    """float32[n]: the change of `Compute.rows` by all usable batches of these."""
    is_stopped: bool = False
    """`StopCompute` has ended it: nothing of the batch counts."""
    computed: float = 1.0
    """The fraction of the batch that was computed until then."""

    @classmethod
    def of_stopped(cls, averaged: Array, computed: float) -> Computed:
        """The result of a computation that was stopped; the buffers are those before it."""
        return cls(
            math.nan, None, averaged, math.nan, is_usable=False, is_stopped=True, computed=computed
        )  # fmt: skip

    @classmethod
    def of_nothing(cls, averaged: Array) -> Computed:
        """The result for a shard of the stream that had ended before."""
        return cls(
            math.nan, None, averaged, math.nan, is_usable=False, is_skipped=True, ended_after=0
        )

    @property
    def odd(self) -> str:
        """Why it is unusable; the gradient's norm may overflow although the loss is finite."""
        if not math.isfinite(self.loss):
            return f"loss {self.loss}"
        limit = ", above what servers.push_norm_max allows" if math.isfinite(self.norm) else ""
        return f"gradient of norm {self.norm:.6g}{limit} (its loss is {self.loss:.6g})"


@record
class NameRows(Effect):
    """Load the batches of a following `Compute` with the same fields, and determine the rows that
    they need; answered by `RowsNamed`.
    """

    data_epoch: int
    start: int
    stop: int
    number: int
    count: int
    step_samples: int
    shard: int


@record
class RowsNamed(Event):
    rows: Array
    """int64[n], strictly ascending."""


@record
class RowsWanted(Event):
    """The task's `evaluate`, which is running, waits for these rows; answered by `BringRows`."""

    rows: Array
    """int64[n], the rows as in `RowsNamed`, at least one."""


@record
class BringRows(Effect):
    values: Array
    """float32[n], the servers' current values."""


@record
class AnswerWanted(Event):
    """The task's loss or `evaluate`, which is running, asks the worker that its part asks; answered
    by `BringAnswer`.
    """

    op: str
    batch: tuple[int, int, int]
    """(data epoch, portion, number) of the newest batch of the replica."""
    arrays: tuple[Array, ...]


@record
class BringAnswer(Effect):
    arrays: tuple[Array, ...]


@record
class StepAlong(Effect):
    """A step of the replica's own optimiser along this gradient; answered by `EngineRan`, or by
    `TaskFailed`.
    """

    gradient: Array
    rate: float


@record
class ExchangeOwn(Effect):
    """Read the state of the replica's own optimiser as one vector, and replace it by `take`, if
    given. Answered by `EngineRan`, or by `TaskFailed`.
    """

    take: Array | None


@record
class RunEngine(Effect):
    """An operation of the method's engine; answered by `EngineRan`, or by `TaskFailed`."""

    op: str
    arrays: tuple[Array, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None
    """The shapes of the arrays that the operation has to return; None: they are not checked."""


@record
class EngineRan(Event):
    arrays: tuple[Array, ...]


@record
class TakeComputeState(Effect):
    """Take torch's state of the replica besides the parameters, after all operations requested so
    far; answered by `ComputeStateTaken`, or by `TaskFailed`.
    """


@record
class ComputeStateTaken(Event):
    arrays: Mapping[str, Array]


@record
class RestoreComputeState(Effect):
    """Sent before the first operation; answered only on failure, by `TaskFailed`."""

    arrays: Mapping[str, Array]


@record
class OpenStore(Effect):
    """Open the rendezvous of this generation of the group; answered by `StoreOpened`."""

    generation: int


@record
class StoreOpened(Event):
    generation: int
    address: str
    """The address of the rendezvous, "host:port"."""


@record
class JoinGroup(Effect):
    """Leave the previous group and join this one; answered by `GroupJoined` or `GroupFailed`.

    From here on no effect of an earlier generation is answered.
    """

    generation: int
    rank: int
    size: int
    store: str
    timeout_s: float
    """The limit for joining, and for every sum once all members have reached it."""


@record
class LeaveGroup(Effect):
    """Leave the group immediately; not answered."""

    generation: int


@record
class Reduce(Effect):
    """Sum with all members, once all have requested it; answered by `Reduced` or `GroupFailed`, and
    meanwhile by `GroupWaits`.
    """

    generation: int
    vector: Array
    """float32[d]"""
    weight: float
    step: int
    joins: bool
    """This member has taken part in no sum yet."""
    is_behind: bool
    """This member has joined, but has not received the model: it is no source of it yet."""
    slot: int
    beside: float = 0.0
    dtype: str = "float32"
    """Type in which the sum is computed; if narrower, of the vectors times their share of the
    weight."""


@record
class Reduced(Event):
    """A sum that every member has."""

    generation: int
    number: int
    """The number of the sum: 1, 2, 3 ... over all generations of the group."""
    vector: Array
    """float32[d], the sum of weight * vector of the members at the newest step; read-only."""
    weight: float
    members: int
    step: int
    joined: int
    """Members for whom this is the first sum; their weights are 0."""
    is_counted: bool
    """Whether this member was at that step, and is not joining."""
    current: tuple[int, ...]
    """The slots of the members at that step that are neither joining nor behind, ascending."""
    beside: float = 0.0
    """The weighted mean of `Reduce.beside`."""


@record
class GroupJoined(Event):
    generation: int
    number: int
    """The number of the newest committed sum."""
    result: Reduced | None
    """The result of the newest committed sum, if it was not delivered to this member yet."""


@record
class GroupWaits(Event):
    """These ranks have not requested the sum yet; about once a second."""

    generation: int
    ranks: tuple[int, ...]


@record
class GroupFailed(Event):
    """A member is gone, or missed a deadline."""

    generation: int
    reason: str
    why: str = ""
    """The cause of the failure (`GroupBroken`)."""


@record
class RunEvaluation(Effect):
    """The task's `evaluate` with these values in the model; answered by `EvaluationRun`."""

    evaluation: int
    parameters: Array
    averaged: Array
    finish_with: Json | None = None
    """Metrics: run the task's `finish` with these instead. The answer has what it raises."""


@record
class LocateTask(Effect):
    """The task hangs: log its current position; answered by `TaskLocated`."""


@record
class TaskLocated(Event):
    place: str
    """The innermost line of the user's code, as in "/home/me/train.py:51"; "" if unknown."""


@record
class EvaluationRun(Event):
    evaluation: int
    metrics: Json
    text: str = ""
    """What the task's `finish` printed and returned."""
    error: str = ""
    """What the evaluation raised; "": nothing."""


@record
class TaskFailed(Event):
    """The user's code raised. `error` is one line, `detail` the traceback in that code."""

    error: str
    detail: str


@record
class Settled(Effect):
    """Record that the pushes 0..count-1 of this term are settled on `shard`."""

    term: int
    shard: int
    count: int


# ---------------------------------------------------------------- supervision


@record
class CoordinatorGone(Event):
    """To an agent: the coordinator's process has exited. To others: the agent's has, too."""


@record
class RestartCoordinator(Effect):
    """Ensure that the run has a coordinator, unless the run has ended properly: watch the running
    one, or start one. Starting two is safe.
    """


# ---------------------------------------------------------------- processes (agents)


@record
class StartProcess(Effect):
    spawn: Spawn


@record
class SignalProcess(Effect):
    """Signal a process that this agent started; a no-op if it has exited."""

    name: str
    incarnation: int
    signal: int


@record
class ProcessEnded(Event):
    exited: ProcessExited
