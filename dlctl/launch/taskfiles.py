"""The files of a job that are sent to other machines: the Python files in the job file's directory
and below.

The task, or the script, may import any of them. Data is not sent: it must be on each host. Hidden
files, caches, virtual environments, the directory of the runs and links to outside the job's
directory are left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError, UsageError
from dlctl.util import regular
from dlctl.util.units import format_size

FILES_MAX = 2000
BYTES_MAX = 16 << 20
LOOKED_AT_MAX = 50_000
"""Files and directories of any kind; a job file at the top of a home directory is a mistake."""
CACHE = "__pycache__"
ENVIRONMENT = "pyvenv.cfg"
"""A directory with this file in it is a virtual environment."""


class TaskFiles(NamedTuple):
    file: str
    """The file of the task, or the script, relative to the job's directory: "train.py"."""
    files: dict[str, bytes]
    """Path, relative to the job's directory, -> content."""
    left_out: tuple[str, ...]
    """Paths of Python files that are links out of the directory, or not regular files."""


def collect(directory: Path, file: str, run_dir: Path) -> TaskFiles:
    """`directory`: of the job file. `file`: `Job.file` of the resolved job. `run_dir`: the parent
    of run directories.

    Raises UsageError if the file is not among those that are sent, or if these are too many or too
    large, naming the largest; DlctlError for an unreadable file.
    """
    directory = directory.resolve()
    sizes: dict[Path, int] = {}
    left_out: list[str] = []
    for path in _python_files(directory, {run_dir.resolve(), directory / "runs"}):
        size_bytes = _size_bytes(path, directory)
        if size_bytes is None:
            left_out.append(str(path.relative_to(directory)))
        else:
            sizes[path] = size_bytes
    _check_sizes(directory, sizes)
    if Path(file) not in sizes:
        raise UsageError(
            "the task, or the script, cannot be sent to other hosts: only Python files beside the "
            "job file, or below it, are",
            where=file,
            hint=f"put it into {directory}, not as a link to somewhere else",
        )
    files = {str(path.relative_to(directory)): _read(path) for path in sizes}
    return TaskFiles(str(Path(file).relative_to(directory)), files, tuple(left_out))


def _python_files(directory: Path, without: set[Path]) -> Iterator[Path]:
    """Does not follow links to directories: they may lead anywhere, and form cycles."""
    seen = 0
    for place, folders, names in os.walk(directory, onerror=_cannot_read):
        seen += len(folders) + len(names)
        if seen > LOOKED_AT_MAX:
            raise UsageError(
                f"the directory of the job file contains more than {LOOKED_AT_MAX:,} files: too "
                "many to search for the Python files of the task",
                where=str(directory),
                hint="put the job file and its Python files into a directory of their own",
            )
        here = Path(place)
        folders[:] = sorted(f for f in folders if _is_entered(here / f, without))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("."):
                yield here / name


def _is_entered(path: Path, without: set[Path]) -> bool:
    is_hidden = path.name.startswith(".") or path.name == CACHE
    return not is_hidden and path not in without and not (path / ENVIRONMENT).exists()


def _cannot_read(error: OSError) -> None:
    raise DlctlError(
        f"cannot look for the task's files: {error.strerror}", where=str(error.filename)
    ) from error


def _size_bytes(path: Path, directory: Path) -> int | None:
    """Bytes of a file; None: a link out of the directory, a broken link, or no regular file."""
    if path.is_symlink() and not path.resolve().is_relative_to(directory):
        return None
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _check_sizes(directory: Path, sizes: dict[Path, int]) -> None:
    total = sum(sizes.values())
    if total <= BYTES_MAX and len(sizes) <= FILES_MAX:
        return
    largest = max(sizes, key=lambda path: sizes[path])
    raise UsageError(
        f"the Python files beside the job file, and below it, are {len(sizes):,} with "
        f"{format_size(total)}; at most {FILES_MAX:,} with {format_size(BYTES_MAX)} go to other "
        f"hosts; the largest is {largest.relative_to(directory)} ({format_size(sizes[largest])})",
        where=str(directory),
        hint="put the job file and the Python files of its task into a directory of their own",
    )


def _read(path: Path) -> bytes:
    try:
        return regular.read_bytes(path)
    except OSError as error:
        raise DlctlError(
            f"cannot read a file of the task: {error.strerror}", where=str(path)
        ) from error
