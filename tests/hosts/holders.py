"""Namespaces, each held by its first process: it ends when this process closes its input or ends.

Nothing of them has a name on this machine (no /run/netns), so nothing of them can be left behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parents[1]
"""From where the programs of this folder are started."""
END_S_MAX = 20.0
CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
LAB = ("--net", "--uts", "--mount")
HOST = (*LAB, "--ipc", "--pid", "--fork", "--kill-child")


def program(module: str, *arguments: str) -> list[str]:
    """The command line of a module of this folder, to be run in `TESTS`."""
    # Without site-packages: they need none, and start in half the time.
    return [sys.executable, "-E", "-s", "-S", "-B", "-m", f"hosts.{module}", *arguments]


class Holder:
    """A process that holds namespaces. It begins at once, and says when it has them."""

    def __init__(
        self, unshare: Sequence[str], module: str, *arguments: str, env: Mapping[str, str]
    ) -> None:
        # A session of its own: Ctrl-C is for the test, which then ends its holders in order.
        self._process = subprocess.Popen(
            ["unshare", *unshare, "--", *program(module, *arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=TESTS, env=env, start_new_session=True,
        )  # fmt: skip
        self._env = env
        self.pid = self._process.pid
        """A process in the namespaces, as this machine counts them."""

    def hear(self) -> str:
        """The next line that it says. Raises RuntimeError if it ended instead."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a holder ended with {self._process.wait()}, see standard error")
        return line.strip()

    def expect(self, said: str) -> None:
        """Wait until it says this, and nothing else. Raises RuntimeError if it ended instead."""
        if (line := self.hear()) != said:
            raise RuntimeError(f"a holder said {line!r} where it should have said {said!r}")

    def tell(self, plan: Mapping[str, Any]) -> None:
        """One line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()

    def command(self, *argv: str, spaces: str = "-n") -> list[str]:
        """`argv`, run in these of its namespaces (options of nsenter). RuntimeError: it ended."""
        self._must_live()
        return ["nsenter", "-t", str(self.pid), *spaces.split(), "--", *argv]

    def _must_live(self) -> None:
        """Once it has ended, its pid may be that of somebody else."""
        if self._process.poll() is not None:
            raise RuntimeError("this host is lost, or its cluster is closed")

    def do(self, *argv: str, stdin: str = "", spaces: str = "-n") -> str:
        """Run a command in the namespaces; returns what it prints. Raises CalledProcessError."""
        ended = subprocess.run(
            self.command(*argv, spaces=spaces),
            input=stdin, stdout=subprocess.PIPE, text=True, check=True, env=self._env,
        )  # fmt: skip
        return ended.stdout

    def ip(self, *lines: str) -> None:
        """Do these commands of ip(8), without the word "ip"."""
        self.do("ip", "-batch", "-", stdin="\n".join([*lines, ""]))

    def tcp_socket(self) -> socket.socket:
        """A TCP socket in this network, for this process: it stays where it was made."""
        with self.thread() as thread:
            return thread.submit(socket.socket).result()

    def thread(self) -> ThreadPoolExecutor:
        """A thread of this process that is in this network, as is all that it starts or opens."""
        self._must_live()
        return ThreadPoolExecutor(1, initializer=self._enter)

    def _enter(self) -> None:
        with open(f"/proc/{self.pid}/ns/net") as network:
            if _LIBC.setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter a network")

    def processes(self) -> list[psutil.Process]:
        """Everybody who has this network, as this machine counts them."""
        network = _network_of(self.pid) if self._process.poll() is None else ""
        found = [p for p in psutil.process_iter() if network and _network_of(p.pid) == network]
        return [process for process in found if process.pid != self.pid]

    def release(self) -> None:
        """Let it begin to end what is in its namespaces, and itself."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended before it was told everything
            self._process.stdin.close()

    def close(self) -> None:
        """Wait until nothing of it is left. Raises TimeoutExpired."""
        assert self._process.stdout is not None
        self.release()
        try:
            self._process.wait(END_S_MAX)
        finally:
            self._process.stdout.close()


def _network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # gone, or dead and not yet waited for
        return ""


class HostHolder(Holder):
    """A machine of its own: processes, network, name, files, and a monotonic clock."""

    def __init__(self, number: int, env: Mapping[str, str]) -> None:
        super().__init__((*HOST, *_clock(number)), "host_process", env=env)
        self.first = 0
        """Its process 1, as this machine counts it; 0 before `meet`."""

    def meet(self) -> None:
        """Wait until it has its namespaces."""
        self.first = int(self.hear())

    @property
    def files(self) -> Path:
        """Its files, as they look from inside. RuntimeError: it ended."""
        self._must_live()
        return Path(f"/proc/{self.first}/root")

    def processes(self) -> list[psutil.Process]:
        return [process for process in super().processes() if process.pid != self.first]

    def login(self, *argv: str) -> list[str]:
        """`argv`, run as one of its processes, as by somebody who sits there."""
        self._must_live()
        spaces = ["-n", "-u", "-i", "-m", "-p", "-r", "-w"]
        return ["nsenter", "-t", str(self.first), *spaces, "--", *argv]

    def mount(self, *arguments: str) -> None:
        """mount(8), on this host only."""
        self.do("mount", *arguments, spaces="-m")

    def kill(self) -> None:
        """All at once, like a machine that loses its power."""
        first = os.pidfd_open(self.first)
        self._process.kill()  # its child, process 1, is killed with it (--kill-child)
        select.select([first], [], [], END_S_MAX)
        os.close(first)
        self.close()


def _clock(number: int) -> tuple[str, ...]:
    """Machines were not started at the same time: monotonic clocks of hosts say nothing to others.

    Nothing on kernels without time namespaces.
    """
    ahead_s = str(100_000 * number)
    is_known = Path("/proc/self/ns/time").exists()
    return ("--time", "--monotonic", ahead_s, "--boottime", ahead_s) if is_known else ()
