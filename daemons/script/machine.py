"""A script's share of its machine: cores and GPUs, by variables that libraries read when they are
loaded. What the user has set is left as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlctl.job.config import JobFile
from dlctl.util import cores

_GPU = re.compile(r"nvidia[0-9]+")


def give_share(job: JobFile, name: str) -> None:
    """Call this before the script is loaded. name: of the worker."""
    workers, slot = job.workers, int(name.rpartition("-")[2])
    threads = workers.threads or max(1, cores.usable() // workers.count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if workers.device == "cpu":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    elif (gpus := _gpus(Path("/dev"))) > 1:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(slot % gpus))


def _gpus(devices: Path) -> int:
    """The GPUs of this machine, or container, without loading CUDA."""
    try:
        return sum(bool(_GPU.fullmatch(path.name)) for path in devices.iterdir())
    except OSError:
        return 0
