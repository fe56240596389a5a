"""The standard streams of a worker are streams, and what is printed reaches the log whole: from
every thread and process, also in a crash.

Each story runs in a process of its own, because its descriptors 1 and 2 become pipes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from daemons.log_tail import await_printed, last_lines

START = """
    import json, logging, os, signal, subprocess, sys, threading, time
    from pathlib import Path
    from daemons import log_file, logs
    from daemons.worker.task import print_streams
    path = Path(sys.argv[1])
    handler = logs.set_up("worker-0", 1, path)
    print_streams.capture(handler, "worker-0", 1)
    """
LIMIT_S = 60


def run(path: Path, story: str, status: int = 0, pass_fds: tuple[int, ...] = ()) -> None:
    """Run a process that does this, and wait until its log is complete."""
    with path.open("ab+") as log:
        command = [sys.executable, "-c", dedent(START) + dedent(story), str(path)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=LIMIT_S,
            pass_fds=pass_fds,
        )  # fmt: skip
    await_printed(path)
    assert done.returncode == status, path.read_text()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_after(path: Path, story: str, status: int = 0) -> list[str]:
    """What is in the log of a process that does this."""
    run(path, story, status)
    return [record["msg"] for record in records(path)]


# ---------------------------------------------------------------- what libraries do

USES = {
    "fileno": ("print(sys.stdout.fileno(), sys.stderr.fileno())", ["1 2"], []),
    "bytes": ("sys.stdout.buffer.write(b'raw\\n'); sys.stdout.buffer.flush()", ["raw"], []),
    "bytes of another encoding": ("sys.stderr.buffer.write(b'caf\\xe9\\n')", [], ["caf\\xe9"]),
    "bytes and text": (
        "sys.stdout.write('text '); sys.stdout.flush(); sys.stdout.buffer.write(b'bytes\\n')",
        ["text bytes"],
        [],
    ),
    "text that is not unicode": ("print('caf\\udce9')", ["caf\\udce9"], []),
    "attributes": (
        "s = sys.stdout; print(s.encoding, s.errors, s.isatty(), s.mode, s.name, s.newlines,"
        "s.line_buffering, s.closed, s.readable(), s.writable(), s.seekable())",
        ["utf-8 backslashreplace False w <stdout> None True False False True False"],
        [],
    ),
    "kind": ("import io; print(isinstance(sys.stdout, io.TextIOWrapper))", ["True"], []),
    "reconfigure": (
        "sys.stdout.reconfigure(line_buffering=True, encoding='latin-1', errors='replace');"
        "print('\\xe9 \\u20ac'); sys.stdout.reconfigure(encoding='utf-8', write_through=True);"
        "print('a', 1); sys.stdout.reconfigure(write_through=False)",
        ["\\xe9 ?", "a 1"],
        [],
    ),
    "writelines": ("sys.stdout.writelines(['a\\n', 'b\\n'])", ["a", "b"], []),
    "flush": ("print('a', end='', flush=True); print('b', flush=True)", ["ab"], []),
    "no text": (
        "try: sys.stdout.write(b'x')\nexcept TypeError as error: print(error)",
        ["write() argument must be str, not bytes"],
        [],
    ),
    "a child that is given the streams": (
        "subprocess.run(['sh', '-c', 'echo out; echo err >&2'], stdout=sys.stdout,"
        "stderr=sys.stderr, check=True)",
        ["out"],
        ["err"],
    ),
    "a child that inherits them": ("os.system('echo out; echo err >&2')", ["out"], ["err"]),
    "a child that opens them": (
        "os.system('echo out > /dev/stdout; echo err > /dev/stderr')",
        ["out"],
        ["err"],
    ),
    "a child without lines": (
        "subprocess.run(['printf', '\\\\r 1%%\\\\r 2%%']); print()",
        [" 2%"],
        [],
    ),
    "a fork": (
        "sys.stdout.flush()\nif os.fork() == 0: print('in the fork'); os._exit(0)\nos.wait()",
        ["in the fork"],
        [],
    ),
    "multiprocessing": (
        "import multiprocessing as mp; p = mp.get_context('fork').Process(target=print, args=(1,));"
        "p.start(); p.join()",
        ["1"],
        [],
    ),
    "descriptors": ("os.write(1, b'out\\n'); os.write(2, b'err\\n')", ["out"], ["err"]),
    "a library in C": (
        "import ctypes; ctypes.CDLL(None).puts(b'before'); print('after')",
        ["before", "after"],
        [],
    ),
    "faulthandler": (
        "import faulthandler as f; f.enable(); f.register(signal.SIGUSR1, sys.stdout, chain=True);"
        "f.dump_traceback_later(60, file=sys.stdout); f.cancel_dump_traceback_later();"
        "print(f.is_enabled(), f.unregister(signal.SIGUSR1))",
        ["True True"],
        [],
    ),
    "logging": (
        "log = logging.getLogger('mine'); log.addHandler(logging.StreamHandler(sys.stdout));"
        "log.warning('careful'); log.handlers.clear()",
        ["careful"],
        [],
    ),
    "warnings of others": ("sys.stderr.write('careful\\n')", [], ["careful"]),
    "another stream for the same bytes": (
        "import io; old = sys.stdout; sys.stdout = io.TextIOWrapper(old.buffer, encoding='ascii',"
        "errors='replace', line_buffering=True); print('\\xe9'); del sys.stdout; sys.stdout = old;"
        "print('and again')",
        ["?", "and again"],
        [],
    ),
    "a writer of a codec": (
        "import codecs; codecs.getwriter('utf-8')(sys.stdout.buffer).write('\\xe9\\n')",
        ["\xe9"],
        [],
    ),
    "redirection": (
        "import contextlib\nwith contextlib.redirect_stdout(sys.stderr): print('to stderr')",
        [],
        ["to stderr"],
    ),
    "the first streams": (
        "print('out', file=sys.__stdout__); print('err', file=sys.__stderr__)",
        ["out"],
        ["err"],
    ),
    "a stream that is closed": ("sys.stdout.close(); print('still there')", ["still there"], []),
    "a descriptor without waiting": (
        "os.set_blocking(1, False)\nfor i in range(100): print('y' * 9000)\n"
        "os.set_blocking(1, True)",
        ["y" * 9000] * 100,
        [],
    ),
    "a terminal's size": (
        "try: os.get_terminal_size(1)\nexcept OSError as error: print(error.strerror)",
        ["Inappropriate ioctl for device"],
        [],
    ),
    "a progress bar": (
        "for i in range(300): sys.stderr.write(f'\\r{i}%'); sys.stderr.flush()\n"
        "sys.stderr.write('\\r100%\\n')",
        [],
        ["100%"],
    ),
    "input": ("print(repr(sys.stdin.read()))", ["''"], []),
    "no child of dlctl's": (
        "try: os.wait()\nexcept ChildProcessError: print('none')",
        ["none"],
        [],
    ),
}


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """Use -> stream -> its lines. One process does all of it, one after the other."""
    path = tmp_path_factory.mktemp("uses") / "log"
    story = f"""
        for name, code in {[(name, code) for name, (code, *_) in USES.items()]!r}:
            for stream in (sys.stdout, sys.stderr):
                print("use:", name, file=stream)
            exec(code, {{**globals()}})
        """
    run(path, story)
    found: dict[str, dict[str, list[str]]] = {name: {"stdout": [], "stderr": []} for name in USES}
    now = {"stdout": "", "stderr": ""}
    for record in records(path):
        assert (record["level"], record["name"], record["inc"]) == ("info", "worker-0", 1)
        stream, text = record["stream"], record["msg"]
        if text.startswith("use: "):
            now[stream] = text.removeprefix("use: ")
        else:
            found[now[stream]][stream].append(text)
    return found


@pytest.mark.parametrize("use", USES)
def test_what_libraries_do_with_the_streams_works(used, use):
    _, out, err = USES[use]
    for stream, expected in (("stdout", out), ("stderr", err)):
        assert used[use][stream] == expected


# ---------------------------------------------------------------- whole lines, in order


def test_prints_of_three_threads_at_once_are_all_logged_and_not_mixed_up(tmp_path):
    story = """
        sys.setswitchinterval(1e-6)
        def work(n):
            for i in range(300):
                print(f"{n} {i}")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    lines = lines_after(tmp_path / "log", story)
    assert Counter(lines) == Counter(f"{n} {i}" for n in range(3) for i in range(300))
    for n in range(3):
        assert [line for line in lines if line.startswith(f"{n} ")] == [
            f"{n} {i}" for i in range(300)
        ]


