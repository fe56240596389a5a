"""Which checkpoints of a run are gone on from first, and which count among those that are kept.

What a run saves because it has failed may be of a model that is ruined, and whoever tries to go on
with that makes it save the same again. So it takes the place of no other one, and if nobody could
use what its workers computed, older ones are tried before it. Those that the run has left, for an
older one, are tried last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.runs import branches, checkpoints
from dlctl.runs.branches import Resume
from dlctl.runs.database import RunDb
from dlctl.runs.manifest import FAILURE, Manifest, is_doubtful


def order(run_directory: Path) -> list[Path]:
    """All that were completed once, damaged ones included, in the order in which to try them."""
    branch = _branch(run_directory)

    def rank(directory: Path) -> tuple[bool, bool, tuple[int, int]]:
        number = checkpoints.number(directory)
        is_left = not branches.is_of_branch(number[0], branch)
        return not is_left, not is_doubtful(_manifest(directory)), number

    return sorted(checkpoints.finished(run_directory), key=rank, reverse=True)


def counting(run_directory: Path, branch: Sequence[Resume]) -> Callable[[int], bool]:
    """Which numbers count among those that `checkpoints.superfluous` keeps."""
    found = checkpoints.complete(run_directory)
    failed = {checkpoints.number(path)[0] for path, made in found.items() if FAILURE in made}
    return lambda number: number not in failed and branches.is_of_branch(number, branch)


def _branch(run_directory: Path) -> list[Resume]:
    """[] if nobody can tell: then they are tried by their numbers alone."""
    try:
        with closing(RunDb(run_directory, readonly=True)) as db:
            return branches.chain(branches.resumes(db))
    except (DlctlError, OSError, sqlite3.Error, ValueError):
        return []


def _manifest(directory: Path) -> Manifest:
    with suppress(DlctlError):
        return checkpoints.read_manifest(directory)
    return {}
