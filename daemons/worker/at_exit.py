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
import threading
from collections.abc import Callable

log = logging.getLogger("dlctl")
BUSY_S = 0.5
LIMIT_S = 3.5
"""With that, less than the coordinator waits for one that is to exit (`shutdown.EXIT_S`)."""


def end_user_code(ask_main: Callable[[Callable[[], None]], None], limit_s: float = LIMIT_S) -> None:
    """To be called in another thread than the main one, by a process that ends after that.

    ask_main: has the main thread do something, as soon as it can: what the task registers may need
    that thread. If it cannot in `BUSY_S`, as it is at a batch, that is done without it. When the
    limit is over, the log says so.
    """
    begun, done = threading.Lock(), threading.Event()

    def work() -> None:
        if begun.acquire(blocking=False):
            try:
                _end()
            except BaseException:
                log.exception("the end of the task's code has failed")
            finally:
                done.set()

    ask_main(work)
    if not done.wait(BUSY_S) and not begun.locked():
        threading.Thread(target=work, daemon=True).start()
    if not done.wait(limit_s):
        text = "the task's exit functions or open files took more than %g s and are cut off"
        log.warning(text, limit_s)


def _end() -> None:
    if threading.current_thread() is threading.main_thread():
        threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    write_out_files()


def write_out_files() -> None:
    """What a file that is open still has in its buffers, from the outermost buffer inwards. What
    cannot be written is in the log.
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