def test_prints_of_several_processes_are_all_logged_and_not_mixed_up(tmp_path):
    """Although the log is rotated meanwhile: the reader follows."""
    story = """
        log_file.FILE_BYTES_MAX = 20_000
        for n in range(4):
            if os.fork() == 0:
                for i in range(300):
                    print(n, i, "of a process that loads data")
                os._exit(0)
        done = 0
        # The pipe holds all lines: its reader may be behind when the last child has left.
        while done < 4 or len(list(path.parent.iterdir())) == 1:
            done += done < 4 and os.waitpid(-1, os.WNOHANG)[0] > 0
            handler.rotate_if_full()
        """
    run(tmp_path / "log", story)
    parts = sorted(tmp_path.iterdir(), reverse=True)
    lines = [record["msg"] for part in parts for record in records(part)]
    expected = [f"{n} {i} of a process that loads data" for n in range(4) for i in range(300)]
    assert sorted(lines) == sorted(expected)


def test_the_last_line_is_logged_although_nothing_ends_it(tmp_path):
    story = """
        print("epoch 1", end="", flush=True)
        print(" done")
        print("and then", end="")
        sys.stderr.write("oh")
        print_streams.end_lines()
        """
    assert sorted(lines_after(tmp_path / "log", story)) == ["and then", "epoch 1 done", "oh"]


