"""Imports the task's files as they were when the run was started (`dlctl/runs/task_code.py`).

This applies to files in the directory of the task's file, or below, except packages installed there
in a virtual environment. `__file__` and tracebacks have the paths of the files themselves.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache, partial
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from typing import Any

import dlctl
from dlctl.runs import task_code
from dlctl.util import regular

log = logging.getLogger("dlctl")
_INSTALLED = {
    *(Path(path) for path in (sys.prefix, sys.base_prefix)),
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(dlctl.__file__).parent,
    Path(__file__).parent.parent,
}


class KeptSource(SourceFileLoader):
    """Loads the stored version of a file, not from cached bytecode, which is of the current one."""

    def __init__(self, directory: Path, name: str, path: str) -> None:
        """directory: the run directory."""
        super().__init__(name, path)
        self._directory = directory

    def get_data(self, path: str) -> bytes:
        try:
            now = regular.read_bytes(Path(path))
        except FileNotFoundError:
            now = None
        data = task_code.as_it_was(self._directory, Path(path), now)
        if data is None:
            raise FileNotFoundError(path)
        if data != now:  # Warn, and have tracebacks show the lines of the stored version.
            lines = decode_source(data).splitlines(keepends=True)
            linecache.cache[path] = (len(data), None, lines, path)
            log.warning(
                "%s has changed since the run was started: using the version that was stored then",
                os.path.basename(path),
            )
        return data

    def path_stats(self, path: str) -> Any:
        raise OSError


class _Finder:
    """Finds the task's modules, also if their files were deleted after the run had stored them."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory = directory
        self._is_of_task = cache(partial(_is_of_task, root=root))

    def find_spec(self, name: str, path: Sequence[str] | None, _: object = None) -> Any:
        last = name.rpartition(".")[2]
        for folder in filter(self._is_of_task, sys.path if path is None else path):
            package, module = Path(folder, last, "__init__.py"), Path(folder, f"{last}.py")
            for file, inside in ((package, [str(package.parent)]), (module, None)):
                place = file.absolute()
                kept = task_code.as_it_was(self._directory, place, None)
                if kept is not None or place.is_file():
                    loader = KeptSource(self._directory, name, str(place))
                    return spec_from_file_location(
                        name, place, loader=loader, submodule_search_locations=inside
                    )
        return None


def import_kept(directory: Path, root: Path) -> None:
    """Import files below `root` in the version that the run in `directory` has stored."""
    finder: Any = _Finder(directory, root)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)


def _is_of_task(path: str, root: Path) -> bool:
    place = Path(os.path.abspath(path))
    if not place.is_relative_to(root) or {"site-packages", "dist-packages"} & {*place.parts}:
        return False
    below = {installed for installed in _INSTALLED if installed.is_relative_to(root)}
    return not any(place.is_relative_to(installed) for installed in below - {root})
