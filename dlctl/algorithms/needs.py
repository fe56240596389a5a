"""What a replica may ask for. A method yields one of these and is resumed with its result.

The worker role has one service for each (`dlctl/roles/worker/services/`), which knows about leases,
retries, windows, limits, terms and deadlines, so that a method does not:

    NextData      wait until there is a batch         Read        fetch a table, or ranges of it
    NextRows      the same, and the rows it names     Write       push to a table
    Gradient      compute one batch, or several
                                                      Settle      wait for the outcome of a push
    OwnStep       a step of the replica's own         Ask         send a request to a replica
                  optimiser, along any gradient       Collective  a sum over all replicas
    OwnState      the state of that optimiser
    Engine        an operation of the method's own
                  torch part
    Done          count samples without a push

Vectors are flat: numpy arrays, or torch tensors on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dlctl import outdated
from dlctl.model.vector import Vector
from dlctl.util.record import Record, named_record, record
from dlctl.wire.messages import Array

PARAMETERS = "w"
"""The name of the table that holds the model."""
Range = tuple[int, int]
"""Elements [lo, hi) of a table."""
Extent = tuple[int, ...]
"""The shape of an array."""


class Need(Record):
    """Something that a replica waits for."""

    __slots__ = ()


# ---------------------------------------------------------------- data and gradients


@record
class NextData(Need):
    """Wait until there is a batch to compute. Resumed with its `NextBatch`, or None: no data for
    now.

    On None nothing may stay behind unpushed, because this may be the end of the run.
    """


class NextBatch(NamedTuple):
    """The next batch to compute."""

    data_epoch: int
    """The pass over the data; for methods that the coordinator drives, the number of the batch."""
    portion: int
    is_last: bool
    """This is the last batch of its portion."""
    number: int = 0
    """Of the batch in its portion."""


@record
class NextRows(NextData):
    """The next data, as one or several batches. Resumed with the `Named` rows that they need of the
    task's tables of rows, or None: no data for now. `Gradient` has to compute these batches.
    """

    steps: int = 1
    """Up to so many batches of one portion."""


class Named(NamedTuple):
    """The rows that the next batches name."""

    rows: Array
    """int64[n], ascending, each once, numbered as in `dlctl/shards/rows.py`."""
    steps: int
    """Batches."""


class Pull(NamedTuple):
    """A term of the gradient: strength * (parameters - toward)."""

    strength: float
    toward: Vector
    """float32[d]; it must not change before the gradient is computed."""


@record
class Gradient(Need):
    """Lease data if needed and compute. Resumed with a `Step`, or None: no data for now.

    On None nothing may stay behind unpushed, because this may be the end of the run. Batches whose
    gradient is discarded, not finite or too large, are left out, and the next one is computed
    instead; but right after `NextData` it is the announced batch or, if that one is discarded,
    None. See `rounds.Discards`. An announced batch that is nothing (it is skipped, or none of its
    samples can be read) is replaced by the next one, unless that is of another portion or its last.
    """

    step: bool = False
    """The replica's own optimiser (`inner`) makes a step along it at once. This, and a call of
    `ReplicaSide.arrival`, may happen before `run` is resumed."""
    gather: bool = True
    """False: the `Step` has no gradient; to gather it into one vector takes time."""
    pull: Pull | None = None
    """A pull that is added to the gradient of an own step."""
    fresh: bool = False
    """The replica's optimiser resets its state before this step."""
    steps: int = 1
    """Up to so many batches of one portion at once, each with its own step, and no gradient:
    `step` and not `gather`. `Step` has their samples and their mean loss."""
    rows: Array | None = None
    """Right after `NextRows`: the concatenated values of the rows that it has named, float32[n].
    With `step`: each batch makes a step of plain SGD on them, along the gradient of the sum over
    its samples, or the task's own step."""
    more: int = 0
    """With `step` and not `gather`: so many further such gradients follow, as long as there is
    data and they are usable, and the method does not look at the parameters in between. A training
    loop of the user's own is not interrupted for these."""
    stale_after: int = 0
    """The gradient is of no use once the clock of every shard is this much ahead of the model that
    was read: the computation stops between the batches that it accumulates, if it can, and this is
    resumed with None. The next gradient is of the same batch. 0: it is of use for ever. Not with
    `step`, which is not undone, and only for methods with servers."""
    sums: bool = False
    """The next `Collective` sums this gradient, unchanged and with its samples as the weight: the
    sum may begin during the computation."""

    def __post_init__(self) -> None:
        """Raises TypeError for a gradient that could be stopped between two of its own steps."""
        if self.step and self.stale_after:
            raise TypeError(
                "Gradient(step=True) takes no stale_after: what it has stepped is not undone when "
                "it is stopped. Yield Gradient(stale_after=...), then OwnStep"
            )


