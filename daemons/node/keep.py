"""`python -P -m daemons.node.keep NODE DIRECTORY [OPTION]...`: the keeper of one node of a batch
system.

It is what the batch system starts on this node; NODE is "module:Class" of the launcher, which knows
the system's variables. It takes the orders in DIRECTORY (see `dlctl.launch.orderfiles`), starts the
agent exactly as a login would (`daemons.node`), reports the result, and starts a newer incarnation
when ordered. It is the subreaper of orphaned processes on this node, so that the batch system
accounts all of them to the job.

With SIGTERM the job ends on this node: the keeper starts nothing any more. When it exits, no
process or file of an order remains on the node, those of an earlier attempt there included, unless
the job will be run there again: then shards may be reused.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from daemons.node.end import agents, end, kill
from daemons.node.requests import host_directory
from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.launch import answers, commands, orderfiles
from dlctl.util.processes import start_of

POLL_S = 1.0
IDLE_S_MAX = 600.0
"""Without an agent: the coordinator has died, or cannot write its orders to this directory."""
BEGIN_S_MAX = 80.0
GRACE_S = 4
"""Time for the daemons of this node to exit before SIGKILL; soon the batch system kills the keeper.
"""
PR_SET_CHILD_SUBREAPER = 36
ENDED_BY_TERM = 143
PLACE = ("run_id", "agent", "dir")
"""Fields of a request that say where an agent's files are."""
Json = dict[str, Any]


class Node(Protocol):
    """The node, as its batch system describes it."""

    owner: str
    """The name of the batch system."""
    shared: str
    """How to give the orders a directory that all nodes share, as a hint."""
    agent: str
    name: str
    attempt: int
    """How often the batch system has restarted this job: 0, 1, ..."""

    def __init__(self, environment: Mapping[str, str], options: Sequence[str]) -> None:
        """Raises KeyError and ValueError if this process is not on such a node."""
        ...

    def returns(self) -> bool:
        """Whether the job, which is ending here, will be run once more."""
        ...


