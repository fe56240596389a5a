"""Logs where a script stands that has not joined the run for a long time."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from pathlib import Path

from daemons.attach.context import ScriptProcess

log = logging.getLogger("dlctl")
FIRST_S = 60.0
"""Until the first such line; each of the next ones comes after twice as long."""


def watch(script: ScriptProcess, thread: threading.Thread, folder: Path, after_s: float) -> None:
    """Returns when the script has joined the run; for a thread of its own. thread: of the script.
    folder: of its files.
    """
    silent_s, pause = 0.0, threading.Event()
    while not pause.wait(after_s) and not (script.session and script.session.has_joined):
        silent_s += after_s
        after_s *= 2
        place = place_of(thread, folder) or "an unknown place"
        lacks = "called dlctl.attach" if script.session is None else "joined the run"
        log.warning("the script has not %s for %g s; it is at %s", lacks, silent_s, place)


def place_of(thread: threading.Thread, folder: Path) -> str:
    """file:line of the innermost frame that is in a file of the folder; "" if there is none."""
    innermost = sys._current_frames().get(thread.ident or 0)
    for frame, line in traceback.walk_stack(innermost) if innermost is not None else ():
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(folder) and "site-packages" not in file.parts:
            return f"{file}:{line}"
    return ""