class Step(NamedTuple):
    """One gradient of the mean loss over `samples` samples, at the parameters before the step.

    Its memory may be written to; it is valid until the next `Gradient`.
    """

    gradient: Vector | None
    """The gradient; None: `Gradient.gather` was not set."""
    samples: int
    loss: float
    norm: float = math.inf
    """Euclidean, of the gradient; infinite if it is not known."""
    steps: int = 1
    """Batches."""
    rows: Array | None = None
    """float32[n]: how `Gradient.rows` have changed."""


@record
class OwnStep(Need):
    """The replica's own optimiser makes a step along a gradient that was computed before, possibly
    by all replicas, with this rate (`ReplicaSide.own_rate`). Resumed with None. With
    `gradient.clip = "global"` this gradient is clipped.
    """

    gradient: Array
    """float32[d], finite; it must not change before the step is made."""
    rate: float
    wait: bool = True
    """False: resumed at once. The step is made before any later need is served."""


@record
class OwnState(Need):
    """The state of the replica's own optimiser as one vector: float32[n], in an order that is the
    same in all replicas. Resumed with it.
    """

    take: Array | None = None
    """Replaces the state: a vector that another replica was resumed with."""


@named_record
class Engine(Need):
    """An operation of the method's engine (`engines.py`), where the model is. Resumed with its
    arrays. The engine may write to the parameters: nothing else does so meanwhile. An exception of
    the engine fails the run, as an error of the method.
    """

    op: str
    arrays: tuple[Array, ...] = ()
    """Arguments of the operation. They must not change before it is resumed."""
    shapes: tuple[Extent, ...] | None = None
    """The shapes of the result; others fail the run, too. None: any."""


@record
class Done(Need):
    """All steps so far except the newest `but` count as done now, although no push holds them. For
    methods that write nothing, or not all, to servers, or parts in their own order. Resumed at
    once, with None.

    Only for steps that are in the state of a process that survives this replica: steps that are
    done are never recomputed.
    """

    but: int = 0
    """The number of newest steps that are not done."""


# ---------------------------------------------------------------- tables on the servers


@named_record
class Read(Need):
    """Fetch a table from all shards, each answered once its clock is at least `at_least`.

    wait: resumed with the `View` when the values are in place. Otherwise resumed at once with None;
    after arrival the values are put in place between two steps, and `ReplicaSide.view` is updated.
    The first read into the model is always waited for, because without parameters there is nothing
    to compute with.

    Reads into the model are sequential. Reads that are requested while one is in flight are fetched
    after it, merged into one that satisfies all of them.
    """

    wait: bool
    at_least: int = 0
    after_own: bool = False
    """Read your own writes: every earlier push of this replica to this table is settled. The
    request is sent right behind them, so that `Write` and such a `Read` take one round trip."""
    table: str = PARAMETERS
    ranges: tuple[Range, ...] = ()
    """The elements of the table to fetch, as half-open ranges; (): all of them."""
    rows: Array | None = None
    """Rows of the tables of rows, instead of ranges: int64[n], ascending, each once, at least one.
    They are read beside."""
    into: Literal["model", "beside"] = "model"
    """model: into `parameters`. beside: into `View.values`, the model does not change. All tables
    but the parameters are read beside. Without `wait` this is a prefetch: the next such `Read` must
    be the same with `wait`, and gets its result."""


class View(NamedTuple):
    """The result of a read. Shards are independent of each other, so their clocks may differ."""

    clock_min: int
    clock_max: int
    values: Array | None = None
    """float32, the concatenated ranges; None if they were written into the model."""


@named_record
class Write(Need):
    """Push part of `vector` to a table: the compressor removes from it what it sends, the residual
    stays in it. Pushes to tables other than the parameters are not compressed, and `vector` does
    not change.

    Resumed with None as soon as the push is in flight; it waits only while the window is full.
    wait: resumed with a `Receipt` when all shards have settled it. tells: resumed with what was
    sent, float32[d].
    """

    vector: Vector | None
    """None: an empty push, only to take part in a step."""
    samples: int = 0
    clock: int = 0
    part: int = 0
    """The index of this part of `clock`, for a table of rule "parts"."""
    table: str = PARAMETERS
    ranges: tuple[Range, ...] = ()
    """`vector` holds these elements of the table, concatenated; (): all of it."""
    rows: Array | None = None
    """Rows of the tables of rows, instead of ranges, as in `Read`."""
    to_all: bool = False
    """Shards that own nothing of `ranges` get an empty part, so that all clocks advance."""
    of: int = 1
    """With `ranges`: the number of successive writes that together hold all of a step. Steps are
    done when so many later writes are settled. 1: when `Done` says so."""
    weight: float = 0.0
    """The weight of the push, for shard sides that use weights."""
    holds_steps: bool = True
    """False: the write holds no step, and steps that are only in a part of it count as in none."""
    density_min: float = 0.0
    """A compressor that has a `density` sends at least this fraction of the entries."""
    given: bool = False
    """The replica does not use `vector` any more, so it is sent without a copy. Only where pushes
    leave no residual (`Site.pushes_all`)."""
    wait: bool = False
    tells: bool = False


