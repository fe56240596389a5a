"""Strangers, or a task, have taken every file descriptor: nothing ends that could go on."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemons import log_file, logs, parent_watch, signals
from daemons.transport import connection_limit
from dlctl.wire.machine import Event


def too_many(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_who_cannot_even_count_descriptors_takes_it_that_there_are_too_many(monkeypatch):
    assert 3 <= connection_limit.descriptors() < 10_000
    monkeypatch.setattr(os, "listdir", too_many)
    assert connection_limit.descriptors() == sys.maxsize


@pytest.mark.parametrize("is_home", [True, False])
def test_who_cannot_see_whether_he_is_led_goes_on(tmp_path, monkeypatch, is_home):
    monkeypatch.setattr(parent_watch.local, "living", too_many)
    monkeypatch.setattr(parent_watch, "LOOK_S", 0.0)
    monkeypatch.setattr(parent_watch, "ALONE_S", 0.0)
    posted: list[Event] = []
    context: Any = SimpleNamespace(is_home=is_home, directory=tmp_path)
    loop: Any = SimpleNamespace(post=posted.append)
    chore = parent_watch.watch_parents(loop, context)
    chore()
    chore()
    assert posted == []


def test_a_signal_finds_no_coordinator_where_nothing_can_be_read(tmp_path, monkeypatch, caplog):
    assert not signals._signal_coordinator(tmp_path)
    monkeypatch.setattr(signals.local, "living", too_many)
    assert not signals._signal_coordinator(tmp_path)
    assert f"[Errno {errno.EMFILE}]" in caplog.text


def test_a_log_that_cannot_begin_anew_keeps_its_name_and_does_so_later(tmp_path, monkeypatch):
    path = tmp_path / "worker-0.1.jsonl"
    path.write_text("old\n" * 100)
    handler = logs.Rotating(path)
    monkeypatch.setattr(os, "dup2", lambda new, old, inheritable=True: new)
    monkeypatch.setattr(log_file, "FILE_BYTES_MAX", 0)
    with monkeypatch.context() as full:
        full.setattr(os, "open", too_many)
        handler.rotate_if_full()
    assert os.listdir(tmp_path) == [path.name]
    with monkeypatch.context() as full:
        full.setattr(Path, "rename", too_many)
        handler.rotate_if_full()
    assert os.listdir(tmp_path) == [path.name]
    handler.rotate_if_full()
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.1"]
    assert path.read_text() == ""
