"""Whether a run directory has been removed: who takes one for removed ends its run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlctl import runs


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run-1"
    directory.mkdir()
    return directory


@pytest.fixture
def lock(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory / runs.LOCK, os.O_RDWR | os.O_CREAT)
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
    assert not runs.is_removed(directory, lock)
    directory.rename(directory.with_name("elsewhere"))
    assert not runs.is_removed(directory, lock)


def test_it_is_removed_when_the_lock_has_no_name_any_more(directory: Path, lock: int) -> None:
    shutil.rmtree(directory)
    assert runs.is_removed(directory, lock)


def test_also_if_another_run_has_taken_its_name(directory: Path, lock: int) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / runs.LOCK).touch()
    assert runs.is_removed(directory, lock)


def test_where_nobody_counts_links_the_name_decides(
    directory: Path, lock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    assert not runs.is_removed(directory, lock)
    shutil.rmtree(directory)
    assert runs.is_removed(directory, lock)
