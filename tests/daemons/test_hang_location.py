"""Where a task is that does not come back: file and line of the user's own code."""

from __future__ import annotations

import threading
from collections.abc import Callable

from daemons.worker.task.user_task import whereabouts


def hang(until: threading.Event, is_there: Callable[[], None]) -> None:
    is_there()
    until.wait(60)  # It hangs here.


def test_the_line_of_the_task_is_named_and_not_that_of_the_library_that_it_waits_in() -> None:
    until, is_there = threading.Event(), threading.Event()
    thread = threading.Thread(target=hang, args=(until, is_there.set))
    thread.start()
    try:
        assert is_there.wait(10)
        line = hang.__code__.co_firstlineno + 2
        while (found := whereabouts(thread))[0] != f"{__file__}:{line}":
            assert thread.is_alive()  # It has yet to come from one line to the next.
    finally:
        until.set()
        thread.join()
    stack = found[1]
    assert "It hangs here." in stack
    assert stack.index("in hang") < stack.index("in wait"), "the innermost frame comes last"
    assert whereabouts(thread)[0] == "an unknown place: its thread has ended"
