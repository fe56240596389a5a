"""A worker that ends in order loses nothing that the task has written, and ends in any case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from daemons.log_tail import await_printed

START = """
    import atexit, concurrent.futures, ctypes, logging, os, queue, sys, threading
    from pathlib import Path
    from daemons import logs
    from daemons.worker.task import print_streams
    from daemons.worker.at_exit import end_user_code
    print_streams.capture(logs.set_up("worker-0", 1, Path("log")), "worker-0", 1)
    print_streams.ORDER_S_MAX = 60.0  # On a loaded machine the process that reads may be late.
    asked = queue.SimpleQueue()
    def end(limit_s):
        end_user_code(asked.put, limit_s)
        print_streams.end_lines()
        os._exit(3)
    def end_in_thread(limit_s=4.0):
        threading.Thread(target=end, args=(limit_s,), daemon=True).start()
    """


def ended(directory: Path, story: str) -> tuple[int, list[str]]:
    """The exit code of a process that does this, and its log."""
    command = [sys.executable, "-c", dedent(START) + dedent(story)]
    with (directory / "log").open("ab+") as log:
        code = subprocess.run(command, stdout=log, stderr=log, timeout=60, cwd=directory).returncode
    await_printed(directory / "log")
    return code, [json.loads(line)["msg"] for line in (directory / "log").read_text().splitlines()]


def test_what_the_task_has_written_is_there_at_the_end(tmp_path):
    story = """
        text, binary = open("losses.csv", "w"), open("raw", "wb")
        text.write("0.5\\n")
        binary.write(b"raw")
        full = open("/dev/full", "w")
        full.write("x")
        detached = open("detached", "w")
        detached.detach()
        ctypes.CDLL(None).printf(b"kept by C")
        atexit.register(print, "first registered, last called")
        @atexit.register
        def fails():
            text.write("0.25\\n")
            raise OSError("of the task")
        begun = threading.Event()
        def write_later():
            begun.set()
            threading.main_thread().join()
            Path("thread").write_text("done")
        threading.Thread(target=write_later).start()
        begun.wait()
        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(lambda: Path("pool").write_text("done"))
        end_in_thread()
        asked.get()()
        threading.Event().wait()
        """
    code, log = ended(tmp_path, story)
    assert code == 3
    assert (tmp_path / "losses.csv").read_text() == "0.5\n0.25\n"
    assert (tmp_path / "raw").read_bytes() == b"raw"
    assert (tmp_path / "thread").read_text() == (tmp_path / "pool").read_text() == "done"
    of_dlctl = {line for line in log if "/dev/full" in line}
    why = "/dev/full: [Errno 28] No space left on device"
    assert of_dlctl == {f"a file that the task left open cannot be written, {why}"}
    printed = [line for line in log if line not in of_dlctl]
    last = ["OSError: of the task", "first registered, last called", "kept by C"]
    assert printed[-3:] == last


def test_an_exit_function_that_hangs_is_cut_off(tmp_path):
    story = """
        def upload():
            threading.Event().wait()
        atexit.register(upload)
        print("the last words", end="")
        end_in_thread(0.3)
        asked.get()()
        """
    code, log = ended(tmp_path, story)
    assert code == 3
    late, last = log
    assert late.startswith("the task's exit functions or open files took more than 0.3 s and are")
    assert last == "the last words"


def test_a_main_thread_that_is_at_a_batch_is_not_waited_for(tmp_path):
    story = """
        file = open("losses.csv", "w")
        file.write("0.5")
        atexit.register(print, "called")
        end_in_thread()
        threading.Event().wait()
        """
    code, log = ended(tmp_path, story)
    assert (code, log) == (3, ["called"])
    assert (tmp_path / "losses.csv").read_text() == "0.5"
