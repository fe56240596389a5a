"""A script that does not attach: its log says where it stands."""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemons.attach.context import ScriptProcess
from daemons.script import silence

HERE = Path(__file__).parent


@pytest.fixture
def said() -> Iterator[queue.SimpleQueue[str]]:
    """What is logged."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    handler = logging.Handler()
    handler.emit = lambda record: lines.put(record.getMessage())  # type: ignore[method-assign]
    silence.log.addHandler(handler)
    yield lines
    silence.log.removeHandler(handler)


def test_its_line_is_logged_until_it_has_attached(said: queue.SimpleQueue[str]) -> None:
    script = ScriptProcess(cast(Any, None))
    watched = (script, threading.current_thread(), HERE, 0.02)
    thread = threading.Thread(target=silence.watch, args=watched)
    thread.start()
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    first, second = said.get(timeout=30), said.get(timeout=30)
    script.session = cast(Any, SimpleNamespace(has_joined=True))
    thread.join(30)
    assert not thread.is_alive()
    assert first.endswith(f"for 0.02 s; it is at {__file__}:{line}")
    assert "for 0.06 s" in second


def test_where_nothing_is_the_users_no_line_is_named(tmp_path: Path) -> None:
    assert not silence.place_of(threading.current_thread(), tmp_path)
    assert not silence.place_of(threading.Thread(), HERE)
