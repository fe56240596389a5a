"""Imports of large packages, without collections of garbage.

Modules stay, and each collection would look at all of them: for torch that takes a quarter of the
import, for torch._dynamo half of it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LARGE = frozenset({"torch", "torch._dynamo"})
"""The first optimiser of a program imports the latter."""


@contextmanager
def without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def quicken(names: frozenset[str] = LARGE) -> None:
    """Have whoever imports these packages later, such as a user's program, do so without."""
    sys.meta_path.insert(0, _Finder(names))


class _Finder(MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Quick(spec.loader)
        return spec


class _Quick(Loader):
    """Leaves no trace: the module has the loader that it would have without this one."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        with without_collections():
            self._loader.exec_module(module)
