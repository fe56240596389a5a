"""Evidence that the kernel's OOM killer has killed a process.

SIGKILL does not show its sender. The evidence is a counter of the process's memory cgroup:
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
KILLS = {1: ("memory.oom_control", "oom_kill"), 2: ("memory.events", "oom_kill")}
LIMIT = {1: ("memory.limit_in_bytes", ""), 2: ("memory.max", "")}
REACHED = {1: ("memory.failcnt", ""), 2: ("memory.events", "oom")}
"""How often the limit was reached. All: version -> file, and key of the line; "": just a number."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    version: int
    """The version of the cgroup interface, 1 or 2."""
    directories: tuple[Path, ...]
    """The group's own, then its ancestors', up to the mount point, as far as they are visible."""

    def kills(self) -> int | None:
        """Number of OOM kills in this group; None: not counted."""
        return _number(self.directories[0], *KILLS[self.version])

    def reached_limit_bytes(self) -> int | None:
        """The innermost limit that was ever reached; None if there is none."""
        for directory in self.directories:
            limit_bytes = _number(directory, *LIMIT[self.version])
            is_limit = limit_bytes is not None and limit_bytes < UNLIMITED_BYTES
            if is_limit and _number(directory, *REACHED[self.version]):
                return limit_bytes
        return None


def find(pid: int) -> MemoryGroup | None:
    """The memory cgroup of a process; None if there is none, or it is not visible."""
    for version, path in cores.groups(cores.text_of(Path(f"/proc/{pid}/cgroup")), "memory"):
        for mount in ("memory",) if version == 1 else cores.MOUNTS_V2:
            places = cores.ancestry(Path("/sys/fs/cgroup") / mount, path)
            if visible := tuple(p for p in places if (p / "cgroup.procs").exists()):
                return MemoryGroup(version, visible)
    return None


def _number(directory: Path, file: str, key: str) -> int | None:
    """The number in the line with this key; None if there is none."""
    for line in cores.text_of(directory / file).splitlines():
        name, _, number = line.rpartition(" ")
        if name == key and number.isdecimal():
            return int(number)
    return None


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
        """Forget a process that has ended."""
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
        return "out of memory" + (f": limit {limit_bytes >> 20:,} MiB" if limit_bytes else "")
