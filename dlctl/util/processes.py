"""Is that process still there? Processes are known by pid and start, never by name.

A pid alone is not an identity: the kernel gives it to somebody else after a while. The time of day
at which a process began is none either: it moves with the clock, for living processes, too. What
never moves is the kernel's own count: the ticks from the start of the machine to the start of the
process, and which start of the machine that was.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

POLL_S = 0.02
KILL_S = 5.0
"""For the kernel to end a process that was killed; one in a bad disk's hands may take longer."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START_TICKS, _RSS_PAGES = 0, 19, 21
"""Fields 3, 22 and 24 of /proc/PID/stat, see proc(5), counted behind the command's name."""
_ENDED = (b"Z", b"X")
_STOPPED = (b"T", b"t")


@cache
def boot_id() -> str:
    """Another one after every start of the kernel."""
    return _BOOT_ID.read_text().strip()


def start_of(pid: int) -> str | None:
    """When the process with this pid began, as "BOOT:TICKS"; None if there is no such process, or
    it is one of somebody else's that the kernel hides.

    Together with the pid that says for ever which process it is, whatever becomes of the clock. A
    zombie still has it.
    """
    fields = _stat(pid)
    return _start(fields) if fields else None


def age_s(start: Any) -> float | None:
    """Seconds since the process began whose `start_of` this is.

    None for what is no such text, and if the machine was started again since then.
    """
    boot, _, ticks = start.partition(":") if type(start) is str else ("", "", "")
    if boot != boot_id() or not ticks.isdecimal():
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: Any, start: Any) -> bool:
    """Whether the process with this pid and start (see `start_of`) is there.

    A zombie counts as gone. Values of another type (None, a number) are nobody's.
    """
    if type(pid) is not int or pid <= 0 or type(start) is not str:
        return False
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] not in _ENDED and _start(fields) == start


def rss_bytes(pid: Any, start: Any) -> int | None:
    """Its resident memory, what it shares with others included; None if it is not there."""
    fields = _stat(pid) if is_alive(pid, start) else []
    return int(fields[_RSS_PAGES]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process, behind its name; [] if there is none, or none of ours.

    The name stands in parentheses and may hold spaces and parentheses itself.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except PermissionError:
        # /proc is mounted with hidepid=1, and this is somebody else's process. The one that we ask
        # for, which was ours, has ended, or nobody would have its pid.
        return []


def _start(fields: list[bytes]) -> str:
    return f"{boot_id()}:{int(fields[_START_TICKS])}"


def hold(pid: Any, start: Any) -> int | None:
    """A pidfd of this process, to be closed by the caller; None if the process is gone.

    Whoever gets the same pid later is not reached through it.
    """
    if not is_alive(pid, start):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # It may have ended, and another one have got its pid, before we held it.
    if is_alive(pid, start):
        return pidfd
    os.close(pidfd)
    return None


def send_signal(pid: Any, start: Any, number: signal.Signals) -> bool:
    """Whether this process was there to be signalled. Raises PermissionError if it is not ours."""
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
    """What this process was started with; [] if it is gone."""
    words = b""
    if is_alive(pid, start):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
    # Another one may have got its pid meanwhile.
    if not words or not is_alive(pid, start):
        return []
    return [os.fsdecode(word) for word in words.removesuffix(b"\0").split(b"\0")]


def living(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the rows (with `pid` and `pid_start`) whose process is still there."""
    return [row for row in rows if is_alive(row.get("pid"), row.get("pid_start"))]


def _is_stopped(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] in _STOPPED


def working(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose process is there and is not stopped."""
    return [row for row in living(rows) if not _is_stopped(row["pid"])]


def wait(rows: Iterable[Mapping[str, Any]], timeout_s: float) -> list[Mapping[str, Any]]:
    """Wait until the processes of these rows have ended; returns the rows of those that have not.

    A zombie has ended, whenever its parent may find time for it.
    """
    deadline = time.monotonic() + timeout_s
    left = living(rows)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = living(left)
    return left


def end(rows: Iterable[Mapping[str, Any]], grace_s: float) -> tuple[list[str], list[str]]:
    """End the processes of these rows: SIGTERM, and SIGKILL after `grace_s` seconds.

    Returns (names that ended, names that could not be ended). Only processes whose pid and start
    are the recorded ones are touched.
    """
    there = living(rows)
    refused = [row for row in there if not _may_signal(row, signal.SIGTERM)]
    for row in wait([row for row in there if row not in refused], grace_s):
        _may_signal(row, signal.SIGKILL)
    still = {row["name"] for row in wait(there, KILL_S)}
    return [row["name"] for row in there if row["name"] not in still], sorted(still)


def _may_signal(row: Mapping[str, Any], number: signal.Signals) -> bool:
    """Signal the process of this row, if it is there; False if it is not ours to signal."""
    try:
        send_signal(row.get("pid"), row.get("pid_start"), number)
    except PermissionError:
        return False
    return True