def test_lines_of_both_streams_are_logged_in_their_order(tmp_path):
    story = """
        print_streams.ORDER_S_MAX = 60.0  # On a loaded machine the reader may be late.
        for i in range(200):
            print(i, file=sys.stderr if i % 3 else sys.stdout)
        """
    assert lines_after(tmp_path / "log", story) == [str(i) for i in range(200)]


def test_an_unfinished_line_is_in_the_log_while_its_process_goes_on(tmp_path):
    story = """
        print("loading ...", end="", flush=True)
        while "loading ..." not in path.read_text(): threading.Event().wait(0.01)
        print(" done")
        """
    assert lines_after(tmp_path / "log", story) == ["loading ...", " done"]


def test_a_signal_handler_prints_while_a_line_is_begun(tmp_path):
    story = """
        goes_on = True
        def tick(*_):
            print("tick")
            if goes_on: signal.setitimer(signal.ITIMER_REAL, 1e-4)  # Never within this one.
        signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        for i in range(20_000): print("x", end="")
        goes_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("end")
        """
    lines = lines_after(tmp_path / "log", story)
    assert "tick" in {line.lstrip("x") for line in lines}
    assert lines[-1].endswith("end")


def test_a_fork_prints_and_logs_although_other_threads_were_at_it(tmp_path):
    """They wait in the kernel, as for a slow disk, with a line of the log and with a printed one.
    Lines that were begun stay with the process that did.
    """
    story = """
        def stuck(say):
            try: say("y" * 300_000)
            except OSError: pass
        handler.file.descriptors, own = (os.pipe()[1],), handler.file.descriptors
        there, (reader, writer) = os.dup(1), os.pipe()
        print("begun, ", end="")
        os.dup2(writer, 1)
        for say in (logging.getLogger("dlctl").info, print):
            threading.Thread(target=stuck, args=(say,), daemon=True).start()
        os.read(reader, 1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.dup2(there, 1)
            handler.file.descriptors = own
            print("from the fork")
            logging.getLogger("dlctl").info("logged by the fork")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.dup2(there, 1)
        print("and ended")
        sys.stdout.flush()
        os._exit(0)
        """
    lines = lines_after(tmp_path / "log", story)
    assert sorted(lines) == ["begun, and ended", "from the fork", "logged by the fork"]


