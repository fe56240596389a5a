"""Every message of a run, one frozen dataclass each.

The control plane runs between the coordinator and everybody else; the data plane between workers
and servers. Field types are the schema: `wire.py` reads them, checks each value on the way in, and
sends arrays as raw frames of their own behind the header. Vectors are 1-d; units stand last in
names.

Identity: a worker is (slot, epoch), a shard is (shard, generation). The coordinator issues epochs
and generations, never twice. `token` proves to a server that the coordinator issued the epoch. A
push is (slot, epoch, shard, seq) with seq dense from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Json = dict[str, Any]
"""Plain data: None, bool, int, float, str, lists and dicts of them, a few levels deep."""
Signed = Annotated[int, "may be negative"]
"""A plain int on the wire is a count, an index or a number: never negative."""


class Message:
    """Base of all messages. Its repr shows arrays as dtype and length, never their content."""

    __slots__ = ()
    code: ClassVar[int]

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({shown})"


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{value.size}]"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True, repr=False)
class Packed(Message):
    """A compressed vector of `length` elements; `kind` names the compressor that expands it."""

    kind: str
    length: int
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


# ------------------------------------------------------------ control plane: joining and leaving


@dataclass(frozen=True, slots=True, repr=False)
class Register(Message):
    """A daemon is there. Repeated until `Welcome` comes, so it must be idempotent."""

    run_id: str
    role: str
    name: str
    incarnation: int
    pid: int
    host: str
    version: str


@dataclass(frozen=True, slots=True, repr=False)
class Welcome(Message):
    """To a worker: its slot and epoch. To a server: its shard and generation. Settings to begin
    with.
    """

    name: str
    index: int
    term: int
    """Epoch of the slot, or generation of the shard."""
    token: bytes
    settings: Json


@dataclass(frozen=True, slots=True, repr=False)
class Dismiss(Message):
    """You are not part of this run (any more): exit."""

    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class ModelReady(Message):
    """A worker has built the task's model and dataset."""

    name: str
    layout: bytes
    samples: int


@dataclass(frozen=True, slots=True, repr=False)
class Assign(Message):
    """To a server: own the elements [lo, hi) of the flat vector; `restore` names a checkpoint
    directory or is "".
    """

    lo: int
    hi: int
    layout: bytes
    restore: str


@dataclass(frozen=True, slots=True, repr=False)
class Serving(Message):
    """Answer to `Assign`: the server owns its shard and listens at `address`."""

    name: str
    address: str
    initialised: bool


@dataclass(frozen=True, slots=True, repr=False)
class Topology(Message):
    """To a worker: all servers in shard order. One worker is told to initialise empty shards."""

    addresses: tuple[str, ...]
    initialise: bool
    restore: str


@dataclass(frozen=True, slots=True, repr=False)
class Members(Message):
    """To a server: the slots that take part now. Barriers count these."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Report(Message):
    """About once a second, and whenever the phase changes; also a daemon's sign of life."""

    name: str
    incarnation: int
    phase: str
    waiting_for: str
    """Names of the daemons it waits for, or ""."""
    metrics: Json


@dataclass(frozen=True, slots=True, repr=False)
class Heard(Message):
    """To an agent, for each report: the coordinator is there."""


@dataclass(frozen=True, slots=True, repr=False)
class Failed(Message):
    """The user's code, or this daemon, cannot go on. `detail` is the traceback."""

    name: str
    error: str
    detail: str
    fatal: bool
    """True: a restart would end the same way."""


# ------------------------------------------------------------ control plane: data


@dataclass(frozen=True, slots=True, repr=False)
class LeaseRequest(Message):
    """Give me a portion. Repeated with the same `request` until an answer comes."""

    slot: int
    epoch: int
    request: int


@dataclass(frozen=True, slots=True, repr=False)
class Lease(Message):
    """Samples [start, stop) in the shuffled order of `data_epoch`. start == stop: none now, ask
    later.
    """

    request: int
    portion: int
    data_epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, repr=False)
class PortionDone(Message):
    """All gradients of a portion are in acknowledged pushes. `loss_sum` is over its samples."""

    slot: int
    epoch: int
    data_epoch: int
    portion: int
    steps: int
    samples: int
    loss_sum: float


@dataclass(frozen=True, slots=True, repr=False)
class PortionNoted(Message):
    """The coordinator has recorded that a portion is done."""

    data_epoch: int
    portion: int


# ------------------------------------------------------------ control plane: changes and ends


@dataclass(frozen=True, slots=True, repr=False)
class Change(Message):
    """Put these settings in force. Repeated until `Changed`; applying twice does no harm."""

    change: int
    settings: Json


@dataclass(frozen=True, slots=True, repr=False)
class Changed(Message):
    change: int
    name: str
    before: Json
    after: Json


@dataclass(frozen=True, slots=True, repr=False)
class Save(Message):
    """Write your state into the checkpoint directory. Repeated until `Saved`."""

    checkpoint: int
    directory: str


@dataclass(frozen=True, slots=True, repr=False)
class Saved(Message):
    """`file` is relative to the checkpoint directory; `state` goes into the manifest."""

    checkpoint: int
    name: str
    file: str
    sha256: str
    nbytes: int
    state: Json
    error: str


@dataclass(frozen=True, slots=True, repr=False)
class Evaluate(Message):
    """To a worker: fetch the servers' parameters and run the task's `evaluate` on them."""

    evaluation: int


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated(Message):
    evaluation: int
    name: str
    metrics: Json
    error: str


