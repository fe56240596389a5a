"""Whether a run directory has been removed: who takes one for removed ends its run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlctl.runs import database, paths


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run-1"
    directory.mkdir()
    (directory / database.FILE).touch()
    return directory


@pytest.fixture
def lock(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory / paths.LOCK, os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that says of all files that they have no name."""
    honest = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        values = list(honest(descriptor))
        values[3] = 0
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", fstat)


def test_a_directory_that_is_there_or_was_moved_is_not_removed(directory: Path, lock: int) -> None:
    assert not database.is_removed(directory, lock)
    directory.rename(directory.with_name("elsewhere"))
    assert not database.is_removed(directory, lock)


def test_it_is_removed_when_nothing_of_it_has_a_name_any_more(directory: Path, lock: int) -> None:
    shutil.rmtree(directory)
    assert database.is_removed(directory, lock)


@pytest.mark.parametrize("file", [paths.LOCK, database.FILE])
def test_not_if_somebody_has_only_tidied_one_file_away(
    directory: Path, lock: int, file: str
) -> None:
    (directory / file).unlink()
    assert not database.is_removed(directory, lock)


def test_where_nobody_counts_links_the_database_decides(
    directory: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    assert not database.is_removed(directory, lock)
    shutil.rmtree(directory)
    assert database.is_removed(directory, lock)
