"""What a replica may ask for. A method yields one of these and is resumed with its result.

The worker role has one service for each (`dlctl/roles/worker/services/`), which knows about leases,
retries, windows, limits, epochs and deadlines, so that a method does not:

    NextData      wait until there is a batch         Read        fetch a table, or ranges of it
    NextRows      the same, and the rows it names     Write       push to a table
    Gradient      compute one batch, or several
                                                      Settle      learn what became of a push
    OwnStep       a step of the replica's own         Ask         another replica, and wait
                  optimiser, along any gradient       Collective  a sum over all replicas
    OwnState      what that optimiser keeps
    Engine        an operation of the method's own
                  torch part
    Done          count samples without a push

Vectors are flat: numpy arrays, or torch tensors on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Literal, NamedTuple

from dlctl.messages import Array
from dlctl.util.record import Record, named_record, record
from dlctl.vector import Vector

PARAMETERS = "w"
"""The name of the table that holds the model."""
LEFT_OUT_MAX = 10
"""So many discarded gradients in a row: by then it is hardly the data, of which a tenth
may be NaN, but the replica, which its own steps have ruined. It goes on from what the servers have,
if `workers.nonfinite_steps_max` is larger: else it is quarantined before.
"""
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
    """Wait until there is a batch to compute. Resumed with its `Data`, or None: no data for now.

    On None nothing may stay behind unpushed, because this may be the end of the run.
    """


class Data(NamedTuple):
    """The batch that is computed next."""

    data_epoch: int
    """For methods that the coordinator drives, the number of the batch."""
    portion: int
    is_last: bool
    """Of its portion."""


@record
class NextRows(NextData):
    """The same, of several batches perhaps. Resumed with the `Named` that they need of the task's
    tables of rows, or None: no data for now. `Gradient` has to compute just these.
    """

    steps: int = 1
    """Up to so many batches of one portion."""


class Named(NamedTuple):
    """The rows that the next batches name."""

    rows: Array
    """int64[n], ascending, each once, numbered as in `dlctl/rows.py`."""
    steps: int
    """Batches."""


class Pull(NamedTuple):
    """strength * (parameters - toward)."""

    strength: float
    toward: Vector
    """float32[d]; it must not change before the gradient has come."""


@record
class Gradient(Need):
    """Lease data if needed and compute. Resumed with a `Step`, or None: no data for now.

    On None nothing may stay behind unpushed, because this may be the end of the run. Batches whose
    gradient is discarded, not finite or too large, are left out, and the next one is computed
    instead; but right after `NextData` it is the announced batch or, if that one is discarded,
    None. See `LEFT_OUT_MAX`.
    """

    step: bool = False
    """The replica's own optimiser (`inner`) makes a step along it at once. It may be made, and
    `placing` be called, before `run` hears of it."""
    gather: bool = True
    """False: the `Step` has no gradient; to gather it into one vector takes time."""
    pull: Pull | None = None
    """Added to the gradient of an own step."""
    fresh: bool = False
    """The replica's optimiser forgets what it keeps before this step, as a new one has begun."""
    steps: int = 1
    """Up to so many batches of one portion in one go, each with a step of its own, and no gradient:
    `step` and not `gather`. `Step` has their samples and their mean loss."""
    rows: Array | None = None
    """Right after `NextRows`: the values of the rows that it has named, one after the other,
    float32[n]. With `step`: each batch makes a step of plain SGD on them, along the gradient of the
    sum over its samples, or the task's own one."""
    sums: bool = False
    """The next `Collective` is of this gradient, as it is and with its samples as the weight: the
    sum may begin while it is computed."""


class Step(NamedTuple):
    """One gradient of the mean loss over `samples` samples, at the parameters as they were.

    Its memory may be written to; it is good until the next one is asked for.
    """

    gradient: Vector | None
    """None: it was not asked for (`Gradient.gather`)."""
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
    """The replica's own optimiser makes a step along a gradient that was computed before, of all
    replicas perhaps, with this rate (`ReplicaSide.own_rate`). Resumed with None. With
    `gradient.clip = "global"` it is this gradient that is clipped.
    """

    gradient: Array
    """float32[d], finite; it must not change before it is made."""
    rate: float
    wait: bool = True
    """False: resumed at once. It is made before anything else that is asked for."""


