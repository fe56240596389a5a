"""The agent's end of a template (`daemons.template`): starts it, and has it fork daemons.

Whatever is wrong with it, a daemon is started as any other process, which only takes longer.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from daemons.template.words import (
    MESSAGE_BYTES_MAX,
    PER_DAEMON,
    READY,
    ROOM_BYTES,
    StartRequest,
    pair,
)
from dlctl.errors import DlctlError
from dlctl.job import config, placement
from dlctl.launch import base
from dlctl.util import regular

log = logging.getLogger("dlctl")
SWITCH = "DLCTL_SPAWN"
"""An environment variable: "1" switches templates off."""
READY_S = 60.0
"""Time for the imports; a daemon needs as long for its own."""
FORK_S = 3.0
"""Time for a fork; the agent waits so long."""
DEATHS_MAX = 3
"""Templates that ended before they were of use, in a row: the next one would, too."""
PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A process that the template has forked; a child of this one, as `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it. Call this when it has exited."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def wanted(directory: Path, agent: str) -> set[str]:
    """The roles that this agent will start soon."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, DlctlError):
        if (job := _job_of(directory)) is not None:
            places = placement.place(job).items()
            return {name.rpartition("-")[0] for name, its_agent in places if its_agent == agent}
    return set()


def _later_ranks(directory: Path) -> int:
    """The processes of a worker beside its first."""
    job = _job_of(directory)
    return 0 if job is None else job.ranks - 1


def _job_of(directory: Path) -> config.JobFile | None:
    """None: it cannot be read, as the daemons will say."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return config.of_stored(json.loads(regular.read_bytes(directory / "job.json")))
    return None


def _sets_variables(directory: Path) -> bool:
    """Whether a user's program mentions variables of its environment, which it may set before it
    imports torch. A task, which is imported after torch in any case: some of torch's own, which it
    may set before the first optimiser imports torch._dynamo.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        job = base.read_job(directory)["job"]
        script = job.get("script")
        source = regular.read_bytes(Path(script or job["task"].rpartition(":")[0]))
        mentions = b"environ" in source or b"putenv" in source
        return mentions and (bool(script) or b"TORCH" in source)
    return True


