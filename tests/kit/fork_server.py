"""Commands and daemons of tests are forked from a process that has imported all they import.

Each of them would otherwise start Python, and most of them import torch, which takes longer than all
the rest of a short run. `Popen` is `subprocess.Popen`, but for processes of this project: those it
has forked by a companion, a child that has done the imports and waits. What is forked becomes what
the command line would have become: a child of the caller, with its own pid, session, command line,
environment, directory, descriptors and limits; it ends like an interpreter. It has a companion of
its own, if it starts processes, and `Popen` in place of the one of `subprocess`. So no part of the
project knows of this.

    caller -> companion    names of modules to import; or a `Request`, with descriptors: the
                           directory, a line, standard input, output and error, `pass_fds`
    process -> caller      on its line: its pid, once all of that is done; the caller waits for it, as
                           it would for exec

The companion forks a process that forks the new one and exits, so that this is handed to the
nearest subreaper, which the caller is for that moment.

Whatever would differ for a process that is forked starts in the ordinary way: with variables of the
environment that Python or a library reads at its start, with a function to be called before exec, in
other namespaces. With DLCTL_TESTS_SPAWN=1 everything does, as in the long run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SWITCH = "DLCTL_TESTS_SPAWN"
ROOT = Path(__file__).parents[2]
IMPORTED = (
    "numpy",
    "torch",
    "torch.optim",
    "daemons.worker.main",
    "daemons.script.main",
    "daemons.attach.begin",
    "daemons.agent.serving",
    "daemons.coordinator.agents",
    "daemons.coordinator.checkpoint_directories",
    "daemons.coordinator.exports",
    "daemons.coordinator.past",
    "daemons.files.log_mirror",
    "daemons.server.committing",
    "daemons.server.failpoint",
    "daemons.server.watching",
    "dlctl.roles.coordinator.coordinator",
    "dlctl.roles.server.server",
    "dlctl.cli.commands.run",
    "dlctl.cli.commands.recover",
    "dlctl.ops.launch",
)
"""What commands and daemons import; a module that is missing here only takes longer."""
COMPANIONS = ("daemons.agent", "daemons.coordinator", "daemons.guest")
"""Daemons that start others."""
STARTED_WITH = {"PYTHONHASHSEED": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
"""Variables of the companions: those of a worker, whose job has the seed 0."""
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_")
READ_AT_START += ("OPENBLAS_", "TORCH", "CUDA_", "NVIDIA_", "GLOO_", "ATEN_", "ASAN_", "TMPDIR")
"""Beginnings of the names of variables that are too late for a process that is forked."""
HANDED_ON = ("PYTHONUNBUFFERED", "PYTHONPATH")
"""But these are seen to."""
LEFT_OUT = ("PYTHONHASHSEED", "TORCH_CPP_LOG_LEVEL")
"""Commands and other daemons than workers lack them: they make no difference to these."""
BYTES_MAX, DESCRIPTORS_MAX = 1 << 20, 200
READY_S, PARENT_S, LOOK_S = 60.0, 10.0, 0.0002
PR_SET_MM, PR_SET_MM_MAP = 35, 14
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
HIGH = 700
"""The companion's descriptor in a process: out of the way of those that it opens."""
CANNOT_FLUSH = 120
"""Python's exit code if what was printed could not be written at the end."""
_libc = ctypes.CDLL(None, use_errno=True)


class Request(NamedTuple):
    argv: list[str]
    environment: dict[str, str]
    parent: int
    is_session: bool
    directory: str
    passed: list[int]
    """The numbers that the descriptors have, after the first five."""


# ---------------------------------------------------------------- the caller


class Companion:
    """The caller's end of its companion."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.owner = os.getpid()
        self._lock = threading.Lock()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The pid of the new process. Raises OSError if there is none."""
        mine, its = _pair()
        with mine, self._lock, _adopting():
            with its:
                data = json.dumps(request).encode()
                socket.send_fds(self.line, [data], [descriptors[0], its.fileno(), *descriptors[1:]])
            mine.settimeout(READY_S)
            pid = mine.recv(64)
        if not pid:
            raise OSError(f"the fork server could not start {request.argv}")
        return int(pid)


