"""The loop, the thread of the files and the sockets: a failure in one ends in a clear error."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from daemons import loop as loop_module
from daemons.files.arrays import Files
from daemons.loop import Loop
from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import ArraysLoaded, ArraysSaved, LoadArrays, SaveArrays
from dlctl.runs import checkpoints
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Event, Send


def test_arrays_are_loaded_outside_the_loop_s_thread(tmp_path, run_script, monkeypatch):
    threads = []

    def read_worker(*_: object, **__: object) -> dict[str, object]:
        threads.append(threading.current_thread())
        return {"residual": np.ones(2)}

    monkeypatch.setattr(checkpoints, "read_manifest", lambda directory: {})
    monkeypatch.setattr(checkpoints, "read_worker", read_worker)
    loop = Loop()
    Files(loop, "worker-0")
    (loaded,) = run_script(loop, LoadArrays(str(tmp_path)), awaited=1)
    assert isinstance(loaded, ArraysLoaded)
    assert loaded.arrays["residual"].tolist() == [1, 1]
    assert threads != [threading.main_thread()]


@pytest.mark.parametrize("name", ["server-0", "worker-0"])
def test_a_checkpoint_that_cannot_be_loaded_ends_the_daemon_with_the_reason(
    tmp_path, run_script, name
):
    loop = Loop()
    Files(loop, name)
    with pytest.raises(DlctlError) as caught:
        run_script(loop, LoadArrays(str(tmp_path), ("w",), (), 0, 1), awaited=1)
    assert Path(caught.value.where or "").parent == tmp_path


def test_a_bug_while_saving_fails_the_checkpoint_and_is_not_swallowed(
    tmp_path, run_script, monkeypatch
):
    def write_arrays(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(checkpoints, "write_arrays", write_arrays)
    loop = Loop()
    Files(loop, "server-0")
    (saved,) = run_script(loop, SaveArrays(1, str(tmp_path), "shard-0", {}), awaited=1)
    assert isinstance(saved, ArraysSaved)
    assert "ZeroDivisionError: oh" in saved.error


def test_a_message_that_is_too_large_is_dropped_and_the_daemon_lives(run_script, caplog):
    report = m.Dismiss("x" * 70_000)
    with caplog.at_level(logging.ERROR):
        assert run_script(Loop(), Send("coordinator", report)) == []
    assert "Dismiss has 70" in caplog.text


def test_an_address_that_is_not_ours_is_not_taken_for_a_port_that_is_taken():
    transport = Loop().transport
    with pytest.raises(DlctlError) as failure, closing(transport):
        transport.listen("tcp://203.0.113.7:*")
    assert failure.value.hint


class Deaf:
    """A machine that nothing comes to."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        raise AssertionError(event)

    def deadline(self) -> float | None:
        return None


def test_a_connection_that_is_replaced_while_it_has_news_is_not_read_any_more(run_script):
    """What came before it in the same round may have closed it."""
    loop = Loop()
    loop.transport.connect("server-0", "ipc:///nowhere")
    (old,) = loop.transport._dealers.values()
    loop.transport.connect("server-0", "ipc:///nowhere")
    loop.after_events = lambda: loop._serve(Deaf(), old)
    assert run_script(loop) == []


def test_chores_are_done_after_events_but_not_after_every_one(run_script, monkeypatch):
    done: list[int] = []

    def two_events() -> None:
        loop = Loop(lambda: done.append(1))
        Files(loop, "worker-0")
        run_script(loop, LoadArrays(""), LoadArrays(""), awaited=2)

    monkeypatch.setattr(checkpoints, "read_manifest", lambda directory: {})
    monkeypatch.setattr(checkpoints, "read_worker", lambda *_, **__: {})
    two_events()
    assert done == [1]
    monkeypatch.setattr(loop_module, "CHORES_S", 0.0)
    two_events()
    assert len(done) >= 2


SIGNALLED = """
    import os, signal, threading
    from daemons.loop import Loop, Signals
    from dlctl.wire.machine import Exit, StopRequested

    class Machine:
        def handle(self, event, now):
            return [Exit(0, event.reason)] if isinstance(event, StopRequested) else []

        def deadline(self):
            return None

    signals = Signals()
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    assert signals.read() == [], "none of these is for us"

    loop = Loop()
    loop.stop_on_signals(signals)
    thread = threading.Thread(target=loop.run, args=(Machine(),))
    thread.start()
    {of_the_task}
    os.kill(os.getpid(), signal.SIGTERM)
    {busy}
    thread.join(20)
    assert loop.exit_code == 0
    """


@pytest.mark.parametrize(
    ("of_the_task", "busy"),
    [
        ("pass", "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 20)"),
        ("signal.signal(signal.SIGTERM, lambda *_: None)", "pass"),
        ("signal.set_wakeup_fd(-1)", "pass"),
    ],
    ids=["the main thread computes", "the task has a handler", "the task has an event loop"],
)
def test_a_signal_reaches_the_loop_whatever_the_main_thread_does(of_the_task, busy):
    script = dedent(SIGNALLED).format(of_the_task=of_the_task, busy=busy)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