# ---------------------------------------------------------------- floods, ends and crashes


@pytest.mark.long
def test_c_code_that_holds_the_interpreter_prints_more_than_a_pipe_has_room_for(tmp_path):
    """The log has the beginning, and says how much was dropped."""
    story = """
        import ctypes
        data = (b"x" * 999 + b"\\n") * 64_000
        written = 0
        write = ctypes.PyDLL(None).write
        write.restype = ctypes.c_ssize_t
        while written < len(data):
            written += write(1, data[written:], ctypes.c_size_t(len(data) - written))
        """
    lines = lines_after(tmp_path / "log", story)
    assert len(lines) > 10_000
    (dropped,) = [line for line in lines if line.startswith("dropped ")]
    count = int(dropped.split()[1].replace(",", ""))
    assert "4 MiB/s" in dropped
    assert len(lines) - 1 + count == 64_000


CRASHES = {
    "a segmentation fault": (
        "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)",
        signal.SIGSEGV,
        "Fatal Python error: Segmentation fault",
    ),
    "an abort in C": (
        "import ctypes; ctypes.CDLL(None).dprintf(2, b'assertion failed'); os.abort()",
        signal.SIGABRT,
        "assertion failed",
    ),
    "a kill": ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL, "last words"),
}


@pytest.mark.parametrize("crash", CRASHES)
def test_the_last_words_before_a_crash_and_of_it_are_logged(tmp_path, crash):
    code, number, words = CRASHES[crash]
    run(tmp_path / "log", f"print('last words', file=sys.stderr)\n{code}", status=-number)
    assert words in last_lines(tmp_path / "log")
    assert "last words" in [record["msg"] for record in records(tmp_path / "log")]


