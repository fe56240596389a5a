"""Real loops, databases and files; only the machine is one that does what a test lists."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fork_server
import pytest
from guarded_port import GUEST, KEYS, House

from daemons.coordinator.checkpoint_directories import Directories
from daemons.coordinator.records import RunRecords
from daemons.loop import Loop
from dlctl.runs.database import RunDb
from dlctl.wire.machine import Effect, Event, Exit, Started


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that a test starts are forked from a process that has imported torch for them."""
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)


@pytest.fixture
def house() -> Iterator[House]:
    made = House({KEYS.public(GUEST): GUEST})
    yield made
    made.transport.close()


class Script:
    """Wants some effects at its start and exits when `awaited` events have come."""

    def __init__(self, effects: tuple[Effect, ...], awaited: int) -> None:
        self.effects = effects
        self.awaited = awaited
        self.events: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, Started):
            self.events.append(event)
        effects = [*self.effects] if isinstance(event, Started) else []
        over = len(self.events) >= self.awaited
        return [*effects, Exit(0, "all has come")] if over else effects

    def deadline(self) -> float | None:
        return None


@pytest.fixture
def run_script() -> Callable[..., list[Event]]:
    """Performs effects in a loop until so many events have come: `run_script(loop, effect)`."""

    def run(loop: Loop, *effects: Effect, awaited: int = 0) -> list[Event]:
        script = Script(effects, awaited)
        loop.run(script)
        return script.events

    return run


@pytest.fixture
def record(tmp_path: Path, run_script: Callable[..., list[Event]]) -> Callable[..., list[Event]]:
    """What one execution of a coordinator does with effects: what it writes, in its own loop."""
    with_database = RunDb(tmp_path, create=True)
    with_database.close()

    def run(*effects: Effect, awaited: int = 0) -> list[Event]:
        loop, db = Loop(), RunDb(tmp_path)
        RunRecords(tmp_path, db, loop)
        Directories(tmp_path, loop)
        try:
            return run_script(loop, *effects, awaited=awaited)
        finally:
            db.close()

    return run
