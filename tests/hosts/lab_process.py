"""The process that holds the lab: `lab_process NAME DIRECTORY`, in namespaces of the lab's own.

It waits for a line on its standard input, and shows DIRECTORY/hosts as /etc/hosts. When the input
is closed, it ends everything in the lab and removes DIRECTORY. The kernel closes it, too, when the
test is killed: nothing stays then either.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time

from .mounts import bind

SWEEP_S_MAX = 10.0
POLL_S = 0.002


def main() -> None:
    name, directory = sys.argv[1:]
    socket.sethostname(name)
    print("here", flush=True)
    try:
        if sys.stdin.buffer.readline():
            bind(f"{directory}/hosts", "/etc/hosts")
            print("up", flush=True)
        sys.stdin.buffer.read()
    finally:
        sweep()
        shutil.rmtree(directory, ignore_errors=True)


def sweep() -> None:
    """Kill whoever else has this network, also what left its session or lost its parent."""
    pause, deadline = threading.Event(), time.monotonic() + SWEEP_S_MAX
    while (found := others()) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        pause.wait(POLL_S)


def others() -> list[int]:
    own = network_of("self")
    pids = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    return [int(pid) for pid in pids if network_of(pid) == own]


def network_of(pid: str) -> str:
    """ "" for who is gone, or dead and not yet waited for."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
