"""A script's share of its machine: cores and GPUs, by variables that libraries read when they are
loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dlctl.job.config import Workers

_GPU = re.compile(r"nvidia[0-9]+")


def give_share(
    workers: Workers, slot: int, cores: int, gpus: int, environment: MutableMapping[str, str]
) -> None:
    """Call this before the script is loaded. What the user has set is left as it is. slot: of the
    worker. cores, gpus: of this machine.
    """
    processes = workers.processes
    threads = (workers.threads or cores // workers.count) // processes
    environment.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    if workers.device == "cpu":
        environment.setdefault("CUDA_VISIBLE_DEVICES", "")
    elif gpus > 1:
        mine = {(slot * processes + rank) % gpus for rank in range(processes)}
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, sorted(mine))))


def use_threads(environment: Mapping[str, str]) -> None:
    """Have torch use `OMP_NUM_THREADS` if it is loaded already, as in a process that a template has
    forked: it reads the variable when it is loaded, and then never uses more threads than cores.
    """
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if "torch" in sys.modules and first.isdecimal() and int(first):
        torch = sys.modules["torch"]
        torch.set_num_threads(min(int(first), torch.get_num_threads()))


def gpus(devices: Path = Path("/dev")) -> int:
    """The GPUs of this machine, or container, without loading CUDA."""
    try:
        return sum(bool(_GPU.fullmatch(path.name)) for path in devices.iterdir())
    except OSError:
        return 0
