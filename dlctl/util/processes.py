"""Whether a process is alive. Processes are identified by pid and start, never by name.

A pid alone is not an identity: the kernel reuses it. The time of day at which a process started is
not one either: it moves with the clock, even for running processes. The kernel's own count is
stable: the ticks from boot to the start of the process, and the id of that boot.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

POLL_S = 0.02
KILL_S = 5.0
"""Time for the kernel to end a killed process; one that waits for a bad disk may take longer."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START_TICKS, _RSS_PAGES = 0, 19, 21
"""Fields 3, 22 and 24 of /proc/PID/stat, see proc(5), counted after the command's name."""
_PADDING = re.compile(rb"\0{8,}\Z")
"""Behind the command line of a process that has changed its own (`daemons.template`)."""
_ENDED = (b"Z", b"X")
_STOPPED = (b"T", b"t")


@cache
def boot_id() -> str:
    """The id of this boot of the machine; every boot has another."""
    return _BOOT_ID.read_text().strip()


def start_of(pid: int) -> str | None:
    """When the process with this pid started, as "BOOT:TICKS"; None if there is no such process, or
    it belongs to another user and the kernel hides it.

    Together with the pid this identifies a process for ever, whatever happens to the clock. A
    zombie still has it.
    """
    fields = _stat(pid)
    return _start(fields) if fields else None


def age_s(start: Any) -> float | None:
    """Seconds since the start of the process with this `start_of`.

    None for an invalid text, and if the machine was rebooted since then.
    """
    boot, _, ticks = start.partition(":") if type(start) is str else ("", "", "")
    if boot != boot_id() or not ticks.isdecimal():
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: Any, start: Any) -> bool:
    """Whether the process with this pid and start (see `start_of`) is alive.

    A zombie counts as dead. Values of another type (None, a number) identify no process.
    """
    if type(pid) is not int or pid <= 0 or type(start) is not str:
        return False
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] not in _ENDED and _start(fields) == start


def rss_bytes(pid: Any, start: Any) -> int | None:
    """The resident memory of a process, including shared memory; None if it is not alive."""
    fields = _stat(pid) if is_alive(pid, start) else []
    return int(fields[_RSS_PAGES]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name; [] if there is no such process, or it is not
    ours.

    The name is in parentheses and may contain spaces and parentheses itself.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except PermissionError:
        # /proc is mounted with hidepid=1, and this is another user's process. So the process that
        # we look for, which was ours, has exited, and its pid was reused.
        return []


def _start(fields: list[bytes]) -> str:
    return f"{boot_id()}:{int(fields[_START_TICKS])}"


def hold(pid: Any, start: Any) -> int | None:
    """A pidfd of this process, to be closed by the caller; None if the process is gone.

    It never refers to a later process with the same pid.
    """
    if not is_alive(pid, start):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The process may have exited, and its pid been reused, before we opened the pidfd.
    if is_alive(pid, start):
        return pidfd
    os.close(pidfd)
    return None


def send_signal(pid: Any, start: Any, number: signal.Signals) -> bool:
    """Returns whether this process was alive. Raises PermissionError if it is not ours."""
    pidfd = hold(pid, start)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def command_line(pid: Any, start: Any) -> list[str]:
    """The command line of this process; [] if it is gone."""
    words = b""
    if is_alive(pid, start):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
    # Its pid may have been reused meanwhile.
    if not words or not is_alive(pid, start):
        return []
    words = _PADDING.sub(b"\0", words)
    return [os.fsdecode(word) for word in words.removesuffix(b"\0").split(b"\0")]


def living(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows (with `pid` and `pid_start`) whose process is still alive."""
    return [row for row in rows if is_alive(row.get("pid"), row.get("pid_start"))]


def _is_stopped(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] in _STOPPED


def working(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose process is alive and not stopped."""
    return [row for row in living(rows) if not _is_stopped(row["pid"])]


def wait(rows: Iterable[Mapping[str, Any]], timeout_s: float) -> list[Mapping[str, Any]]:
    """Wait until the processes of these rows have exited; returns the rows of those that have not.

    A zombie has exited, even if its parent has not reaped it yet.
    """
    deadline = time.monotonic() + timeout_s
    left = living(rows)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = living(left)
    return left


def end(rows: Iterable[Mapping[str, Any]], grace_s: float) -> tuple[list[str], list[str]]:
    """Terminate the processes of these rows: SIGTERM, and SIGKILL after `grace_s` seconds.

    Returns (names that exited, names that could not be terminated). Only processes with the
    recorded pid and start are signalled.
    """
    there = living(rows)
    refused = [row for row in there if not _may_signal(row, signal.SIGTERM)]
    for row in wait([row for row in there if row not in refused], grace_s):
        _may_signal(row, signal.SIGKILL)
    still = {row["name"] for row in wait(there, KILL_S)}
    return [row["name"] for row in there if row["name"] not in still], sorted(still)


def _may_signal(row: Mapping[str, Any], number: signal.Signals) -> bool:
    """Signal the process of this row, if it is alive; False if we may not signal it."""
    try:
        send_signal(row.get("pid"), row.get("pid_start"), number)
    except PermissionError:
        return False
    return True
