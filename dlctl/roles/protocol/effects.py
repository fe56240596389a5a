"""What roles want from their daemons besides messages, and the events that answer.

Arrays in an effect are not changed by the role until the answer has come.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import NamedTuple

from dlctl.algorithms.needs import Pull
from dlctl.machine import Effect, Event
from dlctl.messages import Array, Json, ModelReady
from dlctl.util.record import record
from dlctl.vector import Vector

# ---------------------------------------------------------------- what is on record (coordinator)


@record
class OnRecord(Event):
    """What `PutOnRecord` asked for is on the disk."""


@record
class Unwritten(Event):
    """The run's database cannot be written from now on, or it can again."""

    error: str
    """Why it cannot; "": it can."""


# ---------------------------------------------------------------- borrowed hosts (coordinator)


@record
class AgentWaits(Event):
    """There is no host for this agent yet: it is in a queue."""

    name: str
    incarnation: int
    why: str


@record
class HostsTaken(Event):
    """Whoever owns the hosts takes them away, or is about to."""

    kind: str
    """saving: soon, and perhaps to give them back; ending: soon, for good; over: now."""
    reason: str


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
    """"" if all went well."""


class SavedTable(NamedTuple):
    """A table beside the parameters, of which a server loads the elements [lo, hi)."""

    name: str
    size: int
    lo: int
    hi: int
    dtype: str = "float32"


@record
class LoadArrays(Effect):
    """Read this daemon's state from a checkpoint directory; answered by `ArraysLoaded`.

    A server gets the elements [lo, hi) of its vectors, however they were cut when they were
    written, and the first one also the extras; a worker gets its own file, or nothing if it had
    none.
    """

    directory: str
    vectors: tuple[str, ...] = ()
    """Slots among them that the checkpoint does not have are left out."""
    extras: tuple[str, ...] = ()
    lo: int = 0
    hi: int = 0
    tables: tuple[SavedTable, ...] = ()
    """They come as "table.<name>"."""


@record
class ArraysLoaded(Event):
    arrays: Mapping[str, Array]
    state: Json


# ---------------------------------------------------------------- the model (workers)


@record
class BuildModel(Effect):
    """Import the task, build model and dataset; answered by `ModelBuilt`."""

    slot: int
    epoch: int
    finds: bool = False
    """Find the batch size that there is memory for."""


@record
class ModelBuilt(Event):
    ready: ModelReady
    """What the coordinator is told; the worker puts its name into it."""
    parameters: Vector
    """float32[d]: the model itself, not a copy."""
    averaged: Array
    """float64[n], initial values of the averaged buffers."""
    mark: Array | None = None
    """If the replicas of this host share the model: uint8[1] that they share, too, not a copy. Not
    0: what stands there is a model of the run."""


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
    """"" if all went well."""


@record
class LoadFrozen(Effect):
    """Have the run's frozen parameters in the model, of which these are the digests; answered by
    `FrozenLoaded`, or on another host by `FilesMissing` before.
    """

    digests: bytes


@record
class FrozenLoaded(Event):
    """All of them are the run's now."""


@record
class LoadBuffers(Effect):
    """Put what the servers have into the model; answered by `BuffersLoaded`."""

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
    """If it is of use, the replica's own optimiser makes a step along it, with this rate."""
    gather: bool = True
    """Hand the gradient out."""
    norm_max: float = sys.float_info.max
    """A gradient with a larger Euclidean norm is of no use."""
    count: int = 1
    """Go on with the batches behind it, up to so many, each with an own step; the first one of no
    use ends it."""
    step_samples: int = 0
    """The most samples of a batch, by which the portion is cut; 0: as the job file says."""
    shard: int = -1
    """Of the stream, or the client; -1: the dataset has no such."""
    pull: Pull | None = None
    """Added to the gradient before the own step."""
    fresh: bool = False
    """The replica's own optimiser forgets what it keeps, before the first of these batches."""
    rows: Array | None = None
    """float32[n]: the rows that these batches have named (`NameRows`)."""
    sums: bool = False
    """The next `Reduce` is of this gradient, as it is, by its samples: it may begin already."""

    def is_usable(self, loss: float, norm: float) -> bool:
        """Whether what was computed is finite and not too large: what is not gets no further."""
        return math.isfinite(loss) and norm <= self.norm_max