class Template:
    """`has_changed` is called when it can fork, or cannot any more: see `is_loading`."""

    def __init__(self, directory: Path, agent: str, role: str = base.WORKER) -> None:
        """role: of the daemons that it forks."""
        self.directory = directory
        self.agent = agent
        self.role = role
        self.has_changed: Callable[[], None] = lambda: None
        self.is_loading = False
        """It imports: a daemon that waits for that starts sooner than one with its own imports."""
        self.fd = -1
        """Readable when `look` has something to do; -1: there is no template."""
        self._has_loop, self._spares = False, 0
        self._is_off = os.environ.get(SWITCH) == "1"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._deaths = 0
        self._until = 0.0

    def begin(self) -> None:
        """Start it, unless there is one, or it is not to be used. Does not wait for it."""
        if self._process is not None or self._is_off:
            return
        if self.role == base.WORKER:
            self._has_loop = base.has_loop(self.role, self.directory)
            self._spares = _later_ranks(self.directory)
            self._is_off = _sets_variables(self.directory)
            if self._is_off:
                return
        _adopt_orphans()
        self._environment = self._environment_of("", 0)
        for name in PER_DAEMON:
            self._environment.pop(name, None)
        mine, its = pair()
        argv = [sys.executable, "-P", "-m", "daemons.template", str(self.directory), self.agent]
        argv += [base.SCRIPT if self._has_loop else self.role, "-" * ROOM_BYTES]
        try:
            with its:
                environment = self._environment
                # A session of its own: Ctrl-C in the terminal of a guest is not for it.
                self._process = subprocess.Popen(
                    argv, stdin=its.fileno(), env=environment, start_new_session=True
                )
        except OSError as error:
            mine.close()
            self._give_up(f"it cannot be started: {error}")
            return
        self._socket, self.fd, self.is_loading = mine, mine.fileno(), True
        self._until = time.monotonic() + READY_S

    def look(self) -> None:
        """Take its answer, or notice that it is gone; call this now and then, too."""
        if self._socket is None:
            return
        answer = self._answer()
        if answer is None:
            if self.is_loading and time.monotonic() >= self._until:
                self._give_up(f"it is not ready after {READY_S:g} s")
        elif answer == READY:
            self.is_loading = False
            self.has_changed()
        elif answer:
            self._give_up(answer.decode(errors="replace"))
        else:
            self._replace("has died")

    def _answer(self) -> bytes | None:
        """None: nothing; b"": it is gone."""
        assert self._socket is not None
        try:
            return self._socket.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _replace(self, what: str) -> None:
        """Start the next one, for the next death of a daemon, unless several were of no use."""
        self._deaths += 1
        was_loading = self.is_loading
        self.end()
        if self._deaths >= DEATHS_MAX:
            self._give_up(f"it {what}, {self._deaths} times in a row")
            return
        log.warning("the template of the %ss %s: starting another one", self.role, what)
        if was_loading:
            self.has_changed()  # Who has waited for it does not wait again.
        self.begin()

    def _give_up(self, why: str) -> None:
        log.warning("%ss are started without a template, which takes longer: %s", self.role, why)
        self._is_off = True
        self.end()
        self.has_changed()

    def end(self) -> None:
        """Kill it: the daemons stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process, self._socket, self.fd, self.is_loading = None, None, -1, False

    # ------------------------------------------------------------ a daemon

    def start(
        self, name: str, incarnation: int, control: str, credentials: base.Credentials
    ) -> Forked | None:
        """Have it fork this daemon. None: start it in another way. Raises OSError if its log cannot
        be opened.
        """
        if self._socket is None:
            return None
        environment = self._environment_of(name, incarnation)
        if others := self._others(environment):
            self._give_up(f"{others} would be set too late for a library that it has imported")
        if self.is_loading or self._is_off:
            return None
        loop = self._has_loop
        argv = base.argv(self.role, self.directory, name, incarnation, control, has_loop=loop)
        own = {name: environment[name] for name in PER_DAEMON if name in environment}
        output = base.open_log(self.directory, name, incarnation)
        try:
            request = StartRequest(argv, own, os.getpid(), self._spares)
            pid = self._ask(request, output, credentials)
        finally:
            os.close(output)
        if pid is None:
            self._replace("does not fork")
            return None
        self._deaths = 0
        return Forked(pid)

    def _environment_of(self, name: str, incarnation: int) -> dict[str, str]:
        loop = self._has_loop
        return base.environment(self.role, self.directory, name, incarnation, has_loop=loop)

    def _others(self, environment: Mapping[str, str]) -> str:
        """Variables that differ from those that the template was started with."""
        wanted = {k: v for k, v in environment.items() if k not in PER_DAEMON}
        differ = wanted.items() ^ self._environment.items()
        return ", ".join(sorted({name for name, _ in differ}))

    def _ask(self, request: StartRequest, output: int, credentials: base.Credentials) -> int | None:
        """The pid of the daemon that the template has forked, and that has begun."""
        assert self._socket is not None
        mine, its = pair()
        with mine:
            try:
                with its:
                    socket.send_fds(self._socket, [request.to_bytes()], [output, its.fileno()])
                mine.settimeout(FORK_S)
                pid = mine.recv(MESSAGE_BYTES_MAX)
                if pid:
                    mine.send(credentials.to_bytes())
                    return int(pid)
            except OSError:  # A timeout, too: the process that it may still fork exits on its own.
                pass
        return None


def _adopt_orphans() -> None:
    """Make this process the parent of processes whose own parent exits before them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(known: Callable[[int], bool]) -> None:
    """Collect orphans that have exited, but not processes that somebody here waits for."""
    with suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if known(found.si_pid):
                return
            os.waitid(os.P_PID, found.si_pid, os.WEXITED | os.WNOHANG)
