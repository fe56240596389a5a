"""The data plane: workers and servers, and vector operations on the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from dlctl import outdated
from dlctl.util.record import record
from dlctl.wire.messages.base import Array, Message, Packed, Samples, Sum, Weight


@record
class Join(Message):
    """A worker's first message to a server, on every connection; others are ignored before it."""

    run_id: str
    slot: int
    term: int
    token: bytes


@record
class Joined(Message):
    shard: int
    term: int
    version: int
    lo: int
    hi: int
    initialised: bool
    next_seq: int
    cut: int = 0
    """The number of the cut that has these bounds."""


@record
class JoinAgain(Message):
    """A server does not know the sender of a message: its process or the connection is new."""

    shard: int
    term: int


@record
class Initialise(Message):
    """The model's initial values of a shard. Only the first message counts. Answered by `Joined`.

    `values` float32[hi-lo]; for shard 0 also `averaged` float64, else empty.
    """

    slot: int
    term: int
    values: Array
    averaged: Array


NO_BUFFERS = Packed("", 0, ())
"""Of a push without any."""


@record
class Push(Message):
    """A delta for one shard: the steps first_step..last_step of one worker, `samples` samples in
    all.
    """

    slot: int
    term: int
    shard_term: int
    """The term of the shard's process to which it is sent."""
    seq: int
    base_version: int
    first_step: int
    last_step: int
    samples: Samples
    clock: int
    """The method's clock: the step of a barrier, the number of a batch method's batch."""
    delta: Packed
    portion: int = 0
    """The portion of `clock` that is summed here, for methods that push portion by portion."""
    table: int = 0
    """The number of the table in the method's shape; `seq` counts the pushes to this table's shard.
    """
    is_part: bool = False
    """`delta` is of the elements [at, at + its length) of the shard's slice, not of all of it."""
    at: int = 0
    weight: Weight = 0.0
    """The weight of the push, for methods that use weights."""
    buffers: Packed = NO_BUFFERS
    """float64[n] to shard 0, where replicas hand on the model's buffers: those after these steps.
    They are the run's if the push is applied."""

    def outcome(self, kind: str, staleness: int = 0, reason: str = "") -> PushOutcome:
        return PushOutcome(self.slot, self.term, self.seq, kind, staleness, reason)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise outdated.member(self, name)


class PushOutcome(NamedTuple):
    """What has become of one push; `kind` is one of APPLIED, HELD, BUFFERED, LATE, REFUSED."""

    slot: int
    term: int
    seq: int
    kind: str
    staleness: int = 0
    """Updates of this shard between the version that the gradient was computed at and this one."""
    reason: str = ""
    """Why the push was refused."""


APPLIED = "applied"
DUPLICATE = "duplicate"
HELD = "held"
LATE = "late"
REFUSED = "refused"
GAP = "gap"
FENCED = "fenced"
BUFFERED = "buffered"


@record
class Ack(Message):
    """The outcome of a push. All outcomes but HELD, GAP and FENCED settle it for good.

    APPLIED: it is in the shard. BUFFERED: it is in the shard's committed state and will be applied
    to its values later. DUPLICATE: it was applied before. LATE: the method dropped it, as intended.
    REFUSED: it was poison (`reason`). HELD: it waits in a barrier. GAP: resend from `next_seq`.
    FENCED: a newer term owns this slot.
    """

    shard: int
    term: int
    seq: int
    outcome: str
    version: int
    staleness: int
    next_seq: int
    reason: str = ""
    table: int = 0


@record
class Fetch(Message):
    """Request a server's slice, once its clock is at least `clock_min` (barriers), at once if 0.

    Answered by `Parameters`, or by `SparseParameters` if the shard knows its changes since the
    version that this worker has.
    """

    slot: int
    term: int
    request: int
    clock_min: int
    have_term: int = 0
    """0: the worker has nothing to update, send the whole slice."""
    have_version: int = 0
    exact: bool = False
    """Request float32, even if the job rounds values: for evaluation, not for training."""
    table: int = 0
    lo: int = 0
    hi: int = 0
    """The fetch is for the elements [lo, hi) of the slice; hi = 0: all of it."""
    after: int = 0
    """Answer only once so many pushes of this worker to the table's shard are settled: it reads its
    own writes without waiting for their acks before the request."""
    average: bool = False
    """Request the moving average instead of the parameters; all of it."""