class FailedSample(NamedTuple):
    """A sample that could not be loaded."""

    number: int
    """Of the batch that went on without it."""
    sample: int
    """In the dataset."""
    error: str
    detail: str


@record
class Computed(Event):
    loss: float
    gradient: Vector | None
    """float32[d], of the mean loss; valid until the next `Compute`. None: it was not asked for."""
    averaged: Array
    """float64[n], the buffers after this step."""
    norm: float
    """Euclidean, of the gradient; not finite if an element or the sum of their squares is not."""
    is_usable: bool
    """See `Compute`; of several batches, whether the last one that was computed is of use."""
    before: tuple[float, ...] = ()
    """The losses of the batches before it, all of use."""
    is_skipped: bool = False
    """It is of no use because the scale of the loss was too large (float16), or because none of its
    samples could be loaded: no fault of the replica's."""
    metrics: tuple[Mapping[str, float], ...] = ()
    """What else the task's loss returns, of each batch of use; (): nothing of any of them."""
    failed: tuple[FailedSample, ...] = ()
    """Samples that these batches lack; one that lacks all of them is skipped."""
    ended_after: int | None = None
    """The stream's shard has ended in the last batch, after so many samples of it; 0: there was
    nothing to compute. None: it had all."""
    rows: Array | None = None
    """float32[n]: how `Compute.rows` have changed, by all of these batches that are of use."""

    @classmethod
    def of_nothing(cls, averaged: Array) -> Computed:
        """The shard of the stream had ended before."""
        return cls(
            math.nan, None, averaged, math.nan, is_usable=False, is_skipped=True, ended_after=0
        )

    @property
    def odd(self) -> str:
        """Why it is of no use; a gradient may be too large to be squared beside a finite loss."""
        if not math.isfinite(self.loss):
            return f"loss {self.loss}"
        limit = ", above what servers.push_norm_max allows" if math.isfinite(self.norm) else ""
        return f"gradient of norm {self.norm:.6g}{limit} (its loss is {self.loss:.6g})"


@record
class NameRows(Effect):
    """Load the batches that `Compute` with the same fields will be of, and find the rows that they
    need; answered by `RowsNamed`.
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
    """int64[n], ascending, each once."""


@record
class RowsWanted(Event):
    """The task's `evaluate`, which is running, waits for these rows; answered by `BringRows`."""

    rows: Array
    """As in `RowsNamed`, at least one."""


@record
class BringRows(Effect):
    values: Array
    """float32[n], as the servers have them now."""


@record
class StepAlong(Effect):
    """A step of the replica's own optimiser along this gradient; answered by `EngineRan`, or by
    `TaskFailed`.
    """

    gradient: Array
    rate: float


@record
class ExchangeOwn(Effect):
    """What the replica's own optimiser keeps, as one vector; it keeps `take` from then on, if it is
    given. Answered by `EngineRan`, or by `TaskFailed`.
    """

    take: Array | None


