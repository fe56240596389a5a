"""A disk that hangs under the coordinator's checkpoints keeps it from nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from daemons.coordinator.checkpoint_directories import Directories
from daemons.loop import Loop
from dlctl.roles.coordinator import records as j
from dlctl.wire.machine import Effect, Event, Exit, Started

PATIENCE_S = 20.0


class Impatient:
    """Begins a checkpoint; when it has heard of something else, the disk may go on."""

    def __init__(self, disk: threading.Event) -> None:
        self.heard: list[Event] = []
        self._disk = disk

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Started):
            return [j.BeginCheckpoint(1, 10)]
        self.heard.append(event)
        self._disk.set()
        return [Exit(0, "it has begun")] if isinstance(event, j.CheckpointBegun) else []

    def deadline(self) -> float | None:
        return None


def test_while_a_sync_hangs_the_coordinator_hears_all_else(
    tmp_path: Path, monkeypatch, run_script
) -> None:
    disk, real, loop = threading.Event(), os.fsync, Loop()
    machine = Impatient(disk)

    def hanging(descriptor: int) -> None:
        loop.post(j.KeyRenewed(""))  # Anything.
        assert disk.wait(PATIENCE_S), "nobody has heard it"
        real(descriptor)

    Directories(tmp_path, loop)
    monkeypatch.setattr(os, "fsync", hanging)
    loop.run(machine)
    assert isinstance(machine.heard[0], j.KeyRenewed)
    begun = machine.heard[-1]
    assert isinstance(begun, j.CheckpointBegun)
    assert (begun.error, Path(begun.directory).is_dir()) == ("", True)
