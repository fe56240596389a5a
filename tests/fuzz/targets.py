"""The list of targets: name -> module."""

from __future__ import annotations

from typing import cast

from . import (
    checkpoint_files,
    job_files,
    kernel_calls,
    log_lines,
    shard_images,
    shard_journals,
    wire_frames,
)
from .runner import Target

MODULES = (
    wire_frames, job_files, checkpoint_files, shard_images, shard_journals, log_lines, kernel_calls,
)  # fmt: skip
TARGETS: dict[str, Target] = {module.NAME: cast(Target, module) for module in MODULES}
