"""What Python does at the end of a process, done for the task: threads end, functions that it has
registered with `atexit` are called, and files that it has left open are written out.

The process then ends by `os._exit`, because a whole end of the interpreter would wait for threads
that compute, or crash them. All this has a limit, which is kept whatever the task does meanwhile.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from daemons import logs

log = logging.getLogger("dlctl")
LIMIT_S = 4.0
"""Less than what the coordinator gives a process that it has told to exit (`shutdown.EXIT_S`)."""


def end_user_code(code: int, limit_s: float = LIMIT_S) -> None:
    """To be called in the main thread, by a process that ends with `code` after that.

    If `limit_s` is over before, it ends at once, with a line in its log that says where it was.
    """
    watch = threading.Timer(limit_s, _cut_off, (code, limit_s, threading.current_thread()))
    watch.daemon = True
    watch.start()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    write_out_files()
    watch.cancel()


def _cut_off(code: int, limit_s: float, thread: threading.Thread) -> None:
    """Nothing is imported here: it might wait for a thread that imports."""
    try:
        frames = traceback.extract_stack(sys._current_frames()[thread.ident or 0])
        at = [number for number, frame in enumerate(frames) if frame.filename == __file__]
        of_task = frames[at[-1] + 1 :] if at else frames
        place = f"{of_task[0].filename}:{of_task[0].lineno}" if of_task else "an unknown place"
        text = "the task's exit functions or open files took more than %g s and are cut off, at %s"
        detail = {"detail": "".join(traceback.format_list(of_task))}
        log.warning(text, limit_s, place, extra=detail)
        logs.end_prints()
    finally:
        os._exit(code)


def write_out_files() -> None:
    """What a file that is open still has in its buffers, from the outermost buffer inwards. What
    cannot be written is in the log.
    """
    files = [file for file in gc.get_objects() if issubclass(type(file), io.IOBase)]
    ours = (sys.stdout, sys.stderr)
    for file in _writable(files, (io.TextIOWrapper,)):
        _write_out(file, "flush")
    # Those of Python's own classes, as GzipFile, have an end to write.
    for file in _writable(files, (io.BufferedIOBase, io.TextIOBase)):
        if type(file).__module__ != "_io" and file not in ours:
            _write_out(file, "close")
    for archive in _open_archives():
        _write_out(archive, "close")
    for file in _writable(files, (io.BufferedWriter, io.BufferedRandom)):
        _write_out(file, "flush")


def _writable(files: list[Any], kinds: tuple[type, ...]) -> Iterator[Any]:
    for file in files:
        with suppress(Exception):  # Of a class of the task's, or its buffer is detached.
            if issubclass(type(file), kinds) and not file.closed and file.writable():
                yield file


def _open_archives() -> list[Any]:
    """They write their table of contents when they are closed; an import now would be for none."""
    zipfile = sys.modules.get("zipfile")
    if zipfile is None:
        return []
    return [x for x in gc.get_objects() if issubclass(type(x), zipfile.ZipFile) and x.mode != "r"]


def _write_out(file: Any, how: str) -> None:
    try:
        getattr(file, how)()
    except Exception as error:
        name = getattr(file, "name", None) or getattr(file, "filename", None) or type(file).__name__
        log.warning("a file that the task left open cannot be written, %s: %s", name, error)
