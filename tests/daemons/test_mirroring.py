"""The process that uploads checkpoints, and the coordinator that starts it: with a real store."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from stored_checkpoints import checkpoint

from daemons.coordinator.mirroring import Mirroring
from daemons.loop import Loop
from dlctl.job import config
from dlctl.job.config import Checkpoints, Job, JobFile
from dlctl.roles.coordinator.records import HurryMirror, MirrorCheckpoint
from dlctl.roles.protocol.effects import MirrorNews
from dlctl.runs import checkpoints
from dlctl.runs.database import RunDb
from dlctl.stores import addresses, checkpoint_store, ownership
from dlctl.stores.checkpoint_store import CheckpointStore

PATIENCE_S = 50.0


class Place:
    """A run, its mirror, and what the coordinator's loop is told."""

    def __init__(self, path: Path) -> None:
        self.run, self.address = path / "run-1", f"file://{path}/store"
        self.run.mkdir()
        RunDb(self.run, create=True).close()
        mirror = f"file://{path}/store"
        job = JobFile(job=Job(name="run", task="t.py:t"), checkpoints=Checkpoints(mirror=mirror))
        (self.run / "job.json").write_text(json.dumps(config.to_dict(job)))
        self.performs: dict[type, Callable[[Any], object]] = {}
        self.news: list[MirrorNews] = []
        self.mirroring: Mirroring | None = None

    @property
    def store(self) -> CheckpointStore:
        return checkpoint_store.at(addresses.parse(self.address))

    def perform(self, kind: type, how: Callable[[Any], object]) -> None:
        self.performs[kind] = how

    def post(self, event: MirrorNews) -> None:
        self.news.append(event)

    def begin(self) -> Mirroring:
        self.mirroring = Mirroring(self.run, cast(Loop, self))
        return self.mirroring

    def save(self, number: int) -> None:
        checkpoint(self.run, number)
        self.performs[MirrorCheckpoint](MirrorCheckpoint(number))

    def until(self, condition: Callable[[MirrorNews], Any]) -> MirrorNews:
        deadline = time.monotonic() + PATIENCE_S
        assert self.mirroring is not None
        while not self.news or not condition(self.news[-1]):
            assert time.monotonic() < deadline, self.news
            self.mirroring.tend()
            threading.Event().wait(0.02)
        return self.news[-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Nothing that was started here is left."""
    found = Place(tmp_path)
    yield found
    if found.mirroring is not None:
        found.mirroring.close(None)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, tmp_path)]
    assert not left


def _names(path: Path, directory: Path) -> bool:
    try:
        return str(directory).encode() in path.read_bytes()
    except OSError:
        return False


def test_checkpoints_are_mirrored_also_by_the_process_after_one_that_was_killed(
    place: Place,
) -> None:
    checkpoint(place.run, 1)
    place.begin()
    found = place.until(lambda news: not news.pending)
    assert (found.mirrored["number"], found.why) == (1, "")
    assert place.mirroring is not None
    process = place.mirroring._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    place.save(2)
    place.performs[HurryMirror](HurryMirror())
    found = place.until(lambda news: news.mirrored.get("number") == 2 and not news.why)
    assert (found.pending, found.asked) == (False, 2)
    assert len(place.store.look().names) == 2


def test_another_runs_place_is_refused_with_its_cause(place: Place) -> None:
    other = checkpoint(place.run.parent / "run-2", 1)
    store = place.store
    store.upload(other, checkpoints.read_manifest(other))
    ownership.take(store.objects, None, "", ownership.new_claim(place.address), "run-2")
    checkpoint(place.run, 1)
    place.begin()
    found = place.until(lambda news: news.why)
    assert (found.cause, found.pending, found.mirrored) == ("foreign", True, {})
    assert "run-2" in found.why
