"""What a method is: up to three sides of one conversation, in one file.

- The worker side is a generator that reads like the paper's pseudocode. It *yields requests* (next
  gradient, fetch, push) and is resumed when they are done; the worker role (`roles/worker.py`)
  knows about leases, retries, windows and limits, so that a method does not.
- The server side says what a push means to a shard: apply it now, hold it in a barrier, or drop it.
  The server role (`roles/server.py`) has made sure before that it is new, in order and sound.
- The coordinator side says who may work now, and may drive the shards itself with vector
operations.

Parameters, gradients and accrued updates are flat vectors (numpy, or torch on a GPU); every piece
of state lies in attributes, so that it can be saved, restored and changed live between two
requests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dlctl import messages
from dlctl.compress.base import Delta
from dlctl.config import Choice
from dlctl.messages import REFUSED, Array
from dlctl.settings import Setting
from dlctl.shards.base import Shard
from dlctl.vector import Vector, copy_into, to_host, zeros_like

# ---------------------------------------------------------------- what a worker side may ask for


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start a fetch of all shards, answered with what they have once their clock is `clock_min`.

    wait: resume only when the parameters are in place; resumed with the clock they are of.
    Otherwise resume at once; they are put in place between two steps, when they have come.
    """

    wait: bool
    clock_min: int = 0


LEFT_OUT_MAX = 10
"""So many gradients in a row that are of no use: by then it is hardly the data, of which a tenth
may be NaN, but the replica, which its own steps have ruined. It goes on from what the servers have,
if `workers.nonfinite_steps_max` is larger: else it is quarantined before.
"""


@dataclass(frozen=True, slots=True)
class NextGradient:
    """Lease data if needed and compute. Resumed with a `Step`, or None: no data for now.

    On None nothing may stay behind unpushed, because this may be the end of the run. Batches whose
    gradient is of no use, not finite or too large, are left out, and the next one is computed
    instead; but right after `NextData` it is the announced batch or, if that one is of no use,
    None. See `LEFT_OUT_MAX`.
    """

    own_lr: float | None = None
    """The replica makes a step of its own at once, parameters -= own_lr * gradient, and the `Step`
    has no gradient then: to gather it into one vector takes longer than to go along it. It may be
    made, and `settle` be called, before `run` hears of it.
    """


@dataclass(frozen=True, slots=True)
class NextData:
    """Wait until there is a batch to compute. Resumed with its `Data`, or None: no data for now.

    On None nothing may stay behind unpushed, because this may be the end of the run.
    """


@dataclass(frozen=True, slots=True)
class Push:
    """Send part of `vector`: the compressor takes what it sends out of it, the residual stays in
    it.

    Resumed as soon as the push is on its way; it waits only while the window is full.
    """

    vector: Vector | None
    """None: an empty push, only to take part."""
    samples: int
    clock: int = 0
    portion: int = 0
    """The portion of `clock` that this is the sum of, for methods that push portion by portion."""


class Data(NamedTuple):
    """The batch that is computed next."""

    data_epoch: int
    """Also `BatchRequest.clock`, for methods that the coordinator drives."""
    portion: int
    is_last: bool
    """Of its portion."""


class Step(NamedTuple):
    """One gradient of the mean loss over `samples` samples, at the parameters as they were.

    Its memory may be written to; it is good until the next one is asked for.
    """

    gradient: Vector | None
    """None: the replica has made a step of its own along it."""
    samples: int
    loss: float
    norm: float = math.inf
    """Euclidean, of the gradient; infinite if it is not known."""


Request = Fetch | NextData | NextGradient | Push
Requests = Generator[Request, Any, None]


class WorkerSide(ABC):
    """One replica. `parameters` is the model itself: a step computes with what stands there."""

    def __init__(self, options: Any, parameters: Vector, slot: int) -> None:
        self.options = options
        self.parameters = parameters
        self.slot = slot
        self.residual = zeros_like(parameters)
        """What was accrued and not yet sent: error feedback, and all there is to save of a replica,
        between a push and the step that follows."""
        self.intervals: dict[str, int] = {}
        """Option -> its number of steps for as long as it is "auto"; the worker role sees to it."""
        self.fetched_clock = 0
        """Of the newest fetch that is in place, all of it; the worker role sees to it."""

    def interval(self, key: str) -> int:
        """Steps of an option that is a number of them or "auto", as they are in force now."""
        steps: int | str = getattr(self.options, key)
        return steps if isinstance(steps, int) else self.intervals.get(key, 1)

    def changes_parameters(self) -> bool:
        """Whether `run` may write to `parameters` between two fetches. A copy is kept then of what
        was fetched, if the servers send changes only. It may change whenever `run` is resumed.

        Nobody else may write there. If False, what a task's own `loss` does to the parameters is
        overwritten only where the servers have changed something.
        """
        return True

    def settle(self) -> None:  # noqa: B027  most methods have nothing else
        """Bring the residual up to date: what was fetched is about to be put into `parameters`, and
        no gradient is being computed."""

    def placed(self, lo: int, hi: int) -> None:  # noqa: B027  most methods leave it as it is
        """What was fetched has just been put into `parameters[lo:hi]`."""

    def restore(self, residual: Array) -> None:
        """Add the residual of before the stop, float32[d]; gradients may have come to it since."""
        made_since = to_host(self.residual).copy()
        copy_into(self.residual, residual + made_since)

    @abstractmethod
    def run(self) -> Requests:
        """The method as a replica sees it; it does not come to an end by itself."""