_companion: Companion | None = None
_ORIGIN, _ENVIRONMENT = os.getpid(), dict(os.environ)
"""The process that has imported this module, not one that was forked from it; its variables."""


def companion() -> Companion | None:
    """That of this process, which is started if need be. None: there is none, as this process was
    forked by others; it starts processes as usual.
    """
    if _companion is not None and _companion.owner == os.getpid():
        return _companion
    if os.environ.get(SWITCH) == "1" or os.getpid() != _ORIGIN:
        return None
    return _begin()


def _begin() -> Companion:
    """Start the companion of this process; returns while it imports."""
    global _companion
    mine, its = _pair()
    environment = {k: v for k, v in _ENVIRONMENT.items() if not k.startswith("PYTEST_")}
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=its, cwd=ROOT, env=environment | STARTED_WITH
        )
    _companion = Companion(mine)
    atexit.register(process.wait)
    atexit.register(mine.close)  # Called first: then the companion exits.
    return _companion


def import_also(*modules: str) -> None:
    """Have the companion import more, for what will be forked from now on."""
    if (mine := companion()) is not None:
        mine.line.send(json.dumps(modules).encode())


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, forked where that makes no difference."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        bound = inspect.signature(super()._execute_child).bind(*arguments, **named)  # type: ignore[misc]
        given = bound.arguments
        mine = companion() if _may_fork(given) else None
        if mine is None:
            super()._execute_child(*arguments, **named)  # type: ignore[misc]
            return
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            wanted = (given["p2cread"], given["c2pwrite"], given["errwrite"])
            streams = [fd if fd >= 0 else number for number, fd in enumerate(wanted)]
            passed = sorted(given["pass_fds"])
            environment = os.environ if given["env"] is None else given["env"]
            request = Request(
                [os.fspath(word) for word in given["args"]],
                {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
                os.getpid(),
                given["start_new_session"],
                os.fspath(given["cwd"] or "."),
                passed,
            )
            self.pid = mine.fork(request, [directory, *streams, *passed])
            self._child_created = True
        finally:
            os.close(directory)
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]


def _is_ours(words: Any) -> bool:
    """Whether this is the command line of a process of this project."""
    match words:
        case [sys.executable, "-P", "-m", str(module), *_]:
            return module.startswith("daemons.")
        case [sys.executable, "-P", "-c", str(code), *_]:
            return "from dlctl.cli.app import main" in code
    return False


def _may_fork(given: Mapping[str, Any]) -> bool:
    if not _is_ours(given["args"]):
        return False
    if any(given[n] is not None for n in ("preexec_fn", "gid", "gids", "uid", "executable")):
        return False
    if given["shell"] or given["umask"] >= 0 or not given["close_fds"]:
        return False
    if given.get("process_group", -1) not in (-1, None) or not given["restore_signals"]:
        return False
    signals = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
    if any(signal.getsignal(each) is signal.SIG_IGN for each in signals):
        return False
    if signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    if not all(fd >= 0 or _is_open(number) for number, fd in enumerate(streams)):
        return False
    return _has_same_start(os.environ if given["env"] is None else given["env"])


def _has_same_start(environment: Mapping[Any, Any]) -> bool:
    """Whether what Python and libraries read when they start is what a companion has read."""
    wanted = {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()}
    if str(ROOT) not in wanted.get("PYTHONPATH", str(ROOT)).split(os.pathsep):
        return False
    theirs = _read_at_start(wanted)
    mine = dict(_START)
    for name in LEFT_OUT:
        if name not in theirs:
            mine.pop(name, None)
    return theirs == mine


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in HANDED_ON
    }


_START = _read_at_start({**os.environ, **STARTED_WITH})
"""Kept from when this module was imported, in the caller or its companion."""


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


