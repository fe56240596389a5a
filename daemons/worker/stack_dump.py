"""Where a task is that does not come back: the stack of its thread, as in a traceback."""

from __future__ import annotations

import sys
import threading
import traceback

from daemons.worker.task import innermost, without_machinery


def whereabouts(thread: threading.Thread) -> tuple[str, str]:
    """(file:line of the innermost of the user's frames, all frames that are not ours)."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "an unknown place: its thread has ended", ""
    whole = traceback.StackSummary.extract(traceback.walk_stack(frame))
    whole.reverse()
    stack = without_machinery(whole) or whole
    return innermost(stack) or "an unknown place", "".join(stack.format())
