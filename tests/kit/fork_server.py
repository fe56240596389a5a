"""Commands and daemons of tests are forked from a process that has imported what they import.

Each of them would otherwise start Python, and most would import torch, which takes longer than all
the rest of a short run. `Popen` is `subprocess.Popen`, but for processes of this project: those it
has forked by a companion, a child that has done the imports and waits. The new process is a child
of the caller, and becomes what its command line would have become (`forked_process`). It has a
companion of its own, if it starts processes, and `Popen` in place of the one of `subprocess`. So no
part of the project knows of this.

    caller -> companion    names of modules to import; or a `Request`, with descriptors: the
                           directory, a line, standard input, output and error, `pass_fds`
    process -> caller      on its line: its pid, once it is what it is to be; the caller waits for
                           that, as it would for exec

The companion forks a process that forks the new one and exits, so that the nearest subreaper is
given that, which the caller is for a moment.

Whatever would differ for a forked process starts in the ordinary way: with other variables that
Python or a library reads at its start, with a function to be called before exec, in other
namespaces. With DLCTL_TESTS_SPAWN=1 everything does, as in the long run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SWITCH = "DLCTL_TESTS_SPAWN"
PYTHON = sys.executable
"""A test may say that it is another one."""
KIT = Path(__file__).parent
ROOT = KIT.parents[1]
PROGRAM = """import sys
sys.path.insert(0, sys.argv[1])
import fork_server
fork_server.main()
"""
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
    "forked_process",
)
"""What commands and daemons import; a module that is missing here only takes longer."""
COMPANIONS = ("daemons.agent", "daemons.coordinator", "daemons.guest", "daemons.guest.begin")
"""Daemons that start others, as commands do."""
STARTED_WITH = {"PYTHONHASHSEED": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
"""Variables of the companions: those of a worker, whose job has the seed 0."""
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "KMP_")
READ_AT_START += ("OPENBLAS_", "TORCH", "CUDA_", "NVIDIA_", "GLOO_", "ATEN_", "ASAN_", "TMPDIR")
"""Beginnings of the names of variables that come too late for a process that is forked."""
SEEN_TO = ("PYTHONUNBUFFERED", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
"""But not these: `forked_process` does what Python would; the last one is set by torch itself, when
a test imports torch._dynamo.
"""
WORKERS_HAVE = ("PYTHONHASHSEED", "TORCH_CPP_LOG_LEVEL")
"""Commands and other daemons lack them, to which they make no difference."""
BYTES_MAX, DESCRIPTORS_MAX = 1 << 20, 200
READY_S = 60.0
"""Time for the imports of the companion and a fork."""
COMPANION_FD = 700
"""Out of the way of the descriptors that a process opens."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
_libc = ctypes.CDLL(None, use_errno=True)


class Request(NamedTuple):
    argv: list[str]
    environment: dict[str, str]
    parent: int
    is_session: bool
    """Whether it leads a session of its own."""
    directory: str
    """Relative to the one whose descriptor comes with it."""
    passed: list[int]
    """The numbers of the descriptors after the first five."""


# ---------------------------------------------------------------- the caller


