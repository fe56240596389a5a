"""Does for the task what Python does at exit: joins threads, calls the functions that the task has
registered with `atexit`, and flushes the files that it has left open.

The process then exits by `os._exit`, because a regular shutdown of the interpreter would wait for
compute threads, or crash them. All this has a time limit, whatever the task does meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import logging
import threading
from collections.abc import Callable

log = logging.getLogger("dlctl")
BUSY_S = 0.5
LIMIT_S = 3.5
"""The limit of all of this: less than the coordinator waits for a daemon to exit
(`shutdown.EXIT_S`).
"""


def end_user_code(ask_main: Callable[[Callable[[], None]], None], limit_s: float = LIMIT_S) -> None:
    """Call this just before the process exits, not in the main thread.

    ask_main: has the main thread run a function as soon as it can, because exit functions may need
    that thread. If a batch keeps the main thread busy for more than `BUSY_S`, another thread runs
    the function. If the limit is exceeded, the log has a warning.
    """
    begun, done = threading.Lock(), threading.Event()

    def work() -> None:
        if begun.acquire(blocking=False):
            try:
                _end()
            except BaseException:
                log.exception("ending the task's code failed")
            finally:
                done.set()

    ask_main(work)
    if not done.wait(BUSY_S) and not begun.locked():
        threading.Thread(target=work, daemon=True).start()
    if not done.wait(limit_s):
        text = "the task's exit functions or open files took more than %g s and are abandoned"
        log.warning(text, limit_s)


def end_in_this_thread() -> None:
    """The same at once, in the main thread, without a limit."""
    try:
        _end()
    except BaseException:
        log.exception("ending the script failed")


def _end() -> None:
    if threading.current_thread() is threading.main_thread():
        threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    write_out_files()


def write_out_files() -> None:
    """Flush all open files, from the outermost buffer inwards, and those of the C library. Failures
    are logged.
    """
    buffered = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [file for file in gc.get_objects() if issubclass(type(file), buffered)]
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOWrapper)):
        try:
            file.flush()
        except ValueError:
            continue  # It is closed, or its buffer is detached.
        except Exception as error:
            name = getattr(file, "name", type(file).__name__)
            log.warning("a file that the task left open cannot be written, %s: %s", name, error)
    ctypes.CDLL(None).fflush(None)