# ---------------------------------------------------------------- servers


class Outcome(NamedTuple):
    """What became of one push; `kind` is one of APPLIED, HELD, LATE, REFUSED (`messages.Ack`)."""

    slot: int
    epoch: int
    seq: int
    kind: str
    staleness: int = 0
    """Updates that came between the version the gradient was of and this one, on this shard."""
    reason: str = ""
    """Of a push that was refused."""


class ServerSide(ABC):
    """One shard. Every method returns the pushes that it settled, in order."""

    applies_as_pushed: ClassVar[bool] = False
    """Whether `push` hands a delta to the shard at once and as it is, so that the shard may work on
    it while it comes."""

    def __init__(self, options: Any, shard: Shard) -> None:
        self.options = options
        self.shard = shard

    def clock(self) -> int:
        """What `Fetch.clock_min` is compared with."""
        return self.shard.version

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

    def joined(self, slot: int) -> list[Outcome]:
        """A new epoch of `slot` has joined; pushes of its old epochs will not come any more."""
        return []

    def members(self, slots: frozenset[int]) -> list[Outcome]:
        """These slots take part from now on."""
        return []

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


# ---------------------------------------------------------------- coordinator


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """One operation on the named vectors of all shards; resumed with the result.

    copy: y = x. scale: x *= a. axpy: y += a * x. zero: x = 0. mul: y *= x. free: forget x.
    dot: sum of x * y. norm1: sum of |x|. Partial sums in float64 are added in shard order. A vector
    begins as zeros when it is first named; "w" is the parameters, float32, all others are float64.
    """

    op: str
    x: str
    y: str = ""
    a: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Have all replicas go over the whole dataset once, at the present parameters, adding their
    gradient sums into the vector "accrued".

    Resumed with (sum of losses, samples) when every portion is in "accrued" of every shard, once.
    The sum is infinite if the loss or the gradient of any batch was not finite, or a shard has
    refused a portion: then it is not in "accrued".
    """

    clock: int
    """Greater with every request; it tells the pushes of one batch from those of another."""


Drives = Generator[VectorRequest | BatchRequest, Any, str]
"""Returns why it has come to its end, as a sentence for the user."""


@dataclass(slots=True)
class CoordinatorSide:
    """Who may lease data now; for methods that the coordinator drives, also the driving."""

    options: Any
    steps_done: int = 0
    """Acknowledged steps of all workers, kept up by the coordinator role."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        """Why `slot` has to wait; "" if it may work now. `first_slot`: the lowest that lives."""
        return ""

    def drive(self) -> Drives | None:
        """The method itself, if the coordinator drives it."""
        return None


# ---------------------------------------------------------------- a whole method


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the registry names. `Options` is a frozen dataclass: the keys of the job file."""

    Options: type[Any]
    worker: type[WorkerSide]
    server: type[ServerSide]
    coordinator: type[CoordinatorSide] = CoordinatorSide
    live: Mapping[str, Setting] = field(default_factory=dict)
    """Options that may change while the run goes on, and how people write them. With `interval`,
    `push_every_steps` and `fetch_every_steps` may become "auto": a method with these asks
    `WorkerSide.interval`, and its options have `comm_share_max` and `auto_steps_max`, too."""
    optimizer: Choice = field(default_factory=partial(Choice, name="sgd"))
    """The servers' one, for a job file that names none."""
    simulated_only: bool = False
    exact_pushes: bool = False
    """Whether every entry of every push must arrive as it was computed, in float32, and workers
    must see the parameters as they are."""
    survives_server: bool = True
    """Whether a run can go on when a server has died. No state is kept where it cannot."""


def dense(delta: Delta, size: int) -> Array:
    """A delta as a full vector, float32[size]; the array itself if it is dense already."""
    if delta.indices is None:
        return delta.values
    full = np.zeros(size, np.float32)
    full[delta.indices] = delta.values
    return full
