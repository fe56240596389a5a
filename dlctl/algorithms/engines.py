"""The engine of a method: its part where the model is, in torch, with a twin in numpy.

An engine is any object, made by the worker of a replica (`Shape.engine`). Its public methods are
operations: a replica requests one with `Engine(op=..., arrays=...)`, and it takes these arrays and
returns a tuple of arrays, all numpy. Two names are no operations:

    state() -> dict of arrays    optional; saved with the replica's own state, between two
                                 operations
    restore(state)               optional; the `state` before a stop, ahead of all operations

Where a replica is several processes (`Shape.ranks`) each has an engine. All of them make every
operation, `state` and `restore`, in the same order with the same arrays, so that they can make
collectives in it; the result of rank 0 counts. The model of rank 0 is the replica's; only the
engines of the other ranks read or write their models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from dlctl.algorithms.needs import Extent
from dlctl.errors import JobFailed
from dlctl.wire.messages import Array

SAVED_AS = "engine."
"""Before the names of its state, in the file of its replica."""
NO_OPERATIONS = ("state", "restore")


def operations_of(kind: type[Any]) -> set[str]:
    """The operations of a class of engines, or of an engine's."""
    public = {name for name in dir(kind) if not name.startswith("_")}
    return {name for name in public - {*NO_OPERATIONS} if callable(getattr(kind, name))}


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
        engine: Any,
        method: str,
        guard: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """guard: around every call, with its name, to report it with an exception."""
        self.engine = engine
        self.method = method
        self._guard = guard

    def run(
        self, op: str, arrays: tuple[Array, ...], shapes: tuple[Extent, ...] | None = None
    ) -> tuple[Array, ...]:
        """The arrays of an operation; shapes: what they have to be."""
        known = operations_of(type(self.engine))
        if op not in known:
            raise JobFailed(
                f'{self.method}: its engine has no operation "{op}"',
                hint=f"it has {', '.join(sorted(known)) or 'none'}",
            )
        what = self._what(f'operation "{op}"')
        with self._guard(what):
            result = getattr(self.engine, op)(*arrays)
        if not isinstance(result, tuple) or not _are_arrays(result):
            raise JobFailed(f"{what} returned {_kinds(result)}, not a tuple of numpy arrays")
        came = tuple(array.shape for array in result)
        if shapes is not None and came != shapes:
            raise JobFailed(
                f"{what} returned arrays of shapes {_listed(came)}, not {_listed(shapes)}"
            )
        return result

    def state(self) -> dict[str, Array]:
        """All that has to be saved of the engine; {} if it has no `state`."""
        if not hasattr(self.engine, "state"):
            return {}
        what = self._what("state()")
        with self._guard(what):
            state = self.engine.state()
        if not isinstance(state, dict) or not _are_arrays(state.values()):
            raise JobFailed(f"{what} returned {_kinds(state)}, not a dict of numpy arrays")
        # Copies: the next operation may write to them while they are saved.
        return {str(name): array.copy() for name, array in state.items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        if hasattr(self.engine, "restore"):
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
