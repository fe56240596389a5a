"""mount(2) for the first processes of the hosts: one mount costs microseconds, not a process."""

from __future__ import annotations

import ctypes
import os

READ_ONLY, REMOUNT, BIND, RECURSIVE = 1, 32, 4096, 16384
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Raises OSError with the name of the target."""
    words = (source, target, kind)
    if _LIBC.mount(*(word.encode() for word in words), ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source}: {os.strerror(number)}", target)


def memory(target: str, mode: int, size_bytes: int) -> None:
    """An empty file system in memory."""
    mount("tmpfs", target, "tmpfs", options=f"mode={mode:o},size={size_bytes}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show a file or a directory at a second place."""
    mount(source, target, flags=BIND | RECURSIVE)
    if read_only:
        mount("", target, flags=BIND | REMOUNT | READ_ONLY)