@record
class RunEngine(Effect):
    """An operation of the method's engine; answered by `EngineRan`, or by `TaskFailed`."""

    op: str
    arrays: tuple[Array, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None
    """Of what it has to return."""


@record
class EngineRan(Event):
    arrays: tuple[Array, ...]


@record
class TakeComputeState(Effect):
    """What torch keeps for the replica beside the parameters, after all that was asked for so far;
    answered by `ComputeStateTaken`, or by `TaskFailed`.
    """


@record
class ComputeStateTaken(Event):
    arrays: Mapping[str, Array]


@record
class RestoreComputeState(Effect):
    """Before the first operation; not answered but by `TaskFailed`."""

    arrays: Mapping[str, Array]


@record
class OpenStore(Effect):
    """Open the rendezvous of this generation of the group; answered by `StoreOpened`."""

    generation: int


@record
class StoreOpened(Event):
    generation: int
    address: str
    """host:port."""


@record
class JoinGroup(Effect):
    """Leave the group of before and join this one; answered by `GroupJoined` or `GroupFailed`.

    From here on nothing of the generations before is answered any more.
    """

    generation: int
    rank: int
    size: int
    store: str
    timeout_s: float
    """Of joining, and of every sum once all members are there."""


@record
class LeaveGroup(Effect):
    """Be in no group, whatever goes on in it; not answered."""

    generation: int


@record
class Reduce(Effect):
    """Sum with all members, when all have asked for it; answered by `Reduced` or `GroupFailed`, and
    now and then by `GroupWaits`.
    """

    generation: int
    vector: Array
    """float32[d]"""
    weight: float
    step: int
    joins: bool
    """This member has taken part in no sum yet."""
    is_behind: bool
    """It has joined, and was not handed the model: it is no source of it yet."""
    slot: int
    beside: float = 0.0
    dtype: str = "float32"
    """What is summed in: of the vectors by their parts of the weight, if that is fewer bits."""


@record
class Reduced(Event):
    """A sum that every member has."""

    generation: int
    number: int
    """Of the sum: 1, 2, 3 ... over all generations."""
    vector: Array
    """float32[d], the sum of weight * vector of the members at the newest step; read-only."""
    weight: float
    members: int
    step: int
    joined: int
    """Members for whom this is the first sum; their weights are 0."""
    is_counted: bool
    """Whether this member was at that step, and does not join."""
    first: int
    """The lowest slot of the members that neither join nor are behind, if there is one."""
    beside: float = 0.0
    """The mean of what was `beside` the vectors, by weight."""


@record
class GroupJoined(Event):
    generation: int
    number: int
    """Of the newest sum that counts."""
    result: Reduced | None
    """Of that one, if this member was not told it yet."""


@record
class GroupWaits(Event):
    """These ranks have not asked for the sum; about once a second."""

    generation: int
    ranks: tuple[int, ...]


@record
class GroupFailed(Event):
    """A member is gone, or has not come in time."""

    generation: int
    reason: str
    why: str = ""
    """See `GroupBroken`."""


@record
class RunEvaluation(Effect):
    """The task's `evaluate` with these values in the model; answered by `EvaluationRun`."""

    evaluation: int
    parameters: Array
    averaged: Array
    finish_with: Json | None = None
    """Metrics: it is the task's `finish` that runs, with these. What it raises is in the answer."""


@record
class LocateTask(Effect):
    """The task does not come back: write into the log where it is; answered by `TaskLocated`."""


@record
class TaskLocated(Event):
    place: str
    """The innermost line of the user's own, as in "/home/me/train.py:51"; "" if it is not known."""


@record
class EvaluationRun(Event):
    evaluation: int
    metrics: Json
    text: str = ""
    """What the task's `finish` has printed and returned."""
    error: str = ""
    """What it has raised."""


@record
class TaskFailed(Event):
    """The user's code raised. `error` is one line, `detail` the traceback in that code."""

    error: str
    detail: str


@record
class Settled(Effect):
    """Put on record that the pushes 0..count-1 of this epoch are settled on `shard`."""

    epoch: int
    shard: int
    count: int


# ---------------------------------------------------------------- who looks after whom


@record
class CoordinatorGone(Event):
    """To an agent: the coordinator's process has ended. To others: the agent's has, too."""


@record
class RestartCoordinator(Effect):
    """See to it that the run has a coordinator, unless it has ended in order: watch the one that is
    there, or start one. Two do no harm.
    """


# ---------------------------------------------------------------- processes (agents)


@record
class StartProcess(Effect):
    name: str
    role: str
    incarnation: int
    secret: str = ""
    """Its secret key, if the run's connections have keys."""


@record
class SignalProcess(Effect):
    """Signal a process that this agent started; a no-op if it has ended."""

    name: str
    incarnation: int
    signal: int


@record
class ProcessEnded(Event):
    name: str
    incarnation: int
    status: int
    """Exit code, or minus the signal that killed it."""
    last_lines: tuple[str, ...]
    cause: str = ""
    """Why the signal came, if that is known: "out of memory: limit 64 MiB". Of one that has exited,
    that it said nothing of it (`crash_loops.UNSAID`)."""
