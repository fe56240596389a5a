"""A process that `fork_server` has forked becomes what its command line says, and ends like that:
with its own parent, session, limits, directory, descriptors, environment, command line and streams.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import fork_server
import process_title

PARENT_S, LOOK_S = 30.0, 0.0002
"""Time for the caller to become the parent; interval of the checks."""
CANNOT_FLUSH = 120
"""Python's exit code if what was printed could not be written at the end."""
DESCRIPTORS_END = 1 << 16
_execv = os.execv


def become(request: fork_server.Request, descriptors: list[int]) -> NoReturn:
    """Be the process of this request, and end like it."""
    code = 1
    try:
        directory, line, *streams = descriptors
        if request.is_session:
            os.setsid()
        _await_parent(request.parent)
        _take_limits(request.parent)
        os.fchdir(directory)
        os.chdir(request.directory)
        line = _take_descriptors(line, streams, request.passed)
        module = request.argv[3] if request.argv[2] == "-m" else ""
        fork_server.begin_companion(not module or module in fork_server.COMPANIONS)
        os.environ.clear()
        os.environ.update(request.environment)
        _begin(request.argv)
        os.write(line, str(os.getpid()).encode())
        os.close(line)
        code = _run(request.argv)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _await_parent(parent: int) -> None:
    """Wait until the process between this one and the caller has exited."""
    deadline, pause = time.monotonic() + PARENT_S, threading.Event()
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        pause.wait(LOOK_S)


def _take_limits(parent: int) -> None:
    """What the caller may have changed since its companion was forked."""
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            number = getattr(resource, name)
            limits = resource.prlimit(parent, number)
            if limits != resource.getrlimit(number):
                resource.setrlimit(number, limits)
    os.sched_setaffinity(0, os.sched_getaffinity(parent))
    nice = os.getpriority(os.PRIO_PROCESS, parent)
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    status = Path(f"/proc/{parent}/status").read_text()
    os.umask(int(status.partition("\nUmask:")[2].split()[0], 8))
    mine, its = (Path(f"/proc/{each}/oom_score_adj") for each in ("self", parent))
    if mine.read_text() != its.read_text():
        mine.write_text(its.read_text())


def _take_descriptors(line: int, streams: Sequence[int], passed: Sequence[int]) -> int:
    """Leave the streams as 0, 1, 2 and `passed`, and the line, whose number is returned."""
    above = max([fork_server.COMPANION_FD, *passed]) + 1
    line, *moved = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (line, *streams))
    for source, target in zip(moved, (0, 1, 2, *passed), strict=True):
        os.dup2(source, target)
    before = 2
    for kept in (*sorted(passed), line, DESCRIPTORS_END):
        os.closerange(before + 1, kept)
        before = kept
    return line


def _begin(argv: list[str]) -> None:
    """What an interpreter does at its start: random numbers, streams, and what it has read."""
    import numpy as np
    import torch

    process_title.show(argv, os.environ)
    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None
    time.tzset()
    _search(os.environ.get("PYTHONPATH", str(fork_server.ROOT)).split(os.pathsep))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _search(folders: list[str]) -> None:
    """Import from these folders; what is in one before the project's is not what was imported."""
    root = str(fork_server.ROOT)
    at = sys.path.index(root)
    sys.path[at : at + 1] = folders
    for folder in folders[: folders.index(root)]:
        found = [
            *Path(folder).glob("*.py"),
            *(p.parent for p in Path(folder).glob("*/__init__.py")),
        ]
        names = {path.stem for path in found if path.parent != fork_server.KIT}
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]


def _stream(number: int, like: Any) -> io.TextIOWrapper:
    """Standard input, output or error, as Python makes them."""
    is_unbuffered = number > 0 and bool(os.environ.get("PYTHONUNBUFFERED"))
    raw: Any = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    if not is_unbuffered:
        raw = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    made = io.TextIOWrapper(
        raw,
        encoding=like.encoding,
        errors=like.errors,
        newline="\n" if number else None,
        line_buffering=number == 2 or (number == 1 and os.isatty(1)),
        write_through=is_unbuffered,
    )
    made.mode = "w" if number else "r"  # type: ignore[misc]
    return made


# ---------------------------------------------------------------- the program


class _Executed(BaseException):
    """The program has called exec for one that may be forked: this process goes on as that."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.argv = argv


def _exec(path: str, argv: Sequence[str]) -> NoReturn:
    words = [os.fspath(word) for word in argv]
    if path == words[0] and fork_server.is_ours(words) and fork_server.starts_alike(os.environ):
        raise _Executed(words)
    _execv(path, argv)


def _go_on_as(argv: list[str]) -> None:
    """What exec does: no handlers of signals, no functions for the exit, no other descriptors."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    for each in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # That of the list itself.
            if not os.get_inheritable(each) and each != fork_server.COMPANION_FD:
                os.close(each)
    _begin(argv)


def _run(argv: list[str]) -> int:
    """Run the program; returns its exit code, as `python` would."""
    os.execv = _exec  # type: ignore[assignment]
    code: Any = 0
    try:
        if argv[2] == "-m":
            sys.argv = [argv[3], *argv[4:]]
            runpy.run_module(argv[3], run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *argv[4:]]
            program = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(argv[3], "<string>", "exec"), program.__dict__)
    except _Executed as executed:
        _go_on_as(executed.argv)
        return _run(executed.argv)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    return _end(code or 0)


def _end(code: int) -> int:
    """Do what an interpreter does before it exits."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        traceback.print_exception(error)
        code = CANNOT_FLUSH
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    return code & 0xFF