class Keeper:
    def __init__(self, directory: Path, node: Node) -> None:
        self.directory = directory
        self.node = node
        self.agent = node.agent
        before = orderfiles.read(orderfiles.answer(directory, self.agent))
        # Orders of an earlier attempt are not repeated: their agents ended with it.
        is_of_another = before.get("attempt") != node.attempt
        self._done = int(before.get("incarnation", 0)) if is_of_another else 0
        self._seen: tuple[int, int] | None = None
        """Inode and modification time of the last order file read."""
        self._killed = 0
        """The highest incarnation that was ordered to be killed: no order up to it counts."""
        self._place = _place_of(before.get("place")) if before.get("node") == node.name else {}
        """Where on this node the newest accepted order has its files, if only that of an earlier
        attempt; {}: there was none."""
        self._begin: subprocess.Popen[bytes] | None = None
        self._begin_until = 0.0
        self._pid = 0
        """The process id of the agent; 0 if there is none."""
        self._busy_at = time.monotonic()
        self._is_terminated = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def run(self) -> int:
        """Run until the run or the job is over; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: os.eventfd_write(self._wakeup, 1))
        while not (why := self._why_over()):
            self._look_at_begin()
            self._reap()
            self._take_kill()
            self._take_order()
            self._end_killed()
            if select.select([self._wakeup], [], [], POLL_S)[0]:
                os.eventfd_read(self._wakeup)
        self._leave(why)
        return ENDED_BY_TERM if self._is_terminated else 0

    def _on_term(self, *_: object) -> None:
        self._is_terminated = True
        os.eventfd_write(self._wakeup, 1)

    def _why_over(self) -> str:
        if self._is_terminated:
            return f"{self.node.owner} ends the job on this node"
        if self._is_run_over():
            return "the run is over"
        if self._pid or self._begin:
            self._busy_at = time.monotonic()
        idle_s = time.monotonic() - self._busy_at
        return f"no order received for {idle_s:.0f} s" if idle_s > IDLE_S_MAX else ""

    def _is_run_over(self) -> bool:
        """Whether the run is over; False if the file server does not answer."""
        try:
            return orderfiles.OVER in os.listdir(self.directory)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    # ------------------------------------------------------------ orders

    def _take_order(self) -> None:
        path = orderfiles.order(self.directory, self.agent)
        try:
            info = path.stat()
        except OSError:
            return
        if self._begin is not None or (info.st_ino, info.st_mtime_ns) == self._seen:
            return
        request = orderfiles.read(path)
        if not request:
            return  # It could not be read; retry.
        self._seen = info.st_ino, info.st_mtime_ns
        incarnation = request.get("incarnation")
        if type(incarnation) is int and incarnation > self._done:
            self._done, self._place = incarnation, _place_of(request) or self._place
            self._pid = 0  # An older agent is killed by `begin`: its end is no news.
            self._answer("begins")
            try:
                self._start(request)
            except OSError as error:
                why = DlctlError(f"cannot start it: {error}")
                self._answer("failed", value=answers.as_value(why), status=why.exit_code)

    def _start(self, request: Json) -> None:
        """Start what a login would run on a host: one request on standard input, one answer.

        Raises OSError.
        """
        memory = commands.in_memory(json.dumps(request).encode())
        try:
            self._begin = subprocess.Popen(
                [sys.executable, "-P", "-m", "daemons.node"], stdin=memory, stdout=subprocess.PIPE
            )
        finally:
            os.close(memory)
        self._begin_until = time.monotonic() + BEGIN_S_MAX

    def _look_at_begin(self) -> None:
        begin = self._begin
        if begin is None:
            return
        if begin.poll() is None:
            if time.monotonic() > self._begin_until:
                begin.kill()
            return
        assert begin.stdout is not None
        with begin.stdout as pipe:
            result = answers.read(self.node.name, begin.returncode, pipe.read(), b"")
        self._begin = None
        if self._is_killed:  # Whatever was said before.
            self._end_killed()
            self._answer("ended")
        elif result.is_good and result.value is not None:
            self._pid = int(result.value["pid"])
            self._answer("up", value=result.value)
        else:
            self._answer("failed", value=result.value, status=result.status, words=result.words)

    def _take_kill(self) -> None:
        """Kill only the agent: its daemons keep running, and the next agent adopts them.

        The order for it is cancelled, also if it is seen only later. So the file of the kill stays:
        the next keeper may find both.
        """
        path = orderfiles.kill(self.directory, self.agent)
        incarnation = orderfiles.read(path).get("incarnation")
        if type(incarnation) is not int or incarnation <= self._killed:
            return
        self._killed = incarnation
        if self._done > incarnation:
            return  # A newer one has replaced it.
        self._done = incarnation
        if self._begin is not None:
            self._begin.kill()  # `_look_at_begin` reports it.
            return
        self._end_killed()
        if not self._pid:
            self._answer("ended")

    @property
    def _is_killed(self) -> bool:
        """Whether the newest order is cancelled."""
        return 0 < self._done <= self._killed

    def _end_killed(self) -> None:
        """Not only once: what `begin` had started when it was killed may not be visible yet."""
        if self._is_killed and self._begin is None and self._place:
            there = agents(host_directory(self._place))
            kill([agent for agent in there if agent.incarnation <= self._killed])

    def _answer(self, state: str, **more: Any) -> None:
        path = orderfiles.answer(self.directory, self.agent)
        value = {"attempt": self.node.attempt, "incarnation": self._done, "state": state, **more}
        value |= {"node": self.node.name, "place": self._place}
        try:
            orderfiles.write(path, value)
        except FileNotFoundError:
            pass  # The run is over: no answer is needed.
        except OSError as error:
            print(
                f"error: {self.agent} on {self.node.name}: cannot report {state}: {error}",
                flush=True,
            )

    # ------------------------------------------------------------ processes

    def _reap(self) -> None:
        """Reap children, including adopted orphans."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                found = None
            if found is None or (self._begin is not None and found.si_pid == self._begin.pid):
                break
            _, status = os.waitpid(found.si_pid, 0)
            if found.si_pid == self._pid:
                self._ended(os.waitstatus_to_exitcode(status))
        if self._pid and start_of(self._pid) is None:
            self._ended(None)

    def _ended(self, status: int | None) -> None:
        self._pid = 0
        self._answer("ended", status=status)

    # ------------------------------------------------------------ exit

    def _leave(self, why: str) -> None:
        # It may be sent twice; child processes inherit that it is ignored.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        returns = self._is_terminated and self.node.returns()
        print(f"{self.agent} on {self.node.name}: the keeper exits: {why}", flush=True)
        if self._begin is not None:
            self._begin.kill()
            self._begin.wait()
        if self._place:
            grace_s = GRACE_S if self._is_terminated else 0
            purge = {"purge": not returns, "only_agent": False, "grace_s": grace_s}
            end({**self._place, **purge})


def _place_of(order: Any) -> Json:
    """The part of an order that says where its files are on this node; {} if it does not."""
    place = {name: order.get(name) for name in PLACE} if type(order) is dict else {}
    try:
        host_directory(place)
    except DlctlError:
        return {}
    return place


def main(argv: list[str], environment: dict[str, str]) -> int:
    """Run the keeper; returns its exit code."""
    try:
        kind: type[Node] = registry.attribute(argv[1])
        directory = Path(argv[2])
        node = kind(environment, argv[3:])
    except (IndexError, KeyError, ValueError, ImportError, AttributeError):
        print("error: a batch system runs this: python -P -m daemons.node.keep NODE DIRECTORY")
        return 2
    try:
        orderfiles.check(directory)
    except (OSError, DlctlError) as error:
        what = "the directory of the orders cannot be used on this node"
        print(f"error: {node.name}: {what}: {error}; {node.shared}", flush=True)
        return 1
    os.environ["DLCTL_HOST"] = node.name
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return Keeper(directory, node).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv, dict(os.environ)))
