"""The command line and the environment of this process, as others see them in /proc."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_MM, PR_SET_MM_MAP = 35, 14
NO_FILE = 0xFFFFFFFF
STAT_FIELDS = {
    "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46,
    "start_brk": 47,
}  # fmt: skip
"""Their numbers in /proc/self/stat, see proc(5)."""
_PLACES = (
    "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
    "arg_start", "arg_end", "env_start", "env_end", "auxv",
)  # fmt: skip
_shown: list[Any] = []
"""The memory that others read."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _PLACES),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises OSError if they cannot be changed: the kernel lacks CONFIG_CHECKPOINT_RESTORE."""
    # The name of the program, which may have spaces, is the second field.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    shown = _MemoryMap(**{name: int(fields[field - 3]) for name, field in STAT_FIELDS.items()})
    shown.brk, shown.exe_fd = _libc.sbrk(0), NO_FILE
    items = [f"{name}={value}" for name, value in environment.items()]
    for begin, end, words in (("arg_start", "arg_end", argv), ("env_start", "env_end", items)):
        line = b"".join(os.fsencode(word) + b"\0" for word in words)
        memory = ctypes.create_string_buffer(line, max(1, len(line)))
        _shown.append(memory)
        setattr(shown, begin, ctypes.addressof(memory))
        setattr(shown, end, ctypes.addressof(memory) + len(line))
    size = ctypes.c_ulong(ctypes.sizeof(shown))
    if _libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(shown), size, 0):
        raise OSError(ctypes.get_errno(), "the command line cannot be changed here")
    sys.orig_argv[:] = argv