@record
class Parameters(Message):
    """A whole slice at `version`: absolute values, so it is idempotent.

    A server passes a view of its shard: a large one is copied piece by piece while it is sent.
    """

    borrows: ClassVar[bool] = True
    shard: int
    term: int
    request: int
    version: int
    values: Array
    """float32[hi-lo], or as many of 16 bits: float16, or bfloat16 as uint16."""
    remembered: bool = False
    """The shard tracks its changes from here on: a worker with these values may fetch only the
    changes."""
    table: int = 0
    clock: int = 0
    """The method's clock on this shard (`ShardSide.clock`)."""
    samples: int = 0
    """Samples of all replicas in this version."""


@record
class SparseParameters(Message):
    """The changes of a slice between version `since` of this term and `version`.

    Absolute values, too; but they only complete a slice of exactly version `since`.
    """

    shard: int
    term: int
    request: int
    version: int
    since: int
    values: Array
    """[n], of any type that `Parameters` may have. For one version both have the same values."""
    positions: Array
    """uint8[...], the positions of the values in the slice, packed as by `compress/indices.py`."""
    counts: tuple[int, ...]
    """The sizes of the parts of the n values, which are packed separately; a position may be in
    several parts, with the same value."""
    lengths: tuple[int, ...]
    """The bytes of `positions` that each part takes."""
    table: int = 0
    clock: int = 0
    samples: int = 0


@record
class PushBuffers(Message):
    """A replica's averaged buffers after `samples` samples: absolute, the newest message counts."""

    slot: int
    term: int
    samples: int
    values: Array


@record
class FetchBuffers(Message):
    slot: int
    term: int
    request: int


@record
class Buffers(Message):
    """All replicas' buffers averaged by samples (float64)."""

    request: int
    averaged: Array


@record
class VectorOp(Message):
    """From the coordinator: operations on tables, which stay on the shards (`VectorRequest`).

    Idempotent by `number`: a repeat only makes the missing changes, and a message older than the
    newest makes none.
    """

    number: int
    ops: tuple[str, ...]
    """Changes, followed by sums; x, y and a of each are in the next fields."""
    x: tuple[str, ...]
    y: tuple[str, ...]
    a: tuple[Sum, ...]


@record
class VectorResult(Message):
    """This shard's parts of the sums; none for an operation that is older than the newest."""

    number: int
    shard: int
    newest: int
    """The number of the newest operation that has changed this shard."""
    sums: tuple[Sum, ...]


# ---------------------------------------------------------------- from worker to worker


@record
class PeerRequest(Message):
    """A request of one replica to another. Repeated with the same `request` until `PeerReply`, or
    the
    sender gives up; a repeat gets the same answer.
    """

    slot: int
    term: int
    """The sender's term."""
    to_term: int
    """The receiver's term: another process of that slot does not answer."""
    request: int
    op: str
    payload: Packed
    """The arrays of the request, uncompressed; `kind` is "raw"."""


@record
class PeerReply(Message):
    slot: int
    term: int
    """The term of the replica that answers."""
    request: int
    error: str
    """Why there is no answer; "": it is in `payload`. GONE: the slot has another process now."""
    payload: Packed


# ---------------------------------------------------------------- rows


@record
class FetchRows(Message):
    """Request rows of a table of rows. Answered by `Parameters` with their concatenated values,
    float32[n]; otherwise as `Fetch`.
    """

    have_term: ClassVar[int] = 0
    exact: ClassVar[bool] = True
    slot: int
    term: int
    request: int
    clock_min: int
    table: int
    rows: Array
    """int32[k] or int64[k], ascending, from the first row of the shard on."""
    after: int = 0
