"""A shard, and the contract of its storage.

An update takes effect in the shard immediately and becomes durable with the next commit. Nothing
may be acknowledged before the commit that holds it is durable. A commit is atomic: whenever a
server is killed, the next one finds the state of a commit, never anything between two.

Of a state in memory a commit is durable at once: further updates rely on that, and it costs less
than anything that could be awaited. Of a state on a disk a commit is a `LogWrite` that somebody has
to perform, and updates go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.model.vector import all_finite, euclidean_norm, is_shorter
from dlctl.optim.alarm import Alarm
from dlctl.optim.base import Optimizer, Sweeping
from dlctl.optim.blocks import Rule, check_length
from dlctl.optim.matrices import kept_of
from dlctl.shards.errors import Diverged, Unusable
from dlctl.shards.history import Changes, History
from dlctl.shards.log import LogWrite
from dlctl.util.names import AVERAGE
from dlctl.wire.messages import NATURAL_MAX, Array, Json

W = "w"
"""The name of the parameters among the vectors of a shard; all others are slots."""
KEPT = "kept."
"""Prefix of what an optimiser keeps beside matrices, where it is stored with the vectors."""


POINTS = (
    # of every storage
    "commit begun", "commit written",
    # of a mapped state
    "state begun", "state created", "block updated", "undo begun", "undo block written",
    "block scattered", "vector copied", "commit half written", "vector filled", "extras filled",
    "state sealed", "state copied",
    # of a journal
    "journal written", "record written", "base written",
)  # fmt: skip
"""All kill points; not every commit passes each of them."""


NOTHING: Mapping[str, int] = MappingProxyType({})


def no_point(name: str) -> None:
    """Does nothing: the default of a storage's `point`."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Which shard of which run a state belongs to, and its size. A state that was created for
    another spec is never used.
    """

    run_id: str
    shard: int
    lo: int
    hi: int
    slots: Mapping[str, float]
    """The optimiser's slots: name -> initial value of every element."""
    averaged: int = 0
    """Elements of the averaged buffers, float64; only shard 0 has any."""
    in_commit: int = 0
    """Elements of them that are in every commit."""
    workers: int = 1
    """Upper bound of the worker slots in the committed state."""
    table: str = ""
    """The table of the method; "": the parameters."""
    dtype: str = "float32"
    """The element type of every vector in the state."""
    kept: Mapping[str, int] | None = None
    """Name -> elements of what the optimiser keeps beside matrices: then an update is one block.
    None: an update is of elements."""
    replaces: bool = False
    """A state of this run with updates may be replaced: the run has it in a checkpoint."""

    @property
    def place(self) -> str:
        """The stem of its file names: the shard, and the table."""
        return f"{self.shard}-{self.table}" if self.table else f"{self.shard}"

    @property
    def size(self) -> int:
        """Elements of each vector."""
        return self.hi - self.lo

    @property
    def vector_bytes(self) -> int:
        """Bytes of all vectors together; the rest of a state is small."""
        elements = self.size * len(self.names) + sum((self.kept or {}).values())
        return np.dtype(self.dtype).itemsize * elements

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors in their order: "w", then the slots."""
        return (W, *self.slots)


FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_state(state: Any, optimizer: Optimizer | None = None) -> Json:
    """The state that `Shard.commit` wrote, or {} if nothing was committed. Raises Unusable.

    Checksums verify the bytes; this verifies that they have the meaning this version expects. A
    reader that is no server does not know the optimiser: then any counters are accepted.
    """
    if state == {}:
        return {}
    whole = type(state) is dict and type(state.get("meta")) is dict
    if not whole or not all(is_natural(state.get(key)) for key in ("version", "samples")):
        raise Unusable("the committed state has an unknown format")
    lr, counters = state.get("lr"), state.get("counters")
    if type(lr) not in (int, float) or not abs(lr) <= FLOAT32_MAX:
        raise Unusable(f"the committed learning rate is {lr!r:.60}")
    if type(counters) is not dict or not all(map(is_natural, counters.values())):
        raise Unusable("the committed optimiser counters are not numbers")
    if optimizer is not None and counters.keys() != optimizer.counters.keys():
        raise Unusable("the committed optimiser counters belong to another optimiser")
    return dict(state)


def is_natural(value: Any) -> bool:
    """Whether a value is a plausible counter: no number of updates exceeds it, so the next commit
    stays readable, and a message can hold it.
    """
    return type(value) is int and 0 <= value <= NATURAL_MAX


def unusable(spec: Spec, error: DlctlError, where: str) -> Unusable:
    """The error that a stored state cannot be used, with the shard, the place and a hint."""
    return Unusable(
        f"the stored state of shard {spec.shard} cannot be used: {error.message}",
        where=where,
        hint=error.hint or "start the run again: it resumes from its newest checkpoint",
    )


def not_replaced(spec: Spec, where: str) -> Unusable:
    """A new state is requested, but this run already has a state with acknowledged updates.

    A deliberate fresh start removes old states first, so this one must not be lost.
    """
    return Unusable(
        f"shard {spec.shard} has a state of this run with updates; a new one must not replace it",
        where=where,
        hint="`dlctl recover` resumes from it if possible; `dlctl recover --from-checkpoint` and "
        "`dlctl start --fresh` discard it",
    )


@dataclass(frozen=True, slots=True)
class Extras:
    """Data that only the first shard holds; set once, with the initial values."""

    averaged: Array
    """float64: the averaged buffers of the model."""


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
    def kept(self) -> Mapping[str, Array]:
        """What the optimiser keeps beside matrices: name -> float32[`Spec.kept`]."""
        ...

    @property
    def extras(self) -> Extras: ...

    def prepare(self, delta: Delta, count: int, next_rule: Callable[[], Rule] | None) -> bool:
        """Start an update early: the first `count` values of a dense delta of the shard's length
        have arrived; the rest may never arrive. No visible value may change. Returns whether the
        storage uses them.

        `next_rule`: makes the rule of that update; None: continue it if it was begun, else ignore
        it. A storage that refers to the values keeps their memory from being reused.
        """
        ...

    def prepared_squares(self, delta: Delta) -> float | None:
        """About the sum of the squares of a delta that has arrived, if it is being prepared."""
        ...

    def forget_prepared(self) -> None:
        """Drop a prepared update: after this returns, nothing of it is written or referenced."""
        ...

    def update(
        self, delta: Delta, rule: Rule, lr: float, counters: Mapping[str, int] = NOTHING
    ) -> None:
        """Apply `rule` to all elements that `delta`, of the shard's length, touches. lr,
        counters: the rule's learning rate and the counters that were set for it, stored for a
        replay.
        """
        ...

    def fill(self, vectors: Mapping[str, Array], extras: Extras | None) -> None:
        """Set whole vectors ("w", slots by name, kept ones as "kept.<name>"), and the extras, which
        may be set once."""
        ...

    def commit(self, state: Json, *, may_rotate: bool = True) -> LogWrite | None:
        """Commit all changes since the last commit, together with `state`. None: they are durable.
        Else they are once this write, and all before it, are performed. may_rotate: a journal that
        is long may be started over, with a copy of everything.
        """
        ...

    def resume(self, optimizer: Optimizer) -> Json:
        """The state of the last commit; {} if there was none. To be called once, before all else.

        Restores the optimiser's counters and learning rate. Raises Unusable.
        """
        ...

    def close(self) -> None:
        """No update follows; the durable state can be verified in full when it is reopened."""
        ...


class Storages(Protocol):
    """The factory of a server's storages: the only part of a shard that a driver provides."""

    def create(self, spec: Spec) -> Storage:
        """A new state: zeros and the slots' initial values; replaces one without updates.

        Raises DlctlError, naming place and size, if there is no room for it; Unusable if this run
        already has a state with committed updates.
        """
        ...

    def reopen(self, spec: Spec) -> Storage:
        """The state that an earlier server of this shard stored. Raises Unusable."""
        ...

    def of_table(self, name: str) -> Storages:
        """The storages of another table of this server; discarded together with this one."""
        ...

    def discard(self) -> None:
        """The run has ended: remove the durable state."""
        ...


