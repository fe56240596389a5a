"""A memory cgroup with a limit, for real: what the kernel does to processes that outgrow it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path]:
    """A new cgroup (v1); write a pid into its `cgroup.procs`. Its processes must have ended then.

    Skips the test where nobody may make one.
    """
    if os.getuid() != 0 or not (V1 / "memory.oom_control").is_file():
        pytest.skip("needs root and the memory cgroups of version 1")
    group = V1 / f"dlctl-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()
