"""What a method is: its shape, and up to three sides of one conversation, in one file.

- The replica side is a generator that reads like the paper's pseudocode. It *yields needs*
  (`needs.py`: the next gradient, a read, a write) and is resumed with what it asked for.
- The shard side says what a push means to a shard: apply it now, hold it in a barrier, buffer it,
  or drop it. The server role has made sure before that it is new, in order and sound.
- The lead, beside the coordinator, says who may work now, decides for all shards where one decider
  is needed, and may drive the shards itself with vector operations.

The shape declares what the method needs of the run: tables on servers, links between replicas, an
engine. Validation, placement, checkpoints, evaluation, status and the contract suite read it.

Parameters, gradients and accrued updates are flat vectors (numpy, or torch on a GPU); every piece
of state lies in attributes, so that it can be saved, restored and changed live between two needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from dlctl import messages
from dlctl.algorithms.needs import PARAMETERS, Need, View, Write
from dlctl.clients import Cohort
from dlctl.compress.base import Delta
from dlctl.config import COUNT_MAX, Choice, JobFile
from dlctl.errors import DlctlError
from dlctl.flat import ROWS, Layout, slice_bounds
from dlctl.messages import REFUSED, Array
from dlctl.optim.base import Optimizer
from dlctl.rows import RowTables
from dlctl.settings import Setting
from dlctl.shards.base import Shard
from dlctl.vector import Vector, copy_into, copy_of, zeros_like

# ---------------------------------------------------------------- what a method needs of a run

Rule = Literal["optimizer", "add", "set", "mean", "parts", "lead"]
"""optimizer: the servers' one, with the push as its gradient. add: values += push. set: values =
push. mean: a barrier; values = the mean of all members' pushes, weighted by their samples. parts:
values = the sum of the pushes of the newest clock, each part of it once. lead: replicas push
nothing, the lead's vector operations change it; for a method that the coordinator drives.
"""


def whole(layout: Layout) -> int:
    """As many elements as the model has trained parameters."""
    return layout.size()


def all_rows(layout: Layout) -> int:
    """As many as the task's tables of rows have."""
    return layout.size(ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A vector that is cut over all servers, durable like the parameters. It begins as zeros, the
    parameters as the model's initial values.
    """

    name: str
    rule: Rule
    size: Callable[[Layout], int] = whole
    """Elements, at least one unless it is `of_rows`."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of what the servers keep; what is pushed and read is float32."""
    of_rows: bool = False
    """It is all tables of rows that the task has (`dlctl/rows.py`), perhaps none, in one. Replicas
    read and write single rows of it."""
    rows: Callable[[Any], int] | None = None
    """Options -> how many there are of it, each a table of its own, for the lead alone: "s0", "s1"
    ... for "s"."""

    def bounds(self, layout: Layout, parts: int, index: int) -> tuple[int, int]:
        """The elements [lo, hi) of it that server `index` of `parts` has."""
        if self.of_rows:
            return RowTables(layout).bounds(parts, index)
        return slice_bounds(self.size(layout), parts, index)


PEERS_MAX = 512
"""Workers that ask each other. Of each the others are told its address and its key, and there is a
limit to the header that these are in (`wire.HEADER_BYTES_MAX`)."""
MODEL = Table(name=PARAMETERS, rule="optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    tables: tuple[Table, ...] = (MODEL,)
    """(): the run has no servers. Else the parameters come first. `tables_of` has the rows of each.
    """
    progress: str = PARAMETERS
    """The table whose pushes hold a replica's steps: a step is done when such a push is settled."""
    model: Literal["tables", "replica", "mean"] = "tables"
    """What is evaluated, saved and exported: the table of parameters, or replicas' own models; of
    these every one is saved, and the first one, or the mean of all, is the run's."""
    links: frozenset[Literal["peers", "group", "memory"]] = frozenset()
    """peers: replicas ask each other. group: they make collectives together. memory: they are all
    on one host, and one vector there is the model of all of them."""
    engine: str = ""
    """"module:Class", the torch part of the method (`engines.py`): Class(replica, rank, ranks,
    group), with the worker's `Replica`. rank, ranks: 0 of 1, unless `ranks` is set."""
    twin: str = ""
    """The same in numpy, for the simulator: Class(problem, parameters), with its `Problem`."""
    ranks: bool = False
    """A replica may be several processes (`workers.processes`), each with an engine; group is
    torch.distributed's of them then, else None. Rank 0 alone reads and writes tables: that later
    ranks read and write their own ranges is to come."""
    optimizers: tuple[str, ...] | None = None
    """Of the servers, those that it works with; None: all."""
    optimizers_why: str = ""
    """Why it does not work with others, as the end of a sentence."""
    compressors: tuple[str, ...] | None = None
    exact: bool = False
    """Every entry of every push must arrive as it was computed, in float32, and replicas must see
    the parameters as they are."""
    same_loss: bool = False
    """It compares losses of the whole dataset: they must depend on the parameters alone, and not on
    dropout or on who is in a batch. Modules that are not so are told of."""
    survives: frozenset[Literal["worker", "server", "coordinator"]] = frozenset(
        {"worker", "server", "coordinator"}
    )
    """Whose deaths the run survives. Without "server" no shard's state is kept."""

    @property
    def needs_servers(self) -> bool:
        return bool(self.tables)

    @property
    def sends(self) -> bool:
        """Whether replicas push and fetch, from servers or from each other; else they sum over a
        group, or share memory.
        """
        return self.needs_servers or "peers" in self.links

    @property
    def workers_max(self) -> int:
        """The list of those who ask each other has to fit into one message."""
        return PEERS_MAX if "peers" in self.links else COUNT_MAX

    def check_sizes(self, layout: Layout) -> None:
        """Raises DlctlError for a table that would be empty with this model, or for those of a lead
        that are not cut alike.
        """
        has_rows = any(True for _ in layout.slices(ROWS))
        if has_rows and not any(table.of_rows for table in self.tables):
            raise DlctlError(
                "the task has tables of rows, and this method does not train any",
                hint='use [algorithm] name = "rows"',
            )
        for table in self.tables:
            may_be_empty = table.of_rows or (has_rows and table.name == PARAMETERS)
            if (size := table.size(layout)) < 1 and not may_be_empty:
                raise DlctlError(
                    f'the method\'s table "{table.name}" has {size} elements with this model',
                    hint="its size() must be 1 or more",
                )
        of_lead = {t.name: t.size(layout) for t in self.tables if t.rule in ("lead", "parts")}
        if len(set(of_lead.values())) > 1:
            raise DlctlError(
                f"the method's tables {', '.join(of_lead)} are not of one size",
                hint="the lead's operations need that: give them the same size()",
            )

    def tables_of(self, options: Any) -> tuple[Table, ...]:
        """All tables, with these options: their order is that of their numbers."""
        return tuple(table for declared in self.tables for table in _rows(declared, options))

    def of_replicas(self) -> tuple[Table, ...]:
        """Those that replicas may use: the first ones, without rows."""
        return tuple(table for table in self.tables if table.rows is None)

    def table(self, name: str) -> int:
        """The number of a table that replicas may use. Raises KeyError."""
        for number, table in enumerate(self.of_replicas()):
            if table.name == name:
                return number
        raise KeyError(name)


def _rows(table: Table, options: Any) -> Iterator[Table]:
    if table.rows is None:
        yield table
        return
    for row in range(table.rows(options)):
        yield replace(table, name=f"{table.name}{row}", rows=None)


# ---------------------------------------------------------------- replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a replica runs: what it is given before it begins."""

    options: Any
    parameters: Vector
    """float32[d], the model itself: a step computes with what stands there."""
    slot: int
    layout: Layout
    rng: np.random.Generator
    """Seeded by job, slot and epoch."""
    members: frozenset[int]
    has_inner: bool = False
    """Whether there is an optimiser in the replica, by which `Gradient(step=True)` steps."""
    pushes_all: bool = False
    """Whether a push leaves nothing of its vector, so that a replica may give it away with it."""


class Automatic(NamedTuple):
    """An option that is a number of steps or "auto", and what bounds it then."""

    key: str
    steps_max: int
    share_max: float
    """The part of its time that a replica may wait for pushes and fetches."""


class PushKind(NamedTuple):
    """What one push of a replica holds."""

    batches: int
    is_way: bool = False
    """False: the sum of their gradients. True: the way that the replica's own steps go. The
    servers' optimiser takes no gradients then, and follows no schedule."""
    is_all: bool = True
    """False: a part of that way stays in the replica's position, and no push holds it."""


Start = Literal["new", "joins", "restored"]
"""new: the run begins. joins: it is under way. restored: the state of before a stop comes next."""
Needs = Generator[Need, Any, None]


class ReplicaSide(ABC):
    """One replica. `begin` is called first, then perhaps `restore`, then `run`."""

    def __init__(self, site: Site) -> None:
        self.options = site.options
        self.parameters = site.parameters
        self.slot = site.slot
        self.layout = site.layout
        self.rng = site.rng
        self.has_inner = site.has_inner
        self.pushes_all = site.pushes_all
        self.members = site.members
        """The slots that take part now; the worker role sees to it."""
        self._residual: Vector | None = None
        self.intervals: dict[str, int] = {}
        """Option -> its number of steps for as long as it is "auto"; the worker role sees to it."""
        self.step_s = 0.0
        """Seconds that a step takes, smoothed; 0: not known yet. The worker role sees to it."""
        self.own_rate: Callable[[int], float] = lambda samples: 0.0
        """Samples that the model has had -> the rate of the replica's own optimiser there, as it is
        set here now. The worker role sees to it."""
        self.view = View(0, 0)
        """Of the newest read that is in the model, all of it; the worker role sees to it."""

    @property
    def residual(self) -> Vector:
        """What was accrued and not yet sent: error feedback. There is none until somebody looks."""
        if self._residual is None:
            self._residual = zeros_like(self.parameters)
        return self._residual

    @residual.setter
    def residual(self, vector: Vector | None) -> None:
        """None: nothing is left."""
        self._residual = vector

    def has_residual(self) -> bool:
        """Whether there may be something in it."""
        return self._residual is not None

    def accrue(self, gradient: Vector) -> None:
        """Add to the residual."""
        if self._residual is None:
            self._residual = copy_of(gradient)
        else:
            self._residual += gradient

    def write_residual(self, *, samples: int, clock: int = 0) -> Write:
        """A write of it. Where a push leaves nothing of it there is no copy: it begins anew."""
        write = Write(vector=self.residual, samples=samples, clock=clock, given=self.pushes_all)
        if self.pushes_all:
            self._residual = None
        return write

    def interval(self, key: str) -> int:
        """Steps of an option that is a number of them or "auto", as they are in force now."""
        steps: int | str = getattr(self.options, key)
        return steps if isinstance(steps, int) else self.intervals.get(key, 1)

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        """What one push is made of, at the beginning of a run."""
        return PushKind(1)

    def automatic(self) -> Mapping[str, Automatic]:
        """The intervals of pushes and fetches that may be "auto"."""
        return {}

    def changes_parameters(self) -> bool:
        """Whether `run` may write to `parameters` between two reads. A copy is kept then of what
        was read, if the servers send changes only. It may change whenever `run` is resumed.

        Nobody else may write there. If False, what a task's own `loss` does to the parameters is
        overwritten only where the servers have changed something.
        """
        return True

    def begin(self, start: Start) -> None:  # noqa: B027  most methods have nothing to prepare
        """The model has the run's values, as far as there are any."""

    def placing(self, lo: int, hi: int) -> None:  # noqa: B027  most methods have nothing to keep
        """What was read is about to take the place of `parameters[lo:hi]`; no gradient is being
        computed."""

    def placed(self, lo: int, hi: int) -> None:  # noqa: B027  most methods leave it as it is
        """What was read has just been put into `parameters[lo:hi]`."""

    def state(self) -> dict[str, Vector]:
        """All that has to be saved of a replica, by name, between a push and the step that follows.

        With it, and the parameters, `restore` goes on exactly where this one was. The parameters
        are on the servers, or the worker role saves and restores them (`Shape.model`); so it does
        `rng`. No name may be "w", "averaged" or "dice", which are the role's.
        """
        return {"residual": self.residual} if self.has_residual() else {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from what `state` was before a stop; gradients may have come to it since."""
        if "residual" in state and state["residual"].size == len(self.residual):
            made_since = copy_of(self.residual)
            copy_into(self.residual, state["residual"])
            self.residual += made_since

    @classmethod
    def state_after(cls, steps: int, samples: int) -> dict[str, Array]:
        """What `state` would be of a replica whose model has come so far by another method; {}: it
        goes on as `begin` leaves it. It is asked for only where the run's models are the replicas'
        own (`Shape.model`).
        """
        return {}

    @abstractmethod
    def run(self) -> Needs:
        """The method as a replica sees it; it does not come to an end by itself."""

    def serve(self, op: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Answer another replica's `Ask`, between two steps. Raises RemoteProtocolError for what
        it cannot take; then there is no answer.
        """
        raise NotImplementedError(f"{type(self).__name__} answers nobody")

    def answered(self, slot: int, arrays: tuple[Array, ...] | None) -> None:
        """What came of an `Ask` that was not waited for, between two steps; None: no answer. The
        parameters may be changed.
        """
        raise NotImplementedError(f"{type(self).__name__} waits for all its answers")

    def figures(self) -> messages.Json:
        """What the worker reports of the method beside its own figures, in plain numbers."""
        return {}

    def leave(self) -> Iterable[Need]:
        """What is still to be done before this replica leaves the run; gradients cannot be had. A
        generator is resumed with what it asks for.
        """
        return ()


# ---------------------------------------------------------------- servers


class Outcome(NamedTuple):
    """What became of one push; `kind` is one of APPLIED, HELD, BUFFERED, LATE, REFUSED
    (`messages.Ack`)."""

    slot: int
    epoch: int
    seq: int
    kind: str
    staleness: int = 0
    """Updates that came between the version the gradient was of and this one, on this shard."""
    reason: str = ""
    """Of a push that was refused."""


Process = tuple[int, int]
"""(slot, epoch): one process of a replica."""


class Decision(NamedTuple):
    """What the lead has decided for all shards (`Lead.quorum`)."""

    clock: int
    used: frozenset[Process]
    """Whose pushes of that clock count."""
    gone: frozenset[Process]
    """Of these, who has died since: a push of theirs that a shard has lost does not come again."""


class ShardSide(ABC):
    """One shard. Every method returns the pushes that it settled, in order."""

    takes_pushes: ClassVar[bool] = True
    """Whether replicas push to it at all."""
    applies_as_pushed: ClassVar[bool] = False
    """Whether `push` hands a delta to the shard at once and as it is, so that the shard may work on
    it while it comes."""
    averages: ClassVar[bool] = False
    """Whether an update is one of the mean of what all members have pushed for a step."""
    asks_lead: ClassVar[bool] = False
    """Whether it holds pushes until the lead has said which of them count; then it has `held` and
    `decided`, too, and `Shard.version` is its clock. Only a side of the parameters may."""

    @classmethod
    def of(cls, options: Any) -> type[ShardSide]:
        """The side that serves with these options: a method may have another one for some."""
        return cls

    def __init__(self, options: Any, shard: Shard) -> None:
        self.options = options
        self.shard = shard
        self.lo = 0
        """Where the shard begins in its table; the server role sees to it."""
        self.measures_noise = False
        """Whether it is to find out how much the gradients of a step differ."""

    @classmethod
    def optimizer(cls, options: Any, optimizer: Optimizer, workers: int) -> Optimizer:
        """The rule of the shard, from the job's optimiser: a method may put something before it
        (`optim.buffered`). Whatever has a slot of it survives with the shard.

        workers: as many as the job says. With `dlctl scale` there may be more.
        """
        return optimizer

    def clock(self) -> int:
        """What `Read.at_least` is compared with; every reply tells it."""
        return self.shard.version

    def may_read(self, slot: int, at_least: int) -> bool:
        """Whether this read is answered now; else it waits until something has changed."""
        return self.clock() >= at_least

    def shown(self, slot: int) -> tuple[int, Array] | None:
        """What a replica's read puts into its model, if that is not the present state of the shard:
        its version, float32[n]. Such a read is of the whole slice. Evaluations see what there is.
        """
        return None

    @abstractmethod
    def push(self, push: messages.Push, delta: Delta) -> list[Outcome]:
        """A push that is new, in order and finite. It must be among the outcomes, once."""

    def left_out(self, push: messages.Push, reason: str) -> list[Outcome]:
        """A push that is new and in order, and poison: it has come, but nothing of it may be used.

        It must be among the outcomes, once, as REFUSED or first as HELD; with the reason.
        """
        return [Outcome(push.slot, push.epoch, push.seq, REFUSED, reason=reason)]

    def waits_for(self) -> frozenset[int]:
        """The slots without whose pushes nothing goes on; empty while nobody waits."""
        return frozenset()

    def held(self) -> list[tuple[int, int, int, int]]:
        """(clock, slot, epoch, samples) of each push that it holds; for sides that ask the lead."""
        return []

    def decided(self, decision: Decision) -> list[Outcome]:
        """Use just these pushes, once they are there; no other one of this clock or before counts.

        It comes again and again; one for a clock that is over means nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} asks nobody")

    def norm_part(self) -> tuple[int, float] | None:
        """(the clock of the step that waits for the norm of all shards' updates, the square of this
        one's norm), for sides that average, where `Shard.shares_norm`; None: none waits for it.
        """
        return None

    def norm_known(self, clock: int, squared: float) -> list[Outcome]:
        """The square of the norm of what all shards are about to apply at this clock. It stands for
        all of them, even if this one's own part has changed since.
        """
        raise NotImplementedError(f"{type(self).__name__} shares no norm")

    def joined(self, slot: int) -> list[Outcome]:
        """A new epoch of `slot` has joined; pushes of its old epochs will not come any more."""
        return []

    def members(self, slots: frozenset[int]) -> list[Outcome]:
        """These slots take part from now on."""
        return []

    def figures(self) -> messages.Json:
        """What the server reports of it, in plain values: "noise_parts" is `NoiseScale.parts`."""
        return {}

    def state(self) -> messages.Json:
        """What a server that takes this one's place has to know besides the shard. It is kept with
        every commit, so a few numbers per slot at most.

        Pushes that are held are not part of it: their workers send them again, as new ones.
        """
        return {}

    def resume(self, state: messages.Json) -> None:
        """Take the place of the side that said `state` of itself; to be called first of all.

        Workers that had joined before do so again without `joined` being called.
        """
        assert not state, f"{type(self).__name__} has a state and does not take it up again"

    def restore(self, state: messages.Json) -> None:  # noqa: B027  most sides begin anew
        """Go on from what `state` was when a checkpoint was saved: the shard is as it was, and all
        workers are new ones.
        """


# ---------------------------------------------------------------- coordinator


class Change(NamedTuple):
    """What one operation does to a table, element by element, in the table's dtype.

    copy: y = a * x. axpy: y += a * x. The target is a table of rule "lead" or "parts". What would
    not be finite is not kept: the run fails.
    """

    op: str
    x: str
    y: str
    a: float = 1.0


class Sum(NamedTuple):
    """dot: the sum of x * y. norm1: the sum of |x|. In float64, a partial sum on each shard; these
    are added in the order of the shards."""

    op: str
    x: str
    y: str = ""


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """Operations on tables that are cut alike, on all shards, in one round trip: first the changes
    in their order, then the sums of what is there then. Resumed with the sums, floats.

    Every change is made once on every shard, whoever dies: it is committed with its number.
    """

    changes: tuple[Change, ...] = ()
    sums: tuple[Sum, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Have all replicas go over the whole dataset once, at the present parameters. Each pushes the
    sum of the gradients of every portion that it computes, with the portion's number and, as the
    clock, its data epoch.

    Resumed with (sum of losses, samples) when every portion is in all shards, once. The sum is
    infinite if the loss or the gradient of any batch was not finite, or a shard has refused a
    portion.
    """


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`Lead.state` tells all now: who goes on from it begins `drive` anew, and gets to this point
    without asking for anything. What came before is forgotten. Resumed with None.
    """


Driving = VectorRequest | BatchRequest | Snapshot
Drives = Generator[Driving, Any, str]
"""Returns why it has come to its end, as a sentence for the user."""


class DataEpoch(NamedTuple):
    """How far one pass over the dataset has come."""

    portions: int
    """Of it that the run will lease; 0: it ends before."""
    left: int
    """Of these, the ones that nobody has."""
    under_way: Mapping[int, int]
    """Slot -> how many it has."""


NO_EPOCH = DataEpoch(0, 0, {})


@dataclass(slots=True)
class Lead:
    """Who may lease data now; for methods that the coordinator drives, also the driving."""

    options: Any
    steps_done: int = 0
    """Acknowledged steps of all workers, kept up by the coordinator role; likewise, if there is a
    `cut_epoch`, who takes part, and the data epoch that was not cut yet, which is 0 at first and in
    the state of who cuts."""
    members: frozenset[int] = frozenset()
    data_epoch: int = 0
    epoch: DataEpoch = NO_EPOCH

    clock: int = 0
    """What the method counts beside the coordinator. With `state` it is on record before anybody
    hears of what follows from it, and in checkpoints."""

    def __post_init__(self) -> None:
        """For what a lead has of its own."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        """Why `slot` has to wait; "" if it may work now. `first_slot`: the lowest that lives."""
        return ""

    def cohort(self, clients: int) -> Cohort:
        """What a data epoch is made of, where the dataset is cut into so many clients."""
        return Cohort(clients)

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float | None:
        """Which pushes of a clock count, the same on every shard; None: not yet. For methods whose
        shard side asks (`ShardSide.asks_lead`); called again when somebody comes, joins or leaves.
        A number: not yet, and called again at the latest when `waited_s` is that.

        came: slot -> samples, of those that live and whose pushes for this clock all shards hold,
        at least one; the answer is a part of them. members: who takes part. waited_s: seconds since
        all shards are at this clock, from 0 again in a new coordinator. What it answers is carried
        out, so the lead may count it.
        """
        raise NotImplementedError(f"{type(self).__name__} decides nothing")

    def cut_epoch(self) -> bool:
        """Whether `data_epoch` is over: of its portions, those that nobody has are dropped then.

        While it is not, `may_lease` should let nobody have one of the next data epoch.
        """
        return False

    def portion_done(self, slot: int, steps: int, samples: int, data_epoch: int) -> None:
        """A worker has done a portion, for the first time; `steps_done` counts it already."""

    def drive(self) -> Drives | None:
        """The method itself, if the coordinator drives it.

        It survives the coordinator: the results of its requests are on record, and the next one
        plays them back to a new generator, from the newest `Snapshot` on. So what it does depends
        on the options, the state and these results alone.
        """
        return None

    def state(self) -> messages.Json:
        """What the next coordinator has to know, beside the clock; kept with every decision."""
        return {}

    def resume(self, state: messages.Json) -> None:
        """Go on from what `state` was in a coordinator that has died."""

    def figures(self) -> messages.Json:
        """What `status` shows of the method, in plain values."""
        return {}


# ---------------------------------------------------------------- a whole method

Fault = tuple[tuple[str, ...], str, str]
"""What is wrong with a job file: (the path of the key, what is wrong, what to write instead)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What the registry names. `Options` is a dataclass: the keys of the job file."""

    Options: type[Any]
    shape: Shape = field(default_factory=Shape)
    replica: type[ReplicaSide]
    shard: type[ShardSide] | None = None
    """Of the table of parameters, if its rule is "optimizer"; all others follow their rules."""
    lead: type[Lead] = Lead
    live: Mapping[str, Setting] = field(default_factory=dict)
    """Options that may change while the run goes on, and how people write them. Those of
    `ReplicaSide.automatic` may become "auto" then."""
    optimizer: Choice = field(default_factory=partial(Choice, name="sgd"))
    """The servers' one, for a job file that names none."""
    inner: Choice = field(default_factory=partial(Choice, name="none"))
    """The replicas' one, for a job file that names none; "none": they make no steps by themselves,
    whatever the job file says."""
    compression: Choice = field(default_factory=partial(Choice, name="none"))
    """Of pushes, for a job file that names none."""
    check: Callable[[JobFile], list[Fault]] = lambda job: []
    """What of a job file does not go with this method, beyond what the shape says."""
    check_steps: Callable[[JobFile, float], list[Fault]] = lambda job, steps: []
    """The same of a run in which all workers together make no more steps than these. It is asked
    where the job file tells that, and again when the dataset is known."""
    experimental: bool = False
    """It is marked in lists, and runs a reduced contract suite."""

    def pushes_gradients(self, options: Any) -> bool:
        """Whether the servers' optimiser takes gradients, and no ways of whole rounds: then it
        follows the schedule, the groups of parameters and the global clipping."""
        return self.shard is not None and not self.replica.one_push(options).is_way


def dense(delta: Delta, size: int) -> Array:
    """A delta as a full vector, float32[size]; the array itself if it is dense already."""
    if delta.indices is None:
        return delta.values
    full = np.zeros(size, np.float32)
    full[delta.indices] = delta.values
    return full