@record
class Settle(Need):
    """Wait until all shards have settled the newest `Write`. Resumed with its `Receipt`; before any
    write, with an empty one.
    """


class Receipt(NamedTuple):
    """The outcome of a push per shard; only shards that got a part of it."""

    outcomes: dict[int, str]
    """Shard -> APPLIED, BUFFERED, LATE, REFUSED or DUPLICATE."""

    def is_applied(self) -> bool:
        """Whether all of the write is in the table."""
        return all(kind in ("applied", "duplicate") for kind in self.outcomes.values())


def mean(table: str, clock: int, vector: Vector, samples: int) -> Generator[Need, Any, Array]:
    """The mean of a vector over all replicas, weighted by samples, by a table of rule "mean".

    Every member writes once per clock, in the order 0, 1, 2 ...; float32[size of the table]. It is
    durable: a replica that joins later reads the newest one.
    """
    yield Write(table=table, vector=vector, samples=samples, clock=clock)
    view: View = yield Read(table=table, wait=True, at_least=clock + 1, into="beside")
    assert view.values is not None
    return view.values


# ---------------------------------------------------------------- other replicas


@named_record
class Ask(Need):
    """Send a request to another replica (`ReplicaSide.serve`). Resumed with its arrays; None if it
    has left, was replaced, or has not answered in time. Requests to one replica are sequential.
    """

    slot: int
    op: str
    arrays: tuple[Array, ...] = ()
    within_s: float = 5.0
    """math.inf: for as long as the other replica is alive."""
    then: Callable[[tuple[Array, ...] | None], None] | None = None
    """Resumed at once with None; this is called with the answer between two steps, and may change
    the parameters."""


@named_record
class Collective(Need):
    """The sum of a vector over all replicas of the group, by torch.distributed. Every member makes
    the same collectives in the same order. Resumed with `Summed`, which is bit-identical for all
    members; by then every living member has it.

    If a member dies before that, the group re-forms without it and restarts the sum, of the
    survivors' vectors. There is no timeout for a living member, however long it computes. A replica
    is in the group from its first need on, which may be this one. A replica that joins later
    contributes nothing to its first collective, whatever it gives; neither does one that resumes
    from a checkpoint at an older step than the others. If all members that had the model have died,
    the run fails.
    """

    vector: Vector
    """float32[d]; it is not changed."""
    weight: float = 1.0
    """The weight of this replica's vector in the sum; 0: it contributes nothing."""
    step: int = 0
    """The step that is summed: all members must be at the same one; a joining member adopts it."""
    hands_on: bool = False
    """The member transfers the state of the group to members that have joined (`passed_on`)."""
    beside: float = 0.0
    """A number that is averaged along with it, in float64 whatever the `dtype`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """What is summed and sent. With a 16-bit type the mean is formed instead, so that the sum of
    many vectors is no larger than each: weight / sum of the weights * vector."""
    given: bool = False
    """`vector` is not written to before this need is resumed, so it is summed without a copy."""


class Summed(NamedTuple):
    vector: Vector
    """float32[d], the sum of weight * vector. Read-only: the service refers to it, too."""
    weight: float
    """The sum of the weights, of living members only."""
    members: int
    step: int
    """The step of the group; for a member that has just joined it differs from its own. What a
    member gives at another step counts with weight 0."""
    is_counted: bool
    """Whether this member's vector is in the sum."""
    joined: int
    """Members for which this is the first collective: they have contributed nothing, and do not
    have the state of the group. All members see the number in the same collective, and transfer the
    state with `passed_on`. 0 in a new group, whose members have all begun alike."""
    current: tuple[int, ...]
    """The slots of the members that have the state of the group, ascending; at least one."""
    beside: float = 0.0
    """The weighted mean of `Collective.beside`."""

    @property
    def first(self) -> int:
        """The lowest slot of the members that have the state of the group."""
        return self.current[0]


def passed_on(
    vector: Vector, slot: int, step: int, summed: Summed
) -> Generator[Need, Any, tuple[Vector, int]]:
    """Transfer the state of the group to the members that have joined in `summed`. All members call
    it, after they have processed `summed`; those that have joined skip that.

    vector: float32[d], the same in all older members. Returns it, bit-exactly, and the group's
    step. Meanwhile more members may join, and the sender may die.
    """
    newest, came = summed, False
    while newest.joined or not came:
        weight = float(slot == newest.first)
        newest = yield Collective(vector=vector, weight=weight, step=step, hands_on=True)
        if newest.weight:
            vector, came = newest.vector, True
    return vector, newest.step


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
