"""Evidence that the kernel's OOM killer has killed a process.

SIGKILL does not tell its sender. The evidence is a counter of the process's memory cgroup:
`oom_kill` in `memory.events` (cgroup v2) or `memory.oom_control` (v1). It counts every OOM kill, by
the cgroup's own limit or by the whole machine's. A limit is named only if the kernel reports that
it was reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlctl.util import cores

UNLIMITED_BYTES = 2**62
"""cgroup v1 reports a number at least this large if there is no limit."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    version: int
    """Of the cgroup interface, 1 or 2."""
    directories: tuple[Path, ...]
    """The group's own, then its ancestors', up to the mount point, as far as they are visible."""

    def kills(self) -> int | None:
        """Number of OOM kills in this group; None: not counted."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _keyed(self.directories[0] / name).get("oom_kill")

    def reached_limit_bytes(self) -> int | None:
        """The innermost limit that was ever reached; None if there is none."""
        for directory in self.directories:
            if self.version == 1:
                limit_bytes = _number(directory / "memory.limit_in_bytes")
                times = _number(directory / "memory.failcnt")
            else:
                limit_bytes = _number(directory / "memory.max")
                times = _keyed(directory / "memory.events").get("oom")
            if limit_bytes is not None and limit_bytes < UNLIMITED_BYTES and times:
                return limit_bytes
        return None


def find(pid: int) -> MemoryGroup | None:
    """The memory cgroup of a process; None if there is none, or it is not visible."""
    for version, path in cores.groups(_text(Path(f"/proc/{pid}/cgroup")), "memory"):
        for mount in ("memory",) if version == 1 else cores.MOUNTS_V2:
            places = cores.ancestry(Path("/sys/fs/cgroup") / mount, path)
            if visible := tuple(p for p in places if (p / "cgroup.procs").exists()):
                return MemoryGroup(version, visible)
    return None


def _text(path: Path) -> str:
    """ "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _keyed(path: Path) -> dict[str, int]:
    """Parse a file with a name and a number in each line."""
    pairs = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


# ---------------------------------------------------------------- over time


class OomWatch:
    """Watches the counters of the processes' memory cgroups.

    Call `look` about once a second: kills counted before the look before last are no evidence for a
    process that dies now, and one counted kill explains only one death.
    """

    def __init__(self) -> None:
        self._groups: dict[int, MemoryGroup] = {}
        self._before: dict[MemoryGroup, int] = {}
        self._last: dict[MemoryGroup, int] = {}

    def begin(self, pid: int) -> None:
        """Watch this process, too. Does nothing if memory cgroups are not visible."""
        found = find(pid)
        if found is None:
            return
        # The kernel reports an exiting process in the root group.
        if pid not in self._groups or len(found.directories) > 1:
            self._groups[pid] = found
        if found not in self._last and (kills := found.kills()) is not None:
            self._before[found] = self._last[found] = kills

    def look(self) -> None:
        """Read all counters, and the current groups: a process may have been moved."""
        for pid in list(self._groups):
            self.begin(pid)
        for group in set(self._groups.values()) & self._last.keys():
            self._before[group] = max(self._before[group], self._last[group])
            self._last[group] = group.kills() or 0

    def forget(self, pid: int) -> None:
        """This process has ended."""
        self._groups.pop(pid, None)

    def cause(self, pid: int) -> str:
        """The cause of a SIGKILL that this agent has not sent: "out of memory: limit 64 MiB"; ""
        without evidence of an OOM kill.
        """
        group = self._groups.get(pid)
        if group is None or group not in self._before:
            return ""
        if (group.kills() or 0) <= self._before[group]:
            return ""
        self._before[group] += 1
        limit_bytes = group.reached_limit_bytes()
        return "out of memory" + (f": limit {_shown(limit_bytes)}" if limit_bytes else "")


def _shown(size_bytes: int) -> str:
    """Limits are set in powers of two."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes} {unit}"
    return f"{size_bytes} B"