def readers(path: Path) -> list[psutil.Process]:
    """The processes that read for this log."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "daemons.worker.task.print_reader" in words and str(path) in words:
                found.append(process)
    return found


def test_a_child_that_outlives_the_process_holds_up_nobody(tmp_path):
    path = tmp_path / "log"
    story = """
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(child.pid)
        os._exit(0)
        """
    (pid,) = lines_after(path, story)
    child = psutil.Process(int(pid))
    try:
        _, left = psutil.wait_procs(readers(path), timeout=LIMIT_S)
        assert not left
        assert child.is_running(), "it still has the pipes"
    finally:
        child.kill()


def test_without_the_reader_what_is_printed_goes_to_the_log_as_it_is(tmp_path):
    path, (told, tell) = tmp_path / "log", os.pipe()
    story = f"""
        print("before", flush=True)
        os.read({told}, 1)
        print("after")
        print("err", file=sys.stderr)
        subprocess.run(["echo", "child"])
        """
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(run, path, story, pass_fds=(told,))
        while not (path.exists() and "before" in path.read_text()):
            assert not done.done()
        for reader in readers(path):
            reader.kill()
            reader.wait()
        os.write(tell, b"x")
        done.result()
    for fd in (told, tell):
        os.close(fd)
    before, *after = path.read_text().splitlines()
    assert json.loads(before)["msg"] == "before"
    assert after == ["after", "err", "child"]


def test_a_reader_that_cannot_start_leaves_streams_that_work(tmp_path):
    path = tmp_path / "log"
    story = """
        from daemons.worker.task import print_streams
        sys.executable = "/nowhere/python"
        print_streams.capture(handler, "worker-0", 2)
        print("printed", flush=True)
        """
    lines = lines_after(path, story)
    assert lines[0].startswith("printed lines will have no times in the log: [Errno 2]")
    assert lines[1] == "printed"


# ---------------------------------------------------------------- the task's logging

CONFIGURED = {
    "nothing": ("", ["warning careful"]),
    "a level alone": (
        "logging.getLogger().setLevel('INFO')",
        ["info loaded", "warning careful"],
    ),
    "basicConfig": (
        "logging.basicConfig(level=logging.INFO)",
        ["info INFO:mine:loaded", "info WARNING:mine:careful"],
    ),
    "basicConfig with force": (
        "logging.basicConfig(level='INFO', format='%(message)s', force=True)",
        ["info loaded", "info careful"],
    ),
    "dictConfig": (
        "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}})",
        [],
    ),
    "disable": ("logging.disable()", []),
}


@pytest.mark.parametrize("how", CONFIGURED)
def test_what_the_task_logs_is_in_the_log_and_its_settings_do_not_touch_ours(tmp_path, how):
    setting, expected = CONFIGURED[how]
    story = f"""
        import logging.config, warnings
        {setting}
        logging.getLogger("mine").info("loaded")
        logging.getLogger("mine").warning("careful")
        logging.getLogger("dlctl").info("of ours")
        warnings.warn("deprecated")
        """
    run(tmp_path / "log", story)
    found = [f"{record['level']} {record['msg']}" for record in records(tmp_path / "log")]
    ours = [line for line in found if line == "info of ours" or "deprecated" in line]
    assert [line for line in found if line not in ours] == expected
    assert ours[0] == "info of ours"
    assert ours[1].startswith("warning <string>:")
    assert "UserWarning: deprecated" in ours[1]


def test_a_log_that_fails_while_it_logs_neither_hangs_nor_recurses(tmp_path):
    story = """
        class Broken:
            def __str__(self): raise RuntimeError
        logging.getLogger("dlctl").info("%s", Broken())
        print("still there")
        """
    run(tmp_path / "log", story)
    lines = [record["msg"] for record in records(tmp_path / "log")]
    assert "still there" in lines
    assert "--- Logging error ---" in lines


# ---------------------------------------------------------------- the file


def test_raw_output_alone_makes_the_log_turn_over(tmp_path):
    """As of a daemon that is no worker."""
    story = """
        log_file.FILE_BYTES_MAX = 1000
        os.write(handler.file.descriptors[0], json.dumps({"msg": "x" * 2000}).encode() + b"\\n")
        handler.rotate_if_full()
        print("in the new file")
        """
    lines = lines_after(tmp_path / "log", story)
    assert lines == ["in the new file"]
    assert "x" * 2000 in (tmp_path / "log.1").read_text()


def test_a_full_log_is_turned_over_only_by_the_process_that_it_belongs_to(tmp_path):
    """Processes that load data stay in the part of the file that they have."""
    story = """
        log_file.FILE_BYTES_MAX = 1000
        log = logging.getLogger("dlctl")
        if os.fork() == 0:
            for i in range(8):
                log.info(f"{i} " + "x" * 1000)
            os._exit(0)
        os.wait()
        log.info("mine")
        """
    assert lines_after(tmp_path / "log", story) == []
    older = [record["msg"] for record in records(tmp_path / "log.1")]
    assert [line.split()[0] for line in older] == [*map(str, range(8)), "mine"]


def test_a_line_for_which_there_was_no_room_does_not_spoil_the_next_one(tmp_path):
    """Be it of this process or printed: the handler prints why it has failed."""
    story = """
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
        logging.getLogger("dlctl").info("x" * 200)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        logging.getLogger("dlctl").info("there is room again")
        """
    run(tmp_path / "log", story)
    torn, *whole = (tmp_path / "log").read_text().splitlines()
    assert len(torn) == 100
    # Two processes may both end the torn line.
    assert "there is room again" in [json.loads(line)["msg"] for line in whole if line]