class Shard:
    """A slice of the parameter vector, its optimiser, and the number of updates applied to it."""

    def __init__(self, optimizer: Optimizer, storage: Storage) -> None:
        self.optimizer = optimizer
        self.storage = storage
        self.version = 0
        self.samples = 0
        """The number of samples in the updates so far."""
        self.clip_norm = 0.0
        """Maximum norm of an update's gradient, which is scaled down to it; 0: no limit."""
        self._peak = optimizer.lr
        self._factor: Callable[[int], float] | None = None
        self.size = storage.w.size
        """Elements of each vector."""
        self.history = History(self.size)
        """What the newest updates changed; not durable."""
        self.remembers = True
        """Whether `history` records the newest updates."""
        self._alarm = Alarm()
        # isinstance of a Protocol takes a tenth of the time of a sparse update.
        self._sweeping = optimizer if isinstance(optimizer, Sweeping) else None
        self._takes_matrices = kept_of(optimizer) is not None

    @property
    def w(self) -> Array:
        """float32[n], or of the table's dtype. A caller that writes to it other than by `apply` has
        to call `history.forget()` and `forget_prepared()`."""
        return self.storage.w

    @property
    def slots(self) -> Mapping[str, Array]:
        """The optimiser's vectors: name -> float32[n]."""
        return self.storage.slots

    @property
    def lr(self) -> float:
        """The optimiser's peak learning rate, effective with the next update."""
        return self._peak

    @lr.setter
    def lr(self, lr: float) -> None:
        self._peak = lr
        self._set_rate()

    @property
    def scheduled_lr(self) -> float | None:
        """The learning rate of the next update, if it follows a schedule."""
        return None if self._factor is None else self.optimizer.lr

    def begins_with(self, values: Array) -> Mapping[str, Array]:
        """The initial vectors of a new shard of a model with these initial values."""
        is_averaged = AVERAGE in self.optimizer.slots
        return {W: values, AVERAGE: values} if is_averaged else {W: values}

    def restore(self, version: int, samples: int) -> None:
        """Resume from a checkpoint with this number of updates and samples."""
        self.version, self.samples = version, samples
        self._set_rate()

    def follow(self, factor: Callable[[int], float]) -> None:
        """Set the learning rate to lr times this function of `samples` from now on."""
        self._factor = factor
        self._set_rate()

    def _set_rate(self) -> None:
        lr = self._peak if self._factor is None else self._peak * self._factor(self.samples)
        if lr != self.optimizer.lr:
            self.forget_prepared()
            self.optimizer.lr = lr

    def prepare(self, values: Array, count: int, *, is_new: bool) -> bool:
        """The first `count` of a dense delta's values, float32[n], have arrived: process them if
        possible, and return whether that was done. `apply` continues from there if the next update
        has these values in this memory; the result of any other update is not affected. is_new: it
        may be begun; else it is only resumed.
        """
        assert count <= values.size == self.size, f"{count} of {values.size} for {self.size}"
        if self.clip_norm or self._takes_matrices:
            return False  # The norm is unknown until the whole delta has arrived.
        return self.storage.prepare(Delta(values), count, self._next_rule if is_new else None)

    def is_shorter(self, delta: Delta, length: float) -> bool:
        """Whether the norm of a delta that has arrived is at most `length`: so it is finite."""
        return is_shorter(delta.values, length, self.storage.prepared_squares(delta))

    def forget_prepared(self) -> None:
        """Drop a prepared update: after this returns, nothing of it is written or referenced."""
        self.storage.forget_prepared()

    def _next_rule(self) -> Rule:
        """The rule of the next update, without advancing the optimiser's counters."""
        counters = dict(self.optimizer.counters)
        rule = self._alarm.over(self.optimizer.begin_update())
        self.optimizer.counters.update(counters)
        return rule

    def apply(
        self,
        delta: Delta,
        samples: int = 0,
        norm: float | None = None,
        counters: Mapping[str, int] = NOTHING,
        changes: Array | None = None,
    ) -> None:
        """Apply one update by the optimiser's rule, of this number of samples. A sparse update
        costs O(its length), unless the rule then sweeps all elements. Raises Diverged.

        norm: for clipping; None: the delta's own. counters: of the optimiser, to set for this
        update, integers >= 0, by which a method's shard side passes values to the rule that wraps
        the optimiser. changes: the only positions where the parameters change, int64[n], strictly
        increasing; None: all that the delta has, or that the rule sweeps.
        """
        check_length(delta, self.size)
        self.optimizer.counters.update(counters)
        if delta.values.dtype != self.w.dtype:
            delta = Delta(delta.values.astype(self.w.dtype), delta.indices, delta.positions)
        if self.clip_norm:
            norm = euclidean_norm(delta.values) if norm is None else norm
            delta = _clipped(delta, self.clip_norm, norm)
        if delta.indices is not None and (self._takes_matrices or self._sweeps_next()):
            delta = Delta(_with_zeros(delta, self.size))
        rule = self._alarm.over(self.optimizer.begin_update())
        if not self.remembers:
            pass
        elif changes is not None and delta.indices is not None and not self.clip_norm:
            self.history.note(self.version + 1, changes)
        else:
            rule = self.history.watch(self.version + 1, delta, rule)
        self.storage.update(delta, rule, self.optimizer.lr, counters)
        if self._alarm.has_rung:
            self._raise_if_diverged()
        self.version += 1
        self.samples = min(self.samples + samples, NATURAL_MAX)
        if self._factor is not None:
            self._set_rate()

    def _sweeps_next(self) -> bool:
        return self._sweeping is not None and self._sweeping.sweeps_next()

    def _raise_if_diverged(self) -> None:
        self._alarm.has_rung = False
        for name, array in {W: self.w, **self.slots, **self.storage.kept}.items():
            if not all_finite(array):
                what = f'an update would have made "{name}" infinite or NaN, and was discarded'
                raise Diverged(what, hint="a smaller lr or weight_decay may help")

    def changes_since(self, version: int, seen: Array | None = None) -> Changes | None:
        """The difference from an earlier version of this shard; None: unknown.

        seen: the values as workers see them, if these are not the parameters themselves.
        """
        return self.history.since(version, self.version, self.w if seen is None else seen)

    def commit(self, meta: Json) -> None:
        """Commit all updates so far, durable when this returns."""
        if (write := self.record(meta)) is not None:
            write.perform()

    def record(self, meta: Json, *, may_rotate: bool = True) -> LogWrite | None:
        """Commit all updates so far, with `meta`: the other state needed to resume. None: they are
        durable. Else they are once this write, and all before it, are performed. may_rotate: see
        `Storage.commit`.
        """
        return self.storage.commit(
            {
                "version": self.version,
                "samples": self.samples,
                "lr": self._peak,
                "counters": self.optimizer.counters,
                "meta": meta,
            },
            may_rotate=may_rotate,
        )

    def resume(self) -> Json:
        """Resume from the last commit; returns its `meta`, {} if nothing was committed yet.

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
    """Scale a delta down to `norm_max`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = norm_max / (norm + 1e-6)
    if factor >= 1.0:
        return delta
    return delta._replace(values=delta.values * np.float32(factor))


def _with_zeros(delta: Delta, size: int) -> Array:
    """float32[size]: a sparse delta with its missing elements as zeros."""
    full = np.zeros(size, np.float32)
    full[delta.indices] = delta.values
    return full