@contextlib.contextmanager
def _adopting() -> Any:
    """This process is the parent of processes whose own parent exits before them, for a moment."""
    was = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BYTES_MAX)
    return pair


# ---------------------------------------------------------------- the companion


def main() -> None:
    parent = os.getppid()
    line = socket.socket(fileno=os.dup(0))
    _leave_streams()
    os.chdir("/")
    _import(IMPORTED)
    subprocess.Popen = Popen  # type: ignore[misc]
    serve(line, parent)


def _import(names: Sequence[str]) -> None:
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _leave_streams() -> None:
    """A pipe of the parent must not stay open because of this process; nor may it print."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(2):
        os.dup2(null, number)
    if null > 2:
        os.close(null)


def serve(line: socket.socket, parent: int) -> None:
    """Fork a process for each request until the parent, whose companion this is, is gone."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while os.getppid() == parent:
        data, descriptors, _, _ = socket.recv_fds(line, BYTES_MAX, DESCRIPTORS_MAX)
        if not data:
            return
        if not descriptors:
            _import(json.loads(data))
            continue
        between = os.fork()
        if not between:
            try:
                if not os.fork():
                    become(Request(*json.loads(data)), descriptors)
            finally:
                os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(request: Request, descriptors: list[int]) -> NoReturn:
    """Be the process of this request, and end like it."""
    code = 1
    try:
        directory, line, *streams = descriptors
        if request.is_session:
            os.setsid()
        if not _has_parent(request.parent):
            os._exit(1)
        _take_limits(request.parent)
        os.fchdir(directory)
        os.chdir(request.directory)
        mine = _take_descriptors(line, streams, request.passed)
        os.environ.clear()
        os.environ.update(request.environment)
        module = request.argv[3] if request.argv[2] == "-m" else ""
        _begin_companion(not module or module in COMPANIONS)
        _show(request.argv, request.environment)
        _begin_afresh()
        os.write(mine, str(os.getpid()).encode())
        os.close(mine)
        code = _run(request.argv)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _has_parent(parent: int) -> bool:
    """Whether the caller is the parent, once the process between them has exited."""
    deadline = time.monotonic() + PARENT_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


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
    for text in Path(f"/proc/{parent}/status").read_text().splitlines():
        if text.startswith("Umask:"):
            os.umask(int(text.split()[1], 8))
    score = Path(f"/proc/{parent}/oom_score_adj").read_text()
    if score != Path("/proc/self/oom_score_adj").read_text():
        Path("/proc/self/oom_score_adj").write_text(score)


def _take_descriptors(line: int, streams: list[int], passed: list[int]) -> int:
    """Leave the line, whose number is returned, and the others as 0, 1, 2 and `passed`."""
    import fcntl

    above = max([HIGH, *passed]) + 1
    line = fcntl.fcntl(line, fcntl.F_DUPFD_CLOEXEC, above)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in streams]
    kept = [0, 1, 2, *passed]
    for source, target in zip(moved, kept, strict=True):
        os.dup2(source, target)
    last = 2
    for number in [*sorted(passed), line]:
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, 1 << 16)
    return line


def _begin_companion(is_wanted: bool) -> None:
    """Fork the companion of this process, which has done no more than its imports."""
    global _companion
    _companion = None
    if not is_wanted:
        return
    mine, its = _pair()
    parent = os.getpid()
    if os.fork():
        its.close()
        high = os.dup2(mine.fileno(), HIGH, inheritable=False)
        mine.close()
        _companion = Companion(socket.socket(fileno=high))
        return
    try:
        end = os.dup2(its.fileno(), 3, inheritable=False) if its.fileno() != 3 else 3
        its.detach()
        mine.detach()
        os.closerange(4, 1 << 16)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        os.chdir("/")
        serve(socket.socket(fileno=end), parent)
    finally:
        os._exit(0)


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in "start_code end_code start_data end_data".split()),
        *((name, ctypes.c_uint64) for name in "start_brk brk start_stack".split()),
        *((name, ctypes.c_uint64) for name in "arg_start arg_end env_start env_end".split()),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_shown: list[Any] = []
