"""A shard, and the contract of what is behind it.

An update becomes part of the shard at once and part of what survives at the next `commit`. Nothing
may be acknowledged before the commit that holds it. A commit is all or nothing: whatever moment a
server is killed at, the next one finds the state of a commit, never anything between two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.messages import Array, Json
from dlctl.optim.alarm import Alarm
from dlctl.optim.base import Optimizer, Sweeping
from dlctl.optim.blocks import Rule, check_length
from dlctl.shards.history import Changes, History
from dlctl.util.names import AVERAGE
from dlctl.vector import all_finite, euclidean_norm

W = "w"
"""The name of the parameters among the vectors of a shard; all others are slots."""
Point = Callable[[str], None]
"""Called with a name at every step that may be the last one: where tests and failpoints kill."""


POINTS = (
    # of every storage
    "commit begun", "commit written",
    # of a mapped state
    "state begun", "state created", "block updated", "undo begun", "undo block written",
    "block scattered", "vector copied", "commit half written", "vector filled", "extras filled",
    "state sealed", "state copied",
    # of a journal
    "record written", "base written",
)  # fmt: skip
"""All there are; not every commit passes each of them."""


NOTHING: Mapping[str, int] = MappingProxyType({})


def no_point(name: str) -> None:
    """Nobody wants to kill here."""


class Unusable(DlctlError):
    """A state that was kept cannot be gone on from; the message says why."""


class NoRoom(DlctlError):
    """The disk has no room for a state just now. What is on it comes to no harm by that."""


class Held(DlctlError):
    """Another process has this state open. It may be about to end; a later attempt may succeed."""


class Diverged(DlctlError):
    """An update has made something infinite or NaN. It is in no commit, and none may follow: of
    this shard there is what survives.
    """


@dataclass(frozen=True, slots=True)
class Spec:
    """Whose state it is, and how large. A state that was made for another one is never used."""

    run_id: str
    shard: int
    lo: int
    hi: int
    slots: Mapping[str, float]
    """The optimiser's slots: name -> what every element begins with."""
    averaged: int = 0
    """Elements of the averaged buffers, float64; only shard 0 has any."""
    workers: int = 1
    """At most so many slots of workers are ever in the committed state."""
    table: str = ""
    """Which table of the method it is; "": the parameters."""
    dtype: str = "float32"
    """Of every vector."""

    @property
    def place(self) -> str:
        """What its files are called by: the shard, and the table."""
        return f"{self.shard}-{self.table}" if self.table else f"{self.shard}"

    @property
    def size(self) -> int:
        """Elements of each vector."""
        return self.hi - self.lo

    @property
    def vector_bytes(self) -> int:
        """Of all vectors together; what a state takes beside them is small."""
        return np.dtype(self.dtype).itemsize * self.size * len(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors in their order: "w", then the slots."""
        return (W, *self.slots)


COUNT_MAX = 2**62
FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_state(state: Any, optimizer: Optimizer) -> Json:
    """What `Shard.commit` has written, or {} if nothing was committed. Raises Unusable.

    Checksums say that it is what was written; this, that who wrote it meant the same by it.
    """
    if state == {}:
        return {}
    whole = type(state) is dict and type(state.get("meta")) is dict
    if not whole or not all(is_natural(state.get(key)) for key in ("version", "samples")):
        raise Unusable("the state that was committed is not of our kind")
    lr, counters = state.get("lr"), state.get("counters")
    if type(lr) not in (int, float) or not abs(lr) <= FLOAT32_MAX:
        raise Unusable(f"the rate that was committed is {lr!r:.60}")
    if type(counters) is not dict or counters.keys() != optimizer.counters.keys():
        raise Unusable("the optimiser's counters that were committed are of another optimiser")
    if not all(map(is_natural, counters.values())):
        raise Unusable("the optimiser's counters that were committed are not numbers")
    return dict(state)


def is_natural(value: Any) -> bool:
    """Also after more updates than there will ever be, or the next commit could not be read."""
    return type(value) is int and 0 <= value < COUNT_MAX


def unusable(spec: Spec, error: DlctlError, where: str) -> Unusable:
    """The same reason, with the shard, the place and a way on."""
    return Unusable(
        f"the kept state of shard {spec.shard} cannot be used: {error.message}",
        where=where,
        hint=error.hint or "start the run again: it goes on from its newest checkpoint",
    )


def not_replaced(spec: Spec, where: str) -> Unusable:
    """A new state is wanted, and there is one of this run with updates that somebody was told of.

    Whoever begins anew on purpose removes the states of before; this one was not to be lost.
    """
    return Unusable(
        f"shard {spec.shard} has a state of this run with updates; a new one must not replace it",
        where=where,
        hint="`dlctl recover` goes on with it if it can; `dlctl recover --from-checkpoint` and "
        "`dlctl start --fresh` give it up",
    )


@dataclass(frozen=True, slots=True)
class Extras:
    """What only the first shard holds; it is set once, with the initial values."""

    averaged: Array
    """float64"""


class Storage(Protocol):
    """The arrays of one shard, float32 unless its `Spec` says otherwise. All of them are changed by
    `update` and `fill` only."""

    survives: bool
    """Whether a commit outlives the process."""

    @property
    def w(self) -> Array:
        """float32[n], every update included. A view: valid until the next update."""
        ...

    @property
    def slots(self) -> Mapping[str, Array]:
        """Name -> float32[n], as `w`."""
        ...

    @property
    def extras(self) -> Extras: ...

    def prepare(self, delta: Delta, count: int, next_rule: Callable[[], Rule] | None) -> bool:
        """The first `count` values of a dense delta are there, of the shard's length; all of it may
        be the next update, or never come. Nothing that can be seen here may change. Returns whether
        something was made of it.

        `next_rule`: makes the rule of that update; None: go on if it was begun, or leave it.
        Whoever holds its values keeps their memory from being used for anything else.
        """
        ...

    def forget_prepared(self) -> None:
        """Drop what is prepared: when this returns, nothing of it is written or held."""
        ...

    def update(
        self, delta: Delta, rule: Rule, lr: float, told: Mapping[str, int] = NOTHING
    ) -> None:
        """Have `rule` go over all that `delta`, of the shard's length, touches; what it leaves is
        the shard's then. lr, told: the rate that the rule has, and the counters that were set for
        it, for who repeats it.
        """
        ...

    def fill(self, vectors: Mapping[str, Array], extras: Extras | None) -> None:
        """Set whole vectors ("w", slots by name), and the extras, which may be set once."""
        ...

    def commit(self, state: Json) -> None:
        """Make all changes since the last commit survive, together with `state`."""
        ...

    def resume(self, optimizer: Optimizer) -> Json:
        """The state of the last commit; {} if there was none. To be called once, at first.

        Leaves the optimiser's counters and rate as they were. Raises Unusable.
        """
        ...

    def close(self) -> None:
        """No update comes any more; what survives may be checked in full when it is opened."""
        ...


class Storages(Protocol):
    """Where a server gets its storage from: the one thing of a shard that is a driver's."""

    def create(self, spec: Spec) -> Storage:
        """A new state, zeros and the slots' first values; replaces one without updates.

        Raises DlctlError, naming place and size, if there is no room for it; Unusable if there is
        a state of this run that updates were committed to.
        """
        ...

    def reopen(self, spec: Spec) -> Storage:
        """The state that an earlier server of this shard has left. Raises Unusable."""
        ...

    def of_table(self, name: str) -> Storages:
        """The storages of another table of this server; what ends here ends there."""
        ...

    def discard(self) -> None:
        """The run has come to its end: remove what survives."""
        ...


class Shard:
    """A slice of the parameter vector, its optimiser, and the number of updates applied to it."""

    def __init__(self, optimizer: Optimizer, storage: Storage) -> None:
        self.optimizer = optimizer
        self.storage = storage
        self.version = 0
        self.samples = 0
        """In the updates so far."""
        self.clip_norm = 0.0
        """The most that the norm of an update's gradient may be: it is scaled to that; 0: any."""
        self.shares_norm = False
        """Whether that norm is the one of all shards together: `apply` is told it."""
        self._peak = optimizer.lr
        self._factor: Callable[[int], float] | None = None
        self.size = storage.w.size
        """Elements of each vector."""
        self.history = History(self.size)
        """What the newest updates changed. It does not survive, either."""
        self.remembers = True
        """Whether the newest updates are kept in mind."""
        self._alarm = Alarm()
        # To ask a protocol takes as long as a tenth of a sparse update.
        self._sweeping = optimizer if isinstance(optimizer, Sweeping) else None

    @property
    def w(self) -> Array:
        """float32[n], or of the table's dtype. Who writes to it otherwise than by `apply` has to
        `history.forget()` and to `forget_prepared()`."""
        return self.storage.w

    @property
    def slots(self) -> Mapping[str, Array]:
        """The optimiser's vectors: name -> float32[n]."""
        return self.storage.slots

    @property
    def lr(self) -> float:
        """The optimiser's rate, the peak of its schedule. It changes with the next update."""
        return self._peak

    @lr.setter
    def lr(self, lr: float) -> None:
        self._peak = lr
        self._set_rate()

    @property
    def scheduled_lr(self) -> float | None:
        """The rate of the next update, if it follows a schedule."""
        return None if self._factor is None else self.optimizer.lr

    def begins_with(self, values: Array) -> Mapping[str, Array]:
        """What a new shard is to be filled with if the model begins with these values."""
        is_averaged = AVERAGE in self.optimizer.slots
        return {W: values, AVERAGE: values} if is_averaged else {W: values}

    def restore(self, version: int, samples: int) -> None:
        """Go on from a checkpoint with so many updates, of so many samples."""
        self.version, self.samples = version, samples
        self._set_rate()

    def follow(self, factor: Callable[[int], float]) -> None:
        """From now on the rate is lr times this, a function of `samples`."""
        self._factor = factor
        self._set_rate()

    def _set_rate(self) -> None:
        lr = self._peak if self._factor is None else self._peak * self._factor(self.samples)
        if lr != self.optimizer.lr:
            self.forget_prepared()
            self.optimizer.lr = lr

    def prepare(self, values: Array, count: int, *, is_new: bool) -> bool:
        """The first `count` of a dense delta's values, float32[n], have come: do what can be done
        with them, and return whether something was. `apply` goes on from there if it gets these
        values, in this memory, as the next update; all others come to what they would have come to
        without this. is_new: it may be begun; else it is only resumed.
        """
        assert count <= values.size == self.size, f"{count} of {values.size} for {self.size}"
        if self.clip_norm:
            return False  # Its norm is known when all of it is there.
        return self.storage.prepare(Delta(values), count, self._next_rule if is_new else None)

    def forget_prepared(self) -> None:
        """Drop what is prepared: when this returns, nothing of it is written or held."""
        self.storage.forget_prepared()

    def _next_rule(self) -> Rule:
        """Of an update that is not counted yet."""
        counters = dict(self.optimizer.counters)
        rule = self._alarm.over(self.optimizer.begin_update())
        self.optimizer.counters.update(counters)
        return rule

    def apply(
        self,
        delta: Delta,
        samples: int = 0,
        norm: float | None = None,
        told: Mapping[str, int] = NOTHING,
        changes: Array | None = None,
    ) -> None:
        """One update by the optimiser's rule, of so many samples. A sparse one costs O(its length),
        unless the rule is one for all elements then. Raises Diverged.

        norm: to be clipped by; None: the delta's own. told: counters of the optimiser that are set
        for this update, whole numbers from 0 on: what a method's shard side has to tell a rule that
        it has put before the optimiser. changes: where alone the parameters change by it, int64[n],
        strictly increasing; None: all that the delta has, or that the rule goes over.
        """
        check_length(delta, self.size)
        self.optimizer.counters.update(told)
        if delta.values.dtype != self.w.dtype:
            delta = Delta(delta.values.astype(self.w.dtype), delta.indices, delta.positions)
        if self.clip_norm:
            norm = euclidean_norm(delta.values) if norm is None else norm
            delta = _clipped(delta, self.clip_norm, norm)
        if delta.indices is not None and self._sweeps_next():
            delta = Delta(_with_zeros(delta, self.size))
        rule = self._alarm.over(self.optimizer.begin_update())
        if not self.remembers:
            pass
        elif changes is not None and delta.indices is not None and not self.clip_norm:
            self.history.note(self.version + 1, changes)
        else:
            rule = self.history.watch(self.version + 1, delta, rule)
        self.storage.update(delta, rule, self.optimizer.lr, told)
        if self._alarm.has_rung:
            self._look_for_what_is_not_finite()
        self.version += 1
        self.samples += samples
        if self._factor is not None:
            self._set_rate()

    def _sweeps_next(self) -> bool:
        return self._sweeping is not None and self._sweeping.sweeps_next()

    def _look_for_what_is_not_finite(self) -> None:
        self._alarm.has_rung = False
        for name, array in {W: self.w, **self.slots}.items():
            if not all_finite(array):
                what = f'an update would have made "{name}" infinite or NaN, and was not kept'
                raise Diverged(what, hint="a smaller lr or weight_decay may help")

    def changes_since(self, version: int, seen: Array | None = None) -> Changes | None:
        """What differs from an earlier version of this shard; None: that is not known.

        seen: what workers see of it, if these are not the parameters themselves.
        """
        return self.history.since(version, self.version, self.w if seen is None else seen)

    def commit(self, meta: Json) -> None:
        """Make everything so far survive, with `meta`: what else has to be known to go on."""
        self.storage.commit(
            {
                "version": self.version,
                "samples": self.samples,
                "lr": self._peak,
                "counters": self.optimizer.counters,
                "meta": meta,
            }
        )

    def resume(self) -> Json:
        """Go on where the last commit was; returns its `meta`, {} if nothing was committed yet.

        Raises Unusable.
        """
        state = self.storage.resume(self.optimizer)
        if not state:
            return {}
        self.version, self.samples = state["version"], state["samples"]
        self.lr = state["lr"]
        meta: Json = state["meta"]
        return meta


def _clipped(delta: Delta, norm_max: float, norm: float) -> Delta:
    """As torch.nn.utils.clip_grad_norm_ does it."""
    factor = norm_max / (norm + 1e-6)
    if factor >= 1.0:
        return delta
    return delta._replace(values=delta.values * np.float32(factor))


def _with_zeros(delta: Delta, size: int) -> Array:
    """float32[size]: a sparse delta, and zeros where it has nothing."""
    full = np.zeros(size, np.float32)
    full[delta.indices] = delta.values
    return full
