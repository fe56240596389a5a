"""The command line of this process as others see it in /proc: daemons are found by it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_ARG_START, _ARG_END = 45, 46
"""Fields 48 and 49 of /proc/self/stat, counted after the command's name, see proc(5)."""
_FILE = Path("/proc/self/cmdline")
PADDING_BYTES_MIN = 8
"""Zeros behind a shorter command line: so many are no words of it (`processes.command_line`)."""


def fits(words: Sequence[str]) -> bool:
    """Whether the memory of the present command line has room for these words."""
    start, end = _memory()
    return start > 0 and len(_line(words)) + PADDING_BYTES_MIN <= end - start


def _memory() -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[_ARG_START]), int(fields[_ARG_END])


def _line(words: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def rewrite(words: Sequence[str]) -> bool:
    """Show these words in place of the command line that this process was started with. Returns
    False if they do not fit into its memory, or /proc does not show that.
    """
    if not fits(words):
        return False
    start, end = _memory()
    line = _line(words)
    # The interpreter has copied its arguments long ago.
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))
    return _FILE.read_bytes().rstrip(b"\0") == line.rstrip(b"\0")
