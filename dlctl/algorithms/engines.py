"""The engine of a method: its part where the model is, in torch, with a twin in numpy.

An engine is a subclass of `MethodEngine`, made by the worker of a replica (`Shape.engine`). Its
*operations*, which it lists, take arrays and return a tuple of arrays, all numpy. A replica
requests one with `Engine(op=..., arrays=...)`. An engine may save a `state`, which `restore` takes
back ahead of all operations. Between operations it is told of the replica's steps:

    begin_step
    for each batch: see_batch, a forward pass, perhaps reweigh, a backward pass
    discard_step, if the gradient is not usable

Where a replica is several processes (`Shape.ranks`) each has an engine. All of them make every
operation, `state` and `restore`, in the same order with the same arrays, so that they can make
collectives in it; the result of rank 0 counts. The model of rank 0 is the replica's; only the
engines of the other ranks read or write their models. Steps are those of rank 0, and only its
engine is told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from dlctl.algorithms.needs import Extent
from dlctl.errors import JobFailed
from dlctl.wire.messages import Array

SAVED_AS = "engine."
"""Before the names of its state, in the file of its replica."""
Operation = Callable[..., tuple[Array, ...]]


class EnginePlace(NamedTuple):
    """The environment of an engine in torch."""

    replica: Any
    """The worker's `TorchReplica`."""
    options: Any
    """The method's options, as the run began: for those that change live, pass the current values
    to operations."""
    rank: int = 0
    ranks: int = 1
    group: Any = None
    """The torch.distributed group of the replica's processes; None: it is one process."""


class TwinPlace(NamedTuple):
    """The environment of an engine in numpy, in the simulator."""

    problem: Any
    """Its `Objective`."""
    parameters: Array
    """float32[d], the live model."""
    options: Any


class MethodEngine:
    """The base of engines and of their twins: no operations, no state, and it ignores all steps."""

    def operations(self) -> Mapping[str, Operation]:
        """Name -> what it does. The same at any time."""
        return {}

    def begin_step(self, samples: int, scale: float) -> None:
        """A step begins: the gradient of the mean loss over so many samples, in one or several
        batches. scale: of the loss, with fp16 a large number; gradients within the backward pass
        are so many times larger.
        """

    def see_batch(self, batch: Any, part: float) -> None:
        """The next batch of the step, before its forward pass: as the task's loss gets it, but not
        on the device yet; in the simulator an `objectives.Batch`. part: its fraction of the step's
        samples, by which its loss is multiplied.
        """

    def reweigh(self, factor: Any) -> None:
        """The gradient of the step's batches so far was multiplied by this, because the task's loss
        has returned a weight for the next one. A number, or a tensor of one number.
        """

    def discard_step(self) -> None:
        """The gradient of the step is not usable: the method does not get it."""

    def state(self) -> dict[str, Array]:
        """What has to be saved, between two operations."""
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the `state` before a stop, ahead of all operations."""


def to_saved(state: Mapping[str, Array]) -> dict[str, Array]:
    """The state of an engine, under its names in a checkpoint."""
    return {f"{SAVED_AS}{name}": array for name, array in state.items()}


def of_saved(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The state of an engine, of all that a replica has saved."""
    return {
        name.removeprefix(SAVED_AS): array
        for name, array in arrays.items()
        if name.startswith(SAVED_AS)
    }


class Operations:
    """An engine with every call guarded and every result checked. Raises JobFailed for an error of
    the engine, with the method and the operation.
    """

    def __init__(
        self,
        engine: MethodEngine,
        method: str,
        guard: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """guard: around every call, with its name, to report it with an exception."""
        if not isinstance(engine, MethodEngine):
            raise JobFailed(
                f"{method}: its engine is of type {type(engine).__name__}, not a MethodEngine",
                hint="derive it from dlctl.algorithms.engines.MethodEngine",
            )
        self.engine = engine
        self.method = method
        self._guard = guard
        self._known = dict(engine.operations())

    def run(
        self, op: str, arrays: tuple[Array, ...], shapes: tuple[Extent, ...] | None = None
    ) -> tuple[Array, ...]:
        """The arrays of an operation; shapes: what they have to be."""
        if op not in self._known:
            raise JobFailed(
                f'{self.method}: its engine has no operation "{op}"',
                hint=f"it has {', '.join(sorted(self._known)) or 'none'}",
            )
        what = self._what(f'operation "{op}"')
        with self._guard(what):
            result = self._known[op](*arrays)
        if not isinstance(result, tuple) or not _are_arrays(result):
            raise JobFailed(f"{what} returned {_kinds(result)}, not a tuple of numpy arrays")
        came = tuple(array.shape for array in result)
        if shapes is not None and came != shapes:
            raise JobFailed(
                f"{what} returned arrays of shapes {_listed(came)}, not {_listed(shapes)}"
            )
        return result

    # ------------------------------------------------------------ steps

    def begin_step(self, samples: int, scale: float) -> None:
        with self._guard(self._what("begin_step()")):
            self.engine.begin_step(samples, scale)

    def see_batch(self, batch: Any, part: float) -> None:
        with self._guard(self._what("see_batch()")):
            self.engine.see_batch(batch, part)

    def reweigh(self, factor: Any) -> None:
        with self._guard(self._what("reweigh()")):
            self.engine.reweigh(factor)

    def discard_step(self) -> None:
        with self._guard(self._what("discard_step()")):
            self.engine.discard_step()

    # ------------------------------------------------------------ what is saved

    def state(self) -> dict[str, Array]:
        """All that has to be saved of the engine."""
        what = self._what("state()")
        with self._guard(what):
            state = self.engine.state()
        if not isinstance(state, dict) or not _are_arrays(state.values()):
            raise JobFailed(f"{what} returned {_kinds(state)}, not a dict of numpy arrays")
        # Copies: the next operation may write to them while they are saved.
        return {str(name): array.copy() for name, array in state.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        with self._guard(self._what("restore()")):
            self.engine.restore(dict(state))

    def _what(self, call: str) -> str:
        return f"{self.method}: {call} of its engine"


def _are_arrays(values: Any) -> bool:
    return all(isinstance(value, np.ndarray) and not value.dtype.hasobject for value in values)


def _kinds(value: Any) -> str:
    """The types in a value, for errors: "a tuple of float, ndarray"."""
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, tuple | dict):
        return f"a value of type {type(value).__name__}"
    kinds = ", ".join(sorted({type(each).__name__ for each in inside}))
    return f"a {type(value).__name__} of {kinds or 'nothing'}"


def _listed(shapes: tuple[Extent, ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "none"
