"""Directories for what a target has to find in files; they go with this process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_FAST = Path("/dev/shm")


def scratch(name: str) -> Path:
    """A new directory, in memory where that is possible."""
    place = _FAST if os.access(_FAST, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix=f"dlctl-fuzz-{name}-", dir=place))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
