"""A daemon on another machine than the coordinator's has only its agent to look for."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from daemons import parent_watch, process
from daemons.loop import Loop
from dlctl.job import config
from dlctl.launch import base, local
from dlctl.roles.protocol.effects import CoordinatorGone
from dlctl.wire.machine import Event
from dlctl.wire.messages import Register

ALONE_S = 0.2


class Heard(Loop):
    """A loop that says what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def post(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[Event]]:
    """What a daemon hears in `ALONE_S` and a little more; at home or not."""
    monkeypatch.setattr(parent_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(parent_watch, "ALONE_S", ALONE_S)

    def hear(is_home: bool) -> list[Event]:
        job = config.JobFile(job=config.Job(name="digits", task="none"))
        registration = Register(tmp_path.name, "server", "server-0", 1, 1, "h1", "")
        handler = logging.NullHandler()
        agent = "agent-0" if is_home else "agent-1"
        context = process.DaemonContext(
            tmp_path, "", registration, job, base.NO_CREDENTIALS, handler, agent
        )
        loop = Heard()
        try:
            chore = parent_watch.watch_parents(loop, context)
            chore()
            assert is_home or loop.events == []
            threading.Event().wait(1.5 * ALONE_S)
            chore()
            return loop.events
        finally:
            loop.transport.close()

    return hear


def test_without_an_agent_it_is_told_after_a_while(heard: Callable[[bool], list[Event]]) -> None:
    assert heard(False) == [CoordinatorGone()]


def test_while_an_agent_lives_nothing_is_amiss(
    heard: Callable[[bool], list[Event]], tmp_path: Path
) -> None:
    job = config.JobFile(job=config.Job(name="digits", task="none"))
    (tmp_path / "job.json").write_text(json.dumps(config.to_dict(job)))
    (tmp_path / base.HOST_FILE).write_text('{"agent": "agent-1"}')
    agent = local.start(tmp_path, "agent", "agent-1", 1, "tcp://127.0.0.1:1")
    try:
        assert heard(False) == []
    finally:
        agent.kill()
        agent.wait()


def test_at_home_it_is_told_although_somebody_has_removed_the_lock(
    heard: Callable[[bool], list[Event]],
) -> None:
    assert heard(True)[0] == CoordinatorGone()