"""The memory that others see as the command line and the environment of this process."""


def _show(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show others this command line and environment, in /proc. Raises OSError if that cannot be
    changed here: an older kernel, or one without CONFIG_CHECKPOINT_RESTORE.
    """
    fields = [*map(int, Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[1:])]
    _libc.sbrk.restype = ctypes.c_void_p
    places = dict(start_code=26, end_code=27, start_stack=28, start_data=45, end_data=46)
    places |= dict(start_brk=47)
    # `fields` begins with the fourth one of proc(5), which counts from one.
    shown = _MemoryMap(**{name: fields[place - 4] for name, place in places.items()})
    shown.brk, shown.exe_fd = _libc.sbrk(0), 0xFFFFFFFF
    items = [f"{name}={value}" for name, value in environment.items()]
    for begin, end, words in (("arg_start", "arg_end", argv), ("env_start", "env_end", items)):
        line = b"".join(os.fsencode(word) + b"\0" for word in words)
        memory = ctypes.create_string_buffer(line, max(1, len(line)))
        _shown.append(memory)
        setattr(shown, begin, ctypes.addressof(memory))
        setattr(shown, end, ctypes.addressof(memory) + len(line))
    size = ctypes.sizeof(shown)
    if _libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(shown), ctypes.c_ulong(size), 0):
        raise OSError(ctypes.get_errno(), "the command line cannot be changed")
    sys.orig_argv[:] = argv


def _begin_afresh() -> None:
    """What an interpreter does at its start: numbers, streams, and what it has read."""
    import multiprocessing

    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None
    time.tzset()
    _search(os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep))
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, name), is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _search(folders: list[str]) -> None:
    """Import from these folders; what is in one before the project's is not what was imported."""
    at = sys.path.index(str(ROOT))
    sys.path[at : at + 1] = folders
    for folder in folders[: folders.index(str(ROOT))]:
        found = [
            *Path(folder).glob("*.py"),
            *(p.parent for p in Path(folder).glob("*/__init__.py")),
        ]
        names = {path.stem for path in found} - {"fork_server"}
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]


def _stream(number: int, like: Any, is_unbuffered: bool) -> io.TextIOWrapper:
    raw: Any = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    if number == 0:
        raw = io.BufferedReader(raw)
    elif not is_unbuffered:
        raw = io.BufferedWriter(raw)
    made = io.TextIOWrapper(
        raw,
        encoding=like.encoding,
        errors=like.errors,
        newline=None if number == 0 else "\n",
        line_buffering=number == 2 or (number == 1 and os.isatty(1)),
        write_through=number > 0 and is_unbuffered,
    )
    made.mode = "r" if number == 0 else "w"  # type: ignore[misc]
    raw_name = getattr(raw, "raw", raw)
    raw_name.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    return made


class _Executed(BaseException):
    """The program has called exec for one that may be forked: this process goes on as that."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.argv = argv


def _exec(path: str, argv: Sequence[str]) -> NoReturn:
    words = [os.fspath(word) for word in argv]
    if path == words[0] and _is_ours(words) and _has_same_start(os.environ):
        raise _Executed(words)
    _REAL_EXEC(path, argv)


_REAL_EXEC = os.execv


def _go_on_as(argv: list[str]) -> None:
    """What exec does: no handlers of signals, no functions for the exit, no descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.get_inheritable(int(each)) and int(each) != HIGH:
                os.close(int(each))
    _show(argv, os.environ)
    _begin_afresh()


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
            program = types.ModuleType("__main__")
            sys.modules["__main__"] = program
            exec(compile(argv[3], "<string>", "exec"), program.__dict__)  # noqa: S102
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
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = CANNOT_FLUSH
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    return (code or 0) & 0xFF


if __name__ == "__main__":
    sys.modules["fork_server"] = sys.modules["__main__"]
    main()
