"""The data plane: workers and servers, and vector operations on the shards."""

from __future__ import annotations

from typing import ClassVar

from dlctl.messages.base import Array, Message, Packed
from dlctl.util.record import record


@record
class Join(Message):
    """A worker's first word to a server, on every connection; nothing else is heard before it."""

    run_id: str
    slot: int
    epoch: int
    token: bytes


@record
class Joined(Message):
    shard: int
    generation: int
    version: int
    lo: int
    hi: int
    initialised: bool
    next_seq: int


@record
class JoinAgain(Message):
    """A server does not know the worker that spoke: its process or the connection is a new one."""

    shard: int
    generation: int


@record
class Initialise(Message):
    """The model's initial values of a shard. Only the first one counts. Answered by `Joined`.

    `values` float32[hi-lo]; for shard 0 also `averaged` float64, else empty.
    """

    slot: int
    epoch: int
    values: Array
    averaged: Array


@record
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
    """What the method counts: the step of a barrier, the number of a batch method's batch."""
    delta: Packed
    portion: int = 0
    """The portion of `clock` that this is the sum of, for methods that push portion by portion."""
    table: int = 0
    """Its number in the method's shape; `seq` counts the pushes to this table's shard."""
    is_part: bool = False
    """`delta` is of the elements [at, at + its length) of the shard's slice, not of all of it."""
    at: int = 0
    weight: float = 0.0
    """What it weighs, for methods that go by that."""


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
    """What became of a push. All outcomes but HELD, GAP and FENCED settle it for good.

    APPLIED: it is in the shard. BUFFERED: it is in the shard's committed state and comes into its
    values later. DUPLICATE: it already was. LATE: the method dropped it, as it
    should.
    REFUSED: it was poison (`reason`). HELD: it waits in a barrier. GAP: resend from `next_seq`.
    FENCED: a newer epoch owns this slot.
    """

    shard: int
    generation: int
    seq: int
    outcome: str
    version: int
    staleness: int
    next_seq: int
    reason: str = ""
    table: int = 0


@record
class Fetch(Message):
    """Send me your slice, once your clock is at least `clock_min` (barriers), at once if 0.

    Answered by `Parameters`, or by `SparseParameters` if the shard knows what it has changed since
    the version that this worker has.
    """

    slot: int
    epoch: int
    request: int
    clock_min: int
    have_generation: int = 0
    """0: nothing that could be brought up to date, send me all of it."""
    have_version: int = 0
    exact: bool = False
    """As float32, even where the job has the values rounded: to be evaluated, not trained with."""
    table: int = 0
    lo: int = 0
    hi: int = 0
    """Only the elements [lo, hi) of the slice; hi = 0: all of it."""
    after: int = 0
    """Not before so many pushes of this worker to the table's shard are settled: it reads its own
    writes, and need not wait for their acks before it asks."""
    average: bool = False
    """The moving average of the parameters in place of these; all of it."""


@record
class Parameters(Message):
    """A whole slice as of `version`: absolute values, so a repeat does no harm.

    A server gives a view of its shard: a large one is copied piece by piece while it is sent.
    """

    borrows: ClassVar[bool] = True
    shard: int
    generation: int
    request: int
    version: int
    values: Array
    """float32[hi-lo], or as many of 16 bits: float16, or bfloat16 as uint16."""
    remembered: bool = False
    """The shard remembers what it changes from here on: who keeps these values may fetch the
    changes alone."""
    table: int = 0
    clock: int = 0
    """What the method counts on this shard (`ShardSide.clock`)."""
    samples: int = 0
    """Of all replicas, in this version."""


@record
class SparseParameters(Message):
    """What has changed of a slice between version `since` of this generation and `version`.

    Absolute values, too; but they make the slice whole for nobody but who has just that version.
    """

    shard: int
    generation: int
    request: int
    version: int
    since: int
    values: Array
    """[n], of any type that `Parameters` may have. Of one version both have the same values."""
    positions: Array
    """uint8[...], where they belong, as `compress/indices.py` packs positions in the slice."""
    counts: tuple[int, ...]
    """The n values are in so many parts of these sizes, packed one after the other; a position may
    be in several of them, with the same value."""
    lengths: tuple[int, ...]
    """And the bytes of `positions` that each part takes."""
    table: int = 0
    clock: int = 0
    samples: int = 0


@record
class PushBuffers(Message):
    """A replica's averaged buffers after `samples` samples: absolute, the newest one counts."""

    slot: int
    epoch: int
    samples: int
    values: Array


@record
class FetchBuffers(Message):
    slot: int
    epoch: int
    request: int


@record
class Buffers(Message):
    """All replicas' buffers averaged by samples (float64)."""

    request: int
    averaged: Array


@record
class VectorOp(Message):
    """From the coordinator: operations on tables, which stay on the shards (`VectorRequest`).

    Idempotent by `number`: of a repeat only those changes are made that were not, and nothing of
    one that is older than the newest.
    """

    number: int
    ops: tuple[str, ...]
    """Changes, and behind them sums; x, y and a of each are in the next fields."""
    x: tuple[str, ...]
    y: tuple[str, ...]
    a: tuple[float, ...]


@record
class VectorResult(Message):
    """This shard's parts of the sums; none of an operation that is older than the newest."""

    number: int
    shard: int
    newest: int
    """The number of the newest operation that has changed anything here."""
    sums: tuple[float, ...]


# ---------------------------------------------------------------- from worker to worker


@record
class Ask(Message):
    """One replica asks another. Repeated with the same `request` until `Answer`, or until whoever
    asks has given up; the answer to a repeat is the one that there was.
    """

    slot: int
    epoch: int
    """Of whoever asks."""
    to_epoch: int
    """Of whom it asks: another process of that slot does not answer."""
    request: int
    op: str
    payload: Packed
    """Its arrays as they are; `kind` is "raw"."""


@record
class Answer(Message):
    slot: int
    epoch: int
    """Of whoever answers."""
    request: int
    error: str
    """Why there is no answer; "": `payload` is it. GONE: the slot has another process now."""
    payload: Packed


# ---------------------------------------------------------------- rows


@record
class FetchRows(Message):
    """Send me these rows of a table of rows. Answered by `Parameters` with their values, float32[n]
    one after the other; otherwise as `Fetch`.
    """

    have_generation: ClassVar[int] = 0
    exact: ClassVar[bool] = True
    slot: int
    epoch: int
    request: int
    clock_min: int
    table: int
    rows: Array
    """int32[k] or int64[k], ascending, from the first row of the shard on."""
    after: int = 0
