"""What a method is: its shape, and up to three sides of one conversation, in one file.

- The replica side is a generator that reads like the paper's pseudocode. It *yields needs*
  (`needs.py`: the next gradient, a read, a write) and is resumed with what it asked for.
- The shard side decides what a shard does with a push: apply it now, hold it in a barrier, buffer
  it, or drop it. The server role has checked before that the push is new, in order and sound.
- The lead, beside the coordinator, decides which workers may run now, decides for all shards where
  one decider is needed, and may drive the shards itself with vector operations.

The shape declares what the method needs of the run: tables on servers, links between replicas, an
engine. Validation, placement, checkpoints, evaluation, status and the contract suite read it.

Parameters, gradients and accrued updates are flat vectors (numpy, or torch on a GPU). All state is
in attributes, so that it can be saved, restored and changed live between two needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from dlctl import outdated
from dlctl.algorithms.means import Mean
from dlctl.algorithms.needs import PARAMETERS, Need, View, Write
from dlctl.algorithms.shared_norm import SharedNorm
from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.job.clients import Cohort
from dlctl.job.config import COUNT_MAX, Choice, JobFile
from dlctl.job.settings import Setting, of_options
from dlctl.model.cut import Bounds
from dlctl.model.flat import ROWS, Layout, slice_bounds
from dlctl.model.parts import WHOLE, Part
from dlctl.model.vector import Vector, copy_into, copy_of, zeros_like
from dlctl.optim.base import Optimizer
from dlctl.shards.base import Shard
from dlctl.shards.rows import RowTables
from dlctl.wire import messages
from dlctl.wire.messages import REFUSED, Array
from dlctl.wire.messages import PushOutcome as PushOutcome

# ---------------------------------------------------------------- what a method needs of a run

Rule = Literal["optimizer", "add", "set", "mean", "parts", "lead"]
"""optimizer: the servers' optimiser, with the push as its gradient. add: values += push. set:
values = push. mean: a barrier; values = the mean of all members' pushes, weighted by their samples.
parts: values = the sum of the pushes of the newest clock, each part once. lead: replicas push
nothing, the lead's vector operations change the table; for a method that the coordinator drives.
"""


def whole(layout: Layout) -> int:
    """The number of trained parameters of the model."""
    return layout.size()


def all_rows(layout: Layout) -> int:
    """The number of elements of the task's tables of rows."""
    return layout.size(ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A vector that is sharded over all servers, durable like the parameters. It is initialised
    with zeros, the parameters with the model's initial values.
    """

    name: str
    rule: Rule
    size: Callable[[Layout], int] = whole
    """Elements, at least one unless it is `of_rows`."""
    dtype: Literal["float32", "float64"] = "float32"
    """The element type on the servers. Pushes and reads are always float32."""
    of_rows: bool = False
    """It combines all tables of rows of the task (`dlctl/shards/rows.py`), perhaps none. Replicas
    read and write single rows of it."""
    copies: Callable[[Any], int] | None = None
    """Options -> how many tables like this there are, for the lead alone: "s0", "s1" ... for
    "s"."""

    def bounds(self, layout: Layout, shards: Bounds, index: int) -> tuple[int, int]:
        """The elements [lo, hi) that server `index` owns. shards: those of the parameters; a table
        with a number for each of these is cut like them, all others evenly.
        """
        parts = len(shards) - 1
        if self.of_rows:
            return RowTables(layout).bounds(parts, index)
        size = self.size(layout)
        if size == shards[-1]:
            return shards[index], shards[index + 1]
        return slice_bounds(size, parts, index)


PEERS_MAX = 512
"""Workers that connect to each other. One message header carries the address and the key of each,
and its size is limited (`wire.HEADER_BYTES_MAX`)."""
MODEL = Table(name=PARAMETERS, rule="optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    tables: tuple[Table, ...] = (MODEL,)
    """(): the run has no servers. Else the parameters are the first table. `tables_of` expands
    `Table.copies`."""
    progress: str = PARAMETERS
    """The table whose pushes hold a replica's steps: a step is done when such a push is settled."""
    model: Literal["tables", "replica", "mean"] = "tables"
    """What is evaluated, saved and exported: the table of parameters, or the replicas' own models.
    All of these are saved, and the first one, or the mean of all, is the model of the run."""
    links: frozenset[Literal["peers", "group", "memory"]] = frozenset()
    """peers: replicas send requests to each other. group: they make collectives together. memory:
    all replicas are on one host and share one vector as their model."""
    engine: str = ""
    """"module:Class", the torch part of the method, a `MethodEngine` (`engines.py`): it is made by
    Class(place), with an `EnginePlace`."""
    twin: str = ""
    """The engine in numpy, for the simulator: Class(place), with a `TwinPlace`."""
    ranks: bool = False
    """A replica may be several processes (`workers.processes`), each with an engine. Only rank 0
    reads and writes tables."""
    optimizers: tuple[str, ...] | None = None
    """The server optimisers that the method works with; None: all."""
    optimizers_why: str = ""
    """Why it does not work with others, as the end of a sentence."""
    compressors: tuple[str, ...] | None = None
    exact: bool = False
    """Every entry of every push must arrive as it was computed, in float32, and replicas must fetch
    the exact parameters."""
    parts: tuple[Part, ...] = (WHOLE,)
    """What its workers hold and do: all the same or, with a model that is divided among parties
    (`[[parties]]`), a part for each role."""
    serves_on: bool = False
    """Replicas answer each other also when they are drained, until they exit."""
    same_loss: bool = False
    """The method compares losses of the whole dataset: they must depend on the parameters alone,
    not on dropout or on the other samples of a batch. A warning names the modules that violate
    this."""
    survives: frozenset[Literal["worker", "server", "coordinator"]] = frozenset(
        {"worker", "server", "coordinator"}
    )
    """The daemons whose deaths the run survives. Without "server" no shard state is persisted."""

    @property
    def is_divided(self) -> bool:
        """Whether its workers hold different parts of a model."""
        return len(self.parts) > 1

    @property
    def has_engine(self) -> bool:
        """Whether any of its workers has an engine."""
        return bool(self.engine) or any(part.engine for part in self.parts)

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
        """The list of peers has to fit into one message."""
        return PEERS_MAX if "peers" in self.links else COUNT_MAX

    def check_sizes(self, layout: Layout) -> None:
        """Raises DlctlError for a table that would be empty with this model, or for tables of a
        lead that differ in size.
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
        """All tables, with these options, in the order of their numbers."""
        return tuple(table for declared in self.tables for table in _copies(declared, options))

    def of_replicas(self) -> tuple[Table, ...]:
        """The tables that replicas may use: the first ones, which have no copies."""
        return tuple(table for table in self.tables if table.copies is None)

    def table(self, name: str) -> int:
        """The number of a table that replicas may use. Raises KeyError."""
        for number, table in enumerate(self.of_replicas()):
            if table.name == name:
                return number
        raise KeyError(name)


def _copies(table: Table, options: Any) -> Iterator[Table]:
    if table.copies is None:
        yield table
        return
    for number in range(table.copies(options)):
        yield replace(table, name=f"{table.name}{number}", copies=None)


# ---------------------------------------------------------------- replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The environment of a replica, given to it before it begins."""

    options: Any
    parameters: Vector
    """float32[d], the live model: a step computes with these values."""
    slot: int
    layout: Layout
    rng: np.random.Generator
    """Seeded by job, slot and term."""
    members: frozenset[int]
    has_inner: bool = False
    """Whether the replica has its own optimiser, for `Gradient(step=True)`."""
    pushes_all: bool = False
    """Whether a push leaves no residual, so that the replica may give its vector away."""
    role: str = ""
    """Of its part (`Shape.parts`); "": there is one part."""


class Automatic(NamedTuple):
    """An option that is a number of steps or "auto", and the bounds of "auto"."""

    key: str
    steps_max: int
    share_max: float
    """The fraction of its time that a replica may wait for pushes and fetches."""


class PushKind(NamedTuple):
    """What one push of a replica holds."""

    batches: int
    is_displacement: bool = False
    """False: the sum of their gradients. True: the displacement of the replica's own steps. Then
    the servers' optimiser takes no gradients and follows no schedule."""
    is_all: bool = True
    """False: a part of that displacement stays in the replica's position, and no push holds it."""
    target: int = 0
    """Samples of all replicas that one update is made of, by as many batches of each as it takes;
    then a push holds the mean of their gradients by samples. 0: a push holds `batches`."""


Start = Literal["new", "joins", "restored"]
"""new: the run begins. joins: the run is under way. restored: `restore` is called next."""
Needs = Generator[Need, Any, None]
Answer = tuple[Array, ...] | Generator[Need, Any, tuple[Array, ...]]


class Arrival:
    """What becomes of the model when values arrive that were read into it: they replace it, unless
    a method sets another `ReplicaSide.arrival` (`rounds.Reference`).

    Called for each slice, between two steps.
    """

    def before(self, lo: int, hi: int) -> None:
        """The values read will now replace `parameters[lo:hi]`."""

    def after(self, lo: int, hi: int) -> None:
        """The values read have just been written to `parameters[lo:hi]`."""


class ReplicaSide(ABC):
    """One replica. `begin` is called first, then perhaps `restore`, then `run`."""

    averages: ClassVar[bool] = False
    """Whether replicas form the mean of all their gradients by themselves, and step along it
    (`OwnStep`)."""
    keeps_position: ClassVar[bool] = False
    """Whether `state` has what changes with every step, not only with pushes, as parameters of its
    own beside the servers'."""
    is_in_step: bool = False
    """`state` is not consistent now, and will be soon: a save waits. It may be set between two
    needs of a step that follow each other without a batch."""

    def __init__(self, site: Site) -> None:
        self.options = site.options
        self.parameters = site.parameters
        self.slot = site.slot
        self.layout = site.layout
        self.rng = site.rng
        self.has_inner = site.has_inner
        self.pushes_all = site.pushes_all
        self.role = site.role
        self.members = site.members
        """The slots that take part now. Like the attributes below, the worker role updates it."""
        self._residual: Vector | None = None
        self.intervals: dict[str, int] = {}
        """Option -> its number of steps for as long as it is "auto"."""
        self.step_s = 0.0
        """Seconds that a step takes, smoothed; 0: not known yet."""
        self.own_rate: Callable[[int], float] = lambda samples: 0.0
        """Samples that the model has had -> the current rate of the replica's own optimiser there.
        """
        self.arrival = Arrival()
        self.view = View(0, 0)
        """The clocks of the newest read that is completely in the model."""

    @property
    def residual(self) -> Vector:
        """What was accrued and not yet sent: error feedback. It is allocated on first access."""
        if self._residual is None:
            self._residual = zeros_like(self.parameters)
        return self._residual

    @residual.setter
    def residual(self, vector: Vector | None) -> None:
        """Set what pushes have not sent yet; None: nothing is left."""
        self._residual = vector

    def has_residual(self) -> bool:
        """Whether the residual may be nonzero."""
        return self._residual is not None

    def accrue(self, gradient: Vector) -> None:
        """Add a gradient to the residual."""
        if self._residual is None:
            self._residual = copy_of(gradient)
        else:
            self._residual += gradient

    def write_residual(self, *, samples: int, clock: int = 0) -> Write:
        """A write of the residual. Where a push leaves no residual, the vector is given away
        without a copy."""
        write = Write(vector=self.residual, samples=samples, clock=clock, given=self.pushes_all)
        if self.pushes_all:
            self._residual = None
        return write

    def interval(self, key: str) -> int:
        """The steps of an option that is a number of them or "auto", as currently effective."""
        steps: int | str = getattr(self.options, key)
        return steps if isinstance(steps, int) else self.intervals.get(key, 1)

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        """What one push is made of, at the beginning of a run."""
        return PushKind(1)

    @classmethod
    def hands_on_buffers(cls, options: Any) -> bool:
        """Whether replicas work one after the other, and each goes on with the model's buffers that
        the one before it has left, instead of averaging them. Then they are pushed with the
        parameters, and a read into the model reads them, too.
        """
        return False

    def automatic(self) -> Mapping[str, Automatic]:
        """The intervals of pushes and fetches that may be "auto"."""
        return {}

    def changes_parameters(self) -> bool:
        """Whether `run` may write to `parameters` between two reads. If so, and if the servers send
        only changes, the worker keeps a copy of what was read. The answer may change whenever
        `run` is resumed.

        Only `run` may write there. If False, what a task's own `loss` does to the parameters is
        overwritten only where the servers have changed something.
        """
        return True

    def begin(self, start: Start) -> None:  # noqa: B027  most methods have nothing to prepare
        """The model holds the run's values, if the run has any."""

    def state(self) -> dict[str, Vector]:
        """All state of a replica to save, by name, between a push and the step that follows.

        From it and the parameters, `restore` resumes exactly where this replica was. The parameters
        are on the servers, or the worker role saves and restores them (`Shape.model`), as it does
        `rng`. The names "w", "averaged" and "dice" are reserved for the role.
        """
        return {"residual": self.residual} if self.has_residual() else {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Resume from the `state` before a stop; gradients may have been accrued since `begin`."""
        if "residual" in state and state["residual"].size == len(self.residual):
            made_since = copy_of(self.residual)
            copy_into(self.residual, state["residual"])
            self.residual += made_since

    @classmethod
    def state_after(cls, steps: int, samples: int) -> dict[str, Array]:
        """The `state` of a replica whose model was trained this far by another method; {}: as
        `begin` leaves it. Called only where the run's models are the replicas' own (`Shape.model`).
        """
        return {}

    @abstractmethod
    def run(self) -> Needs:
        """The method as a replica sees it; it never returns on its own."""

    def serve(self, op: str, arrays: tuple[Array, ...]) -> Answer:
        """Answer another replica's `Ask`, between two steps. Raises RemoteProtocolError for an
        invalid request; then there is no answer.

        It may return a generator of needs, which returns the arrays: one at a time is run, beside
        `run`, and after that has ended. `run` must not wait for needs of these kinds itself.
        """
        raise NotImplementedError(f"{type(self).__name__} answers no requests")

    def question(self, batch: tuple[int, int, int], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """What is sent where a computation of this replica asks a worker of another part
        (`Part.asks`), which gets it in `serve`. batch: (data epoch, portion, number) of the newest
        one.
        """
        return arrays

    def figures(self) -> messages.Json:
        """The method's figures that the worker reports beside its own, as plain numbers."""
        return {}

    def leave(self) -> Iterable[Need]:
        """The needs to serve before this replica leaves the run; no gradients are available. A
        generator is resumed with the results.
        """
        return ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise outdated.member(self, name)


# ---------------------------------------------------------------- servers


Process = tuple[int, int]
"""(slot, term): one process of a replica."""


class Decision(NamedTuple):
    """What the lead has decided for all shards (`Lead.quorum`)."""

    clock: int
    used: frozenset[Process]
    """The processes whose pushes of that clock count."""
    gone: frozenset[Process]
    """The used processes that have died since: they do not resend a push that a shard has lost."""


class _Fixed:
    """The options of a method without those that change live, but elsewhere."""

    def __init__(self, options: Any, elsewhere: frozenset[str]) -> None:
        self._options = options
        self._elsewhere = elsewhere

    def __getattr__(self, name: str) -> Any:
        if name in self._elsewhere:
            raise TypeError(
                f"{name} changes live, and does not change here: name it in ShardSide.live or "
                "Lead.live, or let the replicas send it with their pushes"
            )
        return getattr(self._options, name)


class ShardSide(ABC):
    """One shard. Every method returns the pushes that it settled, in order."""

    live: ClassVar[tuple[str, ...]] = ()
    """The live options that this side reads: `dlctl set` changes them in the servers, too."""
    takes_pushes: ClassVar[bool] = True
    """Whether replicas push to the table at all."""
    applies_as_pushed: ClassVar[bool] = False
    """Whether `push` passes a delta to the shard at once and unchanged, so that the shard may
    process it while it is being received."""
    averages: ClassVar[bool] = False
    """Whether an update is made of the mean of all members' pushes for a step."""
    asks_lead: ClassVar[bool] = False
    """Whether the shard holds pushes until the lead has decided which of them count. Then it
    implements `held` and `decided`, and `Shard.version` is its clock. Only for the table of
    parameters.
    """

    @classmethod
    def of(cls, options: Any) -> type[ShardSide]:
        """The class to use with these options: a method may have several."""
        return cls

    def __init__(self, options: Any, shard: Shard) -> None:
        self.options = options
        self.shard = shard
        self.lo = 0
        """Where the shard begins in its table; set by the server role."""
        self.batches = ""
        """How the run cuts its data (`dlctl.job.batches.cut`); set by the server role. What a state
        says of portions and batches is of those of today only if this is the same."""
        self.measures_noise = False
        """Whether to measure how much the gradients of a step differ."""
        self.mean = Mean(self)
        """How one step is made of several pushes, for sides that average: `Method.mean`."""
        self.shared_norm: SharedNorm | None = None
        """By which all shards clip a step together, for sides that average."""

    @classmethod
    def optimizer(cls, options: Any, optimizer: Optimizer, workers: int) -> Optimizer:
        """The update rule of the shard, from the job's optimiser: a method may wrap it
        (`optim.buffered`). State in the optimiser's slots survives with the shard.

        workers: the number in the job file. After `dlctl scale` there may be more.
        """
        return optimizer

    def clock(self) -> int:
        """What `Read.at_least` is compared with; every reply carries it."""
        return self.shard.version

    def may_read(self, slot: int, at_least: int) -> bool:
        """Whether this read is answered now; else it waits until the shard changes."""
        return self.clock() >= at_least

    def shown(self, slot: int) -> tuple[int, Array] | None:
        """What a replica reads into its model instead of the shard's current state: (version,
        float32[n]). Such a read is of the whole slice. Evaluations read the current state.
        """
        return None

    @abstractmethod
    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        """Handle a push that is new, in order and finite. Exactly one outcome must be of it."""

    def left_out(self, push: messages.Push, reason: str) -> list[PushOutcome]:
        """Handle a push that is new and in order, but not usable, such as one that is not finite.

        Exactly one outcome must be of it, REFUSED or at first HELD, with the reason.
        """
        return [push.outcome(REFUSED, reason=reason)]

    def waits_for(self) -> frozenset[int]:
        """The slots whose pushes block progress; empty while no push is held."""
        return frozenset()

    def held(self) -> list[tuple[int, int, int, int]]:
        """(clock, slot, term, samples) of each held push; for sides that ask the lead."""
        return []

    def decided(self, decision: Decision) -> list[PushOutcome]:
        """Use only these pushes, once received; no other push of this clock or before counts.

        The call is repeated; a decision for a past clock is ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} asks no lead")

    def joined(self, slot: int) -> list[PushOutcome]:
        """A new term of `slot` has joined; no more pushes of its old terms will arrive."""
        return []

    def members(self, slots: frozenset[int]) -> list[PushOutcome]:
        """Set the slots that take part from now on."""
        return []

    def figures(self) -> messages.Json:
        """The method's figures that the server reports beside its own, as plain values:
        "noise_parts": `NoiseScale.parts`.
        """
        return {}

    def state(self) -> messages.Json:
        """What a replacement server needs besides the shard. It is persisted with every commit, so
        a few numbers per slot at most.

        Held pushes are not part of it: their workers resend them, as new pushes.
        """
        return {}

    def resume(self, state: messages.Json) -> None:
        """Replace the side that returned `state`; called before anything else.

        Workers that had joined before rejoin without a call of `joined`.
        """
        assert not state, f"{type(self).__name__} has a state and does not resume from it"

    def restore(self, state: messages.Json) -> None:  # noqa: B027  most sides start over
        """Resume from the `state` of a checkpoint: the shard is restored, all workers are new."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise outdated.member(self, name)


# ---------------------------------------------------------------- coordinator


class Change(NamedTuple):
    """What one operation does to a table, element by element, in the table's dtype.

    copy: y = a * x. axpy: y += a * x. The target is a table of rule "lead" or "parts". A result
    that is not finite is discarded, and the run fails.
    """

    op: str
    x: str
    y: str
    a: float = 1.0


class Sum(NamedTuple):
    """dot: the sum of x * y. norm1: the sum of |x|. In float64; each shard computes a partial sum,
    and these are added in the order of the shards."""

    op: str
    x: str
    y: str = ""


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """Operations on tables of equal size, on all shards, in one round trip: first the changes in
    order, then the sums of the result. Resumed with the sums, floats.

    Every change is applied exactly once on every shard, even if daemons die: it is committed with
    its number.
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
class DriveSnapshot:
    """`Lead.state` is complete now: a new `drive` that resumes from it reaches this point without
    any request. Earlier results are discarded. Resumed with None.
    """


Driving = VectorRequest | BatchRequest | DriveSnapshot
Drives = Generator[Driving, Any, str]
"""Returns why it has ended, as a sentence for the user."""


class DataEpoch(NamedTuple):
    """The progress of one pass over the dataset."""

    portions: int
    """Portions that the run will lease; 0: it ends before."""
    left: int
    """The number of those portions that no worker has leased yet."""
    under_way: Mapping[int, int]
    """Slot -> the number of portions that it has leased."""


NO_EPOCH = DataEpoch(0, 0, {})


@dataclass(slots=True)
class Lead:
    """Decides which workers may lease data now; may also drive the method (`drive`)."""

    portions: ClassVar[Literal["data", "clients", "batch"]] = "data"
    """What a worker leases: a part of the dataset; a client of it (`cohort`); or, if the
    coordinator drives the method (`drive`), a part of the batch that is the whole dataset."""
    cuts_epochs: ClassVar[bool] = False
    """Whether the lead ends data epochs early (`cut_epoch`)."""
    chooses: ClassVar[bool] = False
    """Whether the lead decides which pushes count (`quorum`), for a shard side that asks."""
    allows_cuts: ClassVar[bool] = False
    """Whether the model may be cut anew behind a step that the lead has decided: no replica pushes
    for a later one before it has read that step on all shards."""
    live: ClassVar[tuple[str, ...]] = ()
    """The live options that the lead reads: it sees what was set for all workers."""
    takes_turns: ClassVar[bool] = False
    """Whether `may_lease` depends on who works: the role updates `at_work`."""

    options: Any
    steps_done: int = 0
    """Acknowledged steps of all workers, updated by the coordinator role. If the lead cuts epochs,
    the role also updates `members` and the data epoch that was not cut yet, which is 0 at first and
    is in the state of such a lead."""
    members: frozenset[int] = frozenset()
    at_work: frozenset[int] = frozenset()
    """The slots that have leased portions which are not done."""
    data_epoch: int = 0
    epoch: DataEpoch = NO_EPOCH

    clock: int = 0
    """A counter of the method. With `state` it is persisted before any process learns of its
    consequences, and saved in checkpoints."""

    def __post_init__(self) -> None:
        """A hook for attributes of subclasses."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        """Why `slot` has to wait; "" if it may work now. `first_slot`: the lowest that is alive."""
        return ""

    def in_turn(self, slots: Iterable[int]) -> Iterable[int]:
        """The slots that wait for data in the order in which they are served; as they have come."""
        return slots

    def cohort(self, clients: int) -> Cohort:
        """The clients of a data epoch, where the dataset is partitioned into so many."""
        return Cohort(clients)

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float | None:
        """Which pushes of a clock count, the same on every shard; None: not yet. For leads that
        choose, where the shard side asks (`ShardSide.asks_lead`); called again when a push arrives
        or a worker joins or leaves. A number: not yet, and called again when `waited_s` reaches it
        at the latest.

        came: slot -> samples, of the living workers whose pushes for this clock all shards hold, at
        least one; the answer is a subset. members: the slots that take part. waited_s: seconds
        since all shards reached this clock; a new coordinator restarts it at 0. The answer is
        always carried out, so the lead may count it.
        """
        raise NotImplementedError(f"{type(self).__name__} declares that it chooses, and does not")

    def cut_epoch(self) -> bool:
        """Whether `data_epoch` is over: its portions that no worker has leased are dropped then.
        For leads that cut epochs.

        Until then, `may_lease` should grant no portion of the next data epoch.
        """
        raise NotImplementedError(f"{type(self).__name__} declares cuts_epochs, and cuts none")

    def portion_done(self, slot: int, steps: int, samples: int, data_epoch: int) -> None:
        """A worker has completed a portion for the first time; `steps_done` already includes it."""

    def drive(self) -> Drives:
        """The method itself, if the coordinator drives it: `portions` is "batch".

        It survives the coordinator: the results of its requests are persisted, and the next
        coordinator replays them to a new generator, from the newest `DriveSnapshot` on. So it must
        depend on the options, the state and these results alone.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares portions of a batch, and drives none"
        )

    def state(self) -> messages.Json:
        """What the next coordinator needs besides the clock; persisted with every decision."""
        return {}

    def resume(self, state: messages.Json) -> None:
        """Resume from the `state` of a coordinator that has died."""

    def figures(self) -> messages.Json:
        """The method's figures in `status`, in plain values."""
        return {}

    def loss_noise(self) -> str:
        """How it has found that the loss depends on chance, which it must not with this method: a
        problem of the run; "" if it has not.
        """
        return ""


# ---------------------------------------------------------------- a whole method

Fault = tuple[tuple[str, ...], str, str]
"""What is wrong with a job file: (the path of the key, what is wrong, what to write instead)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What the registry names. `Options` is a dataclass: the keys of the job file. Those of a type
    `Live[...]` may change during a run.
    """

    Options: type[Any]
    shape: Shape = field(default_factory=Shape)
    replica: type[ReplicaSide]
    shard: type[ShardSide] | None = None
    """The shard side of the table of parameters, if its rule is "optimizer"; all other tables
    follow their rules."""
    mean: type[Mean] = Mean
    """How one step is made of several pushes, for a shard side that averages."""
    lead: type[Lead] = Lead
    optimizer: Choice = field(default_factory=partial(Choice, name="sgd"))
    """The servers' default optimiser."""
    inner: Choice = field(default_factory=partial(Choice, name="none"))
    """The replicas' default optimiser; "none": replicas make no steps of their own, whatever the
    job file says."""
    compression: Choice = field(default_factory=partial(Choice, name="none"))
    """The default compression of pushes."""
    check: Callable[[JobFile], list[Fault]] = lambda job: []
    """The settings of a job file that conflict with this method, beyond what the shape declares."""
    check_steps: Callable[[JobFile, float], list[Fault]] = lambda job, steps: []
    """Like `check`, for a run in which all workers together make at most so many steps. It is
    called where the job file implies that, and again when the dataset is known.
    """
    check_samples: Callable[[JobFile, float], list[Fault]] = lambda job, samples: []
    """The same, for a run that trains at most so many samples."""
    variant: Callable[[Any], Mapping[str, Any]] = lambda options: {}
    """The defaults that are others with these options: each `Choice` by the name of its field."""
    bytes_kept: Callable[[JobFile, Layout], int] = lambda job, layout: 0
    """Bytes that each replica keeps at most for the method beside the model, if there are many;
    `dlctl plan` shows them."""
    experimental: bool = False
    """The method is marked in lists, and runs a reduced contract suite."""

    @property
    def live(self) -> Mapping[str, Setting]:
        """The options that may change during the run, and how users write them."""
        return {
            key: replace(own, roles=("worker", "server")) if key in self.live_in_shards else own
            for key, own in of_options(self.Options).items()
        }

    @property
    def live_in_shards(self) -> tuple[str, ...]:
        return self.shard.live if self.shard is not None else ()

    def without_live(self, options: Any, but: Collection[str] = ()) -> Any:
        """The options for a side that live changes do not reach, but for those named: to read one
        of the others raises TypeError.
        """
        elsewhere = frozenset(of_options(self.Options)) - frozenset(but)
        return _Fixed(options, elsewhere) if elsewhere else options

    def of(self, options: Mapping[str, Any]) -> Method:
        """The method with the defaults that belong to these options of a job file."""
        return replace(self, **self.variant(self.Options(**options)))

    @property
    def is_driven(self) -> bool:
        """Whether the coordinator drives the method (`Lead.drive`)."""
        return self.lead.portions == "batch"

    @property
    def takes_parts(self) -> bool:
        """Whether its servers take pushes of only some elements."""
        return self.mean.takes_parts

    def push_kind(self, options: Any) -> PushKind:
        """What one push of a replica holds. Raises Outdated."""
        try:
            return self.replica.one_push(options)
        except TypeError as error:
            if why := outdated.argument(error):
                raise outdated.Outdated(f"{self.replica.__name__}.one_push: {why}") from error
            raise

    def pushes_gradients(self, options: Any) -> bool:
        """Whether the servers' optimiser takes gradients, not the displacements of whole rounds:
        then it follows the schedule, the groups of parameters and the global clipping."""
        return self.shard is not None and not self.push_kind(options).is_displacement


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