@dataclass(frozen=True, slots=True, repr=False)
class Drain(Message):
    """To a worker: finish the step, push what is accrued, wait for the acks, then say `Drained`."""

    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Drained(Message):
    name: str


@dataclass(frozen=True, slots=True, repr=False)
class Shutdown(Message):
    """Exit now, in order. The last message a daemon gets."""

    reason: str


# ------------------------------------------------------------ control plane: processes of a host


@dataclass(frozen=True, slots=True, repr=False)
class Spawn(Message):
    """To an agent: run this incarnation of a daemon. Repeated until it reports; idempotent."""

    name: str
    role: str
    incarnation: int


@dataclass(frozen=True, slots=True, repr=False)
class Spawned(Message):
    """From an agent: the incarnation has this pid. Answers `Spawn`."""

    name: str
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True, repr=False)
class Kill(Message):
    """To an agent: end this incarnation; `signal` is 15 or 9."""

    name: str
    incarnation: int
    signal: int


@dataclass(frozen=True, slots=True, repr=False)
class ProcessExited(Message):
    """From an agent, until noted. `status` is negative for a process that a signal killed."""

    name: str
    incarnation: int
    status: Signed
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ExitNoted(Message):
    name: str
    incarnation: int


# ------------------------------------------------------------ control plane: the command line


@dataclass(frozen=True, slots=True, repr=False)
class Request(Message):
    """From a client: `verb` with its arguments. `request` is the client's own random number."""

    request: int
    verb: str
    arguments: Json


@dataclass(frozen=True, slots=True, repr=False)
class Reply(Message):
    """`done` is False while the work goes on: `result` then says how far it is."""

    request: int
    done: bool
    error: str
    result: Json


# ------------------------------------------------------------ data plane


@dataclass(frozen=True, slots=True, repr=False)
class Join(Message):
    """A worker's first word to a server, and its way to learn the generation after a break."""

    run_id: str
    slot: int
    epoch: int
    token: bytes


@dataclass(frozen=True, slots=True, repr=False)
class Joined(Message):
    shard: int
    generation: int
    version: int
    lo: int
    hi: int
    initialised: bool
    next_seq: int


@dataclass(frozen=True, slots=True, repr=False)
class Initialise(Message):
    """The model's initial values of a shard. Only the first one counts. Answered by `Joined`.

    `values` float32[hi-lo]; for shard 0 also `averaged` float64 and `constant` float32, else empty.
    """

    slot: int
    epoch: int
    values: Array
    averaged: Array
    constant: Array


@dataclass(frozen=True, slots=True, repr=False)
class Push(Message):
    """A delta for one shard: the steps first_step..last_step of one worker, `samples` samples in
    all.
    """

    slot: int
    epoch: int
    generation: int
    seq: int
    base_version: int
    first_step: int
    last_step: int
    samples: int
    clock: int
    """What the method counts: the step of a barrier, the iteration of a batch method."""
    delta: Packed


APPLIED = "applied"
DUPLICATE = "duplicate"
HELD = "held"
LATE = "late"
REFUSED = "refused"
GAP = "gap"
FENCED = "fenced"
GENERATION = "generation"


@dataclass(frozen=True, slots=True, repr=False)
class Ack(Message):
    """What became of a push. All outcomes but HELD, GAP, FENCED and GENERATION settle it for good.

    APPLIED: it is in the shard. DUPLICATE: it already was. LATE: the method dropped it, as it
    should.
    REFUSED: it was poison (`reason`). HELD: it waits in a barrier. GAP: resend from `next_seq`.
    FENCED: a newer epoch owns this slot. GENERATION: join again, the shard has restarted.
    """

    shard: int
    generation: int
    seq: int
    outcome: str
    version: int
    staleness: int
    next_seq: int
    reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Fetch(Message):
    """Send me your slice, once your clock is at least `clock_min` (barriers), at once if 0."""

    slot: int
    epoch: int
    request: int
    clock_min: int


@dataclass(frozen=True, slots=True, repr=False)
class Parameters(Message):
    """A whole slice, float32[hi-lo], as of `version`: absolute values, so a repeat does no harm."""

    shard: int
    generation: int
    request: int
    version: int
    values: Array


@dataclass(frozen=True, slots=True, repr=False)
class PushBuffers(Message):
    """A replica's averaged buffers after `samples` samples: absolute, the newest one counts."""

    slot: int
    epoch: int
    samples: int
    values: Array


@dataclass(frozen=True, slots=True, repr=False)
class FetchBuffers(Message):
    slot: int
    epoch: int
    request: int


@dataclass(frozen=True, slots=True, repr=False)
class Buffers(Message):
    """All replicas' buffers averaged by samples (float64), and the constants (float32)."""

    request: int
    averaged: Array
    constant: Array


@dataclass(frozen=True, slots=True, repr=False)
class VectorOp(Message):
    """From the coordinator: one operation on named vectors that stay on the shards.

    Idempotent by `number`: a server answers a repeat with the result it gave.
    """

    number: int
    op: str
    a: float
    x: str
    y: str


@dataclass(frozen=True, slots=True, repr=False)
class VectorResult(Message):
    """`partial` is this shard's part of a dot product (float64), 0.0 for other operations."""

    number: int
    shard: int
    partial: float


def _all() -> dict[int, type[Message]]:
    """Wire codes are the order in this file; appending keeps them, `wire.PROTOCOL` says if not."""
    kinds = [k for k in globals().values() if isinstance(k, type) and issubclass(k, Message)]
    numbered = dict(enumerate(k for k in kinds if k not in (Message, Packed)))
    for code, kind in numbered.items():
        kind.code = code
    return numbered


MESSAGES: dict[int, type[Message]] = _all()