@record
class OwnState(Need):
    """What the replica's own optimiser keeps, as one vector: float32[n], in an order of its own
    that is the same in all replicas. Resumed with it.
    """

    take: Array | None = None
    """It keeps this from now on, what another replica was resumed with."""


@named_record
class Engine(Need):
    """An operation of the method's engine (`engines.py`), where the model is. Resumed with its
    arrays. The engine may write to the parameters: nothing else does, meanwhile. What it raises
    ends the run, as an error of the method.
    """

    op: str
    arrays: tuple[Array, ...] = ()
    """They must not change before it is resumed."""
    shapes: tuple[Extent, ...] | None = None
    """Of the arrays that come back; others end the run, too. None: any."""


@record
class Done(Need):
    """All steps so far, but the newest ones, count as done now, although no push holds them. For
    methods that write nothing, or not all, to servers, or parts in an order of their own. Resumed
    at once, with None.

    Only for steps that are in the state of somebody who survives this replica: what is done is
    never computed again.
    """

    but: int = 0
    """So many of the newest steps are not done."""


# ---------------------------------------------------------------- tables on the servers


@named_record
class Read(Need):
    """Fetch a table from all shards, each answered once its clock is at least `at_least`.

    wait: resume only when the values are in place; resumed with the `View`. Otherwise resume at
    once with None; the values are put in place between two steps, when they have come, and
    `ReplicaSide.view` tells of it. But without any parameters there is nothing to compute with: the
    first read into the model is waited for.

    Reads into the model come one after the other. What is asked for while one is under way is
    fetched behind it, several together as one that is as good as each.
    """

    wait: bool
    at_least: int = 0
    after_own: bool = False
    """With every push of this replica to this table so far settled: it reads its own writes. It is
    asked for behind them at once, so that `Write` and such a `Read` take one round trip."""
    table: str = PARAMETERS
    ranges: tuple[Range, ...] = ()
    """Of the table; (): all of it."""
    rows: Array | None = None
    """Of the tables of rows, in place of ranges: int64[n], ascending, each once, at least one. They
    are read beside."""
    into: Literal["model", "beside"] = "model"
    """model: into `parameters`. beside: into `View.values`, the model stays as it is. All tables
    but the parameters are read beside. Without `wait` that is a prefetch: the next such `Read`,
    which has to be the same one with `wait`, gets what it brings."""


class View(NamedTuple):
    """What a read has brought. Shards know nothing of each other, so their clocks may differ."""

    clock_min: int
    clock_max: int
    values: Array | None = None
    """float32, the ranges one after the other; None if they went into the model."""


@named_record
class Write(Need):
    """Push part of `vector` to a table: the compressor takes what it sends out of it, the residual
    stays in it. Tables other than the parameters are pushed as they are, and `vector` is left
    alone.

    Resumed with None as soon as the push is in flight; it waits only while the window is full.
    wait: resumed with a `Receipt` when all shards have settled it.
    """

    vector: Vector | None
    """None: an empty push, only to take part."""
    samples: int = 0
    clock: int = 0
    part: int = 0
    """The part of `clock` that this is, for a table of rule "parts"."""
    table: str = PARAMETERS
    ranges: tuple[Range, ...] = ()
    """`vector` holds these elements of the table, one range after the other; (): all of it."""
    rows: Array | None = None
    """Of the tables of rows, in place of ranges, as in `Read`."""
    behind: bool = False
    """It is settled when all writes before it are, to other tables, too: what they hold of its
    steps is in no other write."""
    to_all: bool = False
    """Shards that have nothing of `ranges` get an empty part, so that the clocks of all go on."""
    of: int = 1
    """With `ranges`: how many writes, one after the other, hold all of a step between them. Steps
    are done when so many that came after them are settled. 1: when `Done` says so."""
    weight: float = 0.0
    """What it weighs, for shard sides that go by that."""
    holds_steps: bool = True
    """False: it holds nothing of any step, and what is in a part of such writes counts as in none.
    """
    density_min: float = 0.0
    """A compressor that has a `density` sends at least this part of the entries."""
    given: bool = False
    """Nobody uses `vector` from here on, so that it travels without a copy. Only where pushes leave
    nothing (`Site.pushes_all`)."""
    wait: bool = False