class Companion:
    """The caller's end of its companion."""

    def __init__(self, line: socket.socket) -> None:
        self.owner = os.getpid()
        self._line = line
        self._lock = threading.Lock()

    def import_also(self, modules: Sequence[str]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._line.send(json.dumps(modules).encode())

    def fork(self, request: Request, descriptors: Sequence[int]) -> int | None:
        """The pid of the new process. None: the companion has ended, or the request is too long.
        Raises OSError if the process ended before it was ready.
        """
        mine, its = _pair()
        with mine, self._lock, _adopting():
            with its:
                data = json.dumps(request).encode()
                sent = [descriptors[0], its.fileno(), *descriptors[1:]]
                try:
                    socket.send_fds(self._line, [data], sent)
                except OSError:
                    return None
            mine.settimeout(READY_S)
            pid = mine.recv(64)
        if pid:
            return int(pid)
        if self._has_ended():
            return None
        raise OSError(f"it was forked, and ended too soon: {request.argv}")

    def _has_ended(self) -> bool:
        try:
            return not self._line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class _Origin(NamedTuple):
    """The process that may begin a companion, not one that was forked from it."""

    pid: int
    environment: dict[str, str]
    """With the variables of the companion."""
    ignored: frozenset[signal.Signals]


_companion: Companion | None = None
_origin: _Origin | None = None


def allow() -> None:
    """From now on this process has others forked, by a companion with its variables of now."""
    global _origin
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    _origin = _Origin(os.getpid(), mine | STARTED_WITH, _ignored())


def _ignored() -> frozenset[signal.Signals]:
    """Signals that are ignored, as processes that are started inherit."""
    signals = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
    return frozenset(each for each in signals if signal.getsignal(each) is signal.SIG_IGN)


def companion() -> Companion | None:
    """That of this process, which is started if need be. None: this process was forked by others,
    and starts processes as usual.
    """
    if _companion is not None and _companion.owner == os.getpid():
        return _companion
    if os.environ.get(SWITCH) == "1" or _origin is None or os.getpid() != _origin.pid:
        return None
    return _begin(_origin.environment)


def _begin(environment: Mapping[str, str]) -> Companion:
    """Start the companion of this process; returns while it imports."""
    global _companion
    mine, its = _pair()
    words = [sys.executable, "-P", "-c", PROGRAM, str(KIT)]
    with its:
        process = subprocess.Popen(words, stdin=its, cwd=ROOT, env=environment)
    _companion = Companion(mine)
    atexit.register(process.wait)
    atexit.register(mine.close)  # Called first: then the companion exits.
    return _companion


def import_also(*modules: str) -> None:
    """Have the companion import more, for what will be forked from now on."""
    if (mine := companion()) is not None:
        mine.import_also(modules)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, forked where that makes no difference."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(*arguments, **named).arguments
        mine = companion() if _may_fork(given) else None
        pid = None if mine is None else self._fork(mine, given)
        if pid is None:
            execute(*arguments, **named)
            return
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]

    @staticmethod
    def _fork(mine: Companion, given: Mapping[str, Any]) -> int | None:
        environment = os.environ if given["env"] is None else given["env"]
        passed = sorted(given["pass_fds"])
        request = Request(
            [os.fspath(word) for word in given["args"]],
            {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            os.getpid(),
            given["start_new_session"],
            os.fspath(given["cwd"] or "."),
            passed,
        )
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return mine.fork(request, [directory, *_streams(given), *passed])
        finally:
            os.close(directory)


def is_ours(words: Any) -> bool:
    """Whether this is the command line of a process of this project."""
    match words:
        case [python, "-P", "-m", str(module), *_] if python == PYTHON:
            return module.startswith("daemons.")
        case [python, "-P", "-c", str(code), *_] if python == PYTHON:
            return "from dlctl.cli.app import main" in code
    return False


def _may_fork(given: Mapping[str, Any]) -> bool:
    """Whether nothing is asked for that only exec does. given: arguments of `_execute_child`."""
    if not is_ours(given["args"]) or given["shell"] or given["umask"] >= 0:
        return False
    if any(given[name] is not None for name in ("preexec_fn", "gid", "gids", "uid", "executable")):
        return False
    if not given["close_fds"] or not given["restore_signals"]:
        return False
    if given.get("process_group", -1) not in (-1, None):
        return False
    if _origin is None or _ignored() != _origin.ignored:
        return False
    if signal.pthread_sigmask(signal.SIG_BLOCK, ()) or not all(map(_is_open, _streams(given))):
        return False
    return starts_alike(os.environ if given["env"] is None else given["env"])


def _streams(given: Mapping[str, Any]) -> list[int]:
    """Descriptors of its standard input, output and error."""
    ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    return [fd if fd >= 0 else number for number, fd in enumerate(ends)]


def starts_alike(environment: Mapping[Any, Any]) -> bool:
    """Whether what Python and libraries read when they start is what the companion has read."""
    wanted = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    if str(ROOT) not in wanted.get("PYTHONPATH", str(ROOT)).split(os.pathsep):
        return False
    read = _read_at_start(wanted)
    left_out = {name for name in WORKERS_HAVE if name not in read}
    mine = _read_at_start({} if _origin is None else _origin.environment)
    return read == {name: value for name, value in mine.items() if name not in left_out}


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in SEEN_TO
    }


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """For a moment this process is the parent of those whose own parent exits before them."""
    was = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep messages apart."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BYTES_MAX)
    return pair


# ---------------------------------------------------------------- the companion


def main() -> None:
    """Import, and serve the caller, whose line is standard input."""
    parent, line = os.getppid(), socket.socket(fileno=os.dup(0))
    allow()
    leave_streams((0, 1))
    os.chdir("/")
    _import(IMPORTED)
    import process_title

    try:
        process_title.show(sys.orig_argv, os.environ)
    except OSError as error:
        sys.exit(f"the processes of tests are not forked, which takes longer: {error}")
    sys.path.remove(str(KIT))
    subprocess.Popen = Popen  # type: ignore[misc]
    serve(line, parent)


def _import(names: Sequence[str]) -> None:
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def leave_streams(numbers: Sequence[int]) -> None:
    """A pipe of the caller must not stay open because of this process."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(null, number)
    os.close(null)


def serve(line: socket.socket, parent: int) -> None:
    """Fork a process for each request until the parent, whose companion this is, is gone."""
    from forked_process import become

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


def begin_companion(is_wanted: bool) -> None:
    """Fork the companion of this new process, which has done no more than its imports."""
    global _companion
    _companion = None
    if not is_wanted:
        return
    parent, (mine, its) = os.getpid(), _pair()
    if os.fork():
        its.close()
        line = os.dup2(mine.fileno(), COMPANION_FD, inheritable=False)
        mine.close()
        _companion = Companion(socket.socket(fileno=line))
        return
    try:
        line = os.dup2(its.detach(), COMPANION_FD, inheritable=False)
        mine.detach()
        os.closerange(3, COMPANION_FD)
        os.closerange(COMPANION_FD + 1, 1 << 16)
        leave_streams((0, 1, 2))
        os.chdir("/")
        serve(socket.socket(fileno=line), parent)
    finally:
        os._exit(0)
