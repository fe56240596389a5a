"""How many cores this process may use: by its CPU affinity, and by the quotas of its cgroups.

A container with a quota of two cores runs on all cores of a machine: a process that starts a thread
on each of them is throttled for most of the time.

    /sys/fs/cgroup/.../cpu.max                      "200000 100000", or "max 100000"  (version 2)
    /sys/fs/cgroup/cpu/.../cpu.cfs_quota_us         "200000", or "-1"                 (version 1)
    /sys/fs/cgroup/cpu/.../cpu.cfs_period_us        "100000"
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

MOUNTS_V1 = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
MOUNTS_V2 = ("", "unified")


def usable() -> int:
    """The number of cores that this process may use, at least 1."""
    return within(len(os.sched_getaffinity(0)), quotas(Path("/")))


def within(cores: int, quotas: Iterable[float]) -> int:
    """The minimum of `cores` and of all quotas. A fraction of a core counts as one."""
    return max(1, min([cores, *map(math.ceil, quotas)]))


def quotas(root: Path) -> Iterator[float]:
    """The visible quotas of this process's cgroups and of all their ancestors, in cores.

    `root`: where /proc and /sys are. In a container the paths in /proc may be those of the host,
    while its own cgroup is mounted at the top: so a missing path is searched for above.
    """
    mounts = root / "sys/fs/cgroup"
    for version, path in groups(text_of(root / "proc/self/cgroup"), "cpu"):
        for mount in MOUNTS_V1 if version == 1 else MOUNTS_V2:
            for group in ancestry(mounts / mount, path):
                yield from _quota(group, version)


def ancestry(mount: Path, path: str) -> Iterator[Path]:
    """A cgroup below a mount point, and all above it, which may be the only visible ones."""
    group = mount / path
    while group.is_relative_to(mount):
        yield group
        group = group.parent


def groups(text: str, controller: str) -> Iterator[tuple[int, str]]:
    """(version, path without its first slash) of those in /proc/PID/cgroup that may have this
    controller.
    """
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if ".." in path.split("/"):  # A path of another cgroup namespace.
            path = ""
        if not controllers and colon:
            yield 2, path.lstrip("/")
        elif controller in controllers.split(","):
            yield 1, path.lstrip("/")


def quota(allowed: str, period: str) -> float | None:
    """Cores, of two numbers in the same unit; None if that is no limit, or no number."""
    try:
        cores = int(allowed) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def _quota(group: Path, version: int) -> Iterator[float]:
    if version == 2:
        allowed, _, period = text_of(group / "cpu.max").strip().partition(" ")
    else:
        allowed, period = (text_of(group / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    if (found := quota(allowed, period)) is not None:
        yield found


def text_of(path: Path) -> str:
    """The content of a small file, such as those of /proc; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
