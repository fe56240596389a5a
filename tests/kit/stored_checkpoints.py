"""Small checkpoints on a disk, and stores that break in the ways in which stores do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import manifests
import numpy as np

from dlctl.runs import checkpoints
from dlctl.stores.objects import Cause, Objects, Progress, StoreError

LAYOUT = [["weight", "trained", [6], "float32", []]]
SIZE = 6
ADDED = "created"


def checkpoint(
    run: Path, number: int, step: int | None = None, shards: int = 2, **changes: Any
) -> Path:
    """A complete checkpoint in a run directory, with other bytes for each number."""
    run.mkdir(exist_ok=True)
    step = 10 * number if step is None else step
    directory = checkpoints.create(run, step, number)
    parts, cuts = [], np.linspace(0, SIZE, shards + 1, dtype=int).tolist()
    for index, (lo, hi) in enumerate(pairwise(cuts)):
        arrays = {"w": np.full(hi - lo, number, np.float32)}
        if index == 0:
            arrays["averaged"] = np.zeros(0, np.float64)
        file = f"shard-{index}.safetensors"
        sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
        content = {"file": file, "sha256": sha256, "nbytes": nbytes}
        state = {"version": step}
        parts.append({**content, "name": f"server-{index}", "state": state, "lo": lo, "hi": hi})
    about = {"run_id": run.name, "number": number, "step": step, "layout": LAYOUT, "at": 1e9 + step}
    checkpoints.write_manifest(directory, manifests.whole(**{**about, "shards": parts, **changes}))
    return directory


class Recording:
    """A store that notes what is done to it, and breaks where it is told to."""

    def __init__(self, objects: Objects) -> None:
        self.address = objects.address
        self._objects = objects
        self.done: list[tuple[str, str]] = []
        """(method, name) of every change."""
        self.breaks: Callable[[str, str], None] = lambda method, name: None
        """Called before each operation with its method and name; raises."""

    def sizes(self, below: str = "") -> dict[str, int]:
        self.breaks("sizes", below)
        return self._objects.sizes(below)

    def size(self, name: str) -> int | None:
        return self._objects.size(name)

    def read(self, name: str) -> bytes:
        self.breaks("read", name)
        return self._objects.read(name)

    def pieces(self, name: str) -> Iterator[bytes]:
        self.breaks("pieces", name)
        return self._objects.pieces(name)

    def put(self, name: str, path: Path, progress: Progress) -> None:
        self._change("put", name)
        self._objects.put(name, path, progress)

    def create(self, name: str, data: bytes) -> bool:
        self._change("create", name)
        return self._objects.create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self._change("replace", name)
        self._objects.replace(name, data)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._change("remove", name)
            self._objects.remove([name])

    def sweep(self) -> None:
        self._objects.sweep()

    def _change(self, method: str, name: str) -> None:
        self.breaks(method, name)
        self.done.append((method, name))

    def names(self, method: str) -> list[str]:
        return [name for of, name in self.done if of == method]


def failing(cause: Cause, method: str, suffix: str = "") -> Callable[[str, str], None]:
    """Breaks one method, for names that end so."""

    def breaks(of: str, name: str) -> None:
        if of == method and name.endswith(suffix):
            raise StoreError(f"it is {cause}", cause)

    return breaks