@record
class Settle(Need):
    """Wait until all shards have settled the newest `Write`. Resumed with its `Receipt`; before any
    write, with an empty one.
    """


class Receipt(NamedTuple):
    """What became of a push, by shard; only shards that it had something for."""

    outcomes: dict[int, str]
    """Shard -> APPLIED, BUFFERED, LATE, REFUSED or DUPLICATE."""

    def is_applied(self) -> bool:
        """Whether all of it is in the table."""
        return all(kind in ("applied", "duplicate") for kind in self.outcomes.values())


def mean(table: str, clock: int, vector: Vector, samples: int) -> Generator[Need, Any, Array]:
    """The mean of a vector over all replicas, weighted by samples, by a table of rule "mean".

    Every member writes once per clock, in turn 0, 1, 2 ...; float32[size of the table]. It is
    durable: who comes later reads the newest one.
    """
    yield Write(table=table, vector=vector, samples=samples, clock=clock)
    view: View = yield Read(table=table, wait=True, at_least=clock + 1, into="beside")
    assert view.values is not None
    return view.values


# ---------------------------------------------------------------- other replicas


@named_record
class Ask(Need):
    """Ask another replica (`ReplicaSide.serve`). Resumed with its arrays; None if it has left, is
    replaced, or has not answered in time. Questions to one replica go one after the other.
    """

    slot: int
    op: str
    arrays: tuple[Array, ...] = ()
    within_s: float = 5.0
    """math.inf: for as long as it lives."""
    wait: bool = True
    """False: resumed at once with None; `ReplicaSide.answered` hears of the answer."""


@named_record
class Collective(Need):
    """The sum of a vector over all replicas of the group, torch.distributed does it. Every member
    makes the same ones in the same order. Resumed with `Summed`, which has the same bits for all of
    them; when it is, every member that lives has it.

    If a member dies before that, the group is made anew without it and the sum begun again, of what
    the living have given. Members are waited for as long as they live, however long they compute.
    A replica is in the group from its first need on, which may be this one; who joins later takes
    part in its first collective with nothing, whatever it gives. So does who goes on from a
    checkpoint at an older step than others do. If all that had the model have died, the run fails.
    """

    vector: Vector
    """float32[d]; it is not changed."""
    weight: float = 1.0
    """Of this replica; 0: it takes part with nothing."""
    step: int = 0
    """What it is the sum of: all members must be at the same one; who joins takes it over."""
    hands_on: bool = False
    """It is of what the group has come to, for those that have joined (`handed_on`)."""
    beside: float = 0.0
    """A number that travels with it, in float64 whatever the `dtype`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """What is summed, and travels. Of the others it is the mean that is formed, so that a sum of
    many is no larger than each: weight / sum of the weights * vector."""
    given: bool = False
    """Nobody writes to `vector` before it is resumed, so that it is summed without a copy."""


class Summed(NamedTuple):
    vector: Vector
    """float32[d], the sum of weight * vector. Read-only: the service keeps it, too."""
    weight: float
    """The sum of the weights: of the living, and nobody else."""
    members: int
    step: int
    """The one that the group is at; another than one's own for who has just joined. What a member
    gives at another step counts with weight 0."""
    is_counted: bool
    """Whether what this member gave is in it."""
    joined: int
    """Members for whom this is the first collective: they have given nothing, and have none of what
    the others have come to. All members see it in the same collective, and hand it on with
    `handed_on`. 0 in a new group, of which all members have begun alike."""
    first: int
    """The lowest slot of the members that have what the group has come to."""
    beside: float = 0.0
    """The mean of what was `beside` the vectors, by weight."""


def handed_on(
    vector: Vector, slot: int, step: int, summed: Summed
) -> Generator[Need, Any, tuple[Vector, int]]:
    """What the group has come to, for those that have joined in `summed`; all members make it, when
    they have made of `summed` what there was to make, which is nothing for those that have joined.

    vector: float32[d], the same for all others. Returns it, exactly, and the group's step. More may
    join, and the giver may die, meanwhile.
    """
    newest, came = summed, False
    while newest.joined or not came:
        weight = float(slot == newest.first)
        newest = yield Collective(vector=vector, weight=weight, step=step, hands_on=True)
        if newest.weight:
            vector, came = newest.vector, True
    return vector, newest.step
