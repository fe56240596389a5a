"""`workers.batch_size = "auto"`: the largest power of two that fits into memory, found by trials.

Each trial is a forward and a backward pass of twice as many real samples. On a GPU the trials stop
when memory runs out or less than a tenth of the worker's share is free. On the CPU no allocation
fails before the kernel kills the process, so they stop when the next trial would need half of the
available memory, or when a trial is too slow to be worth it. No trial changes the model or any RNG
state.
"""

from __future__ import annotations

import gc
import logging
import resource
import time
from contextlib import suppress
from pathlib import Path

import torch

from daemons.worker.data.portion_loader import Loaded, PortionLoader
from daemons.worker.replica import TorchReplica
from daemons.worker.task.failures import explained
from daemons.worker.task.user_task import is_for_want_of_memory
from dlctl.job import placement
from dlctl.job.config import JobFile

log = logging.getLogger("dlctl")
FIRST = 8
"""The first trial: some models, as those with BatchNorm, cannot train on one sample. If it does not
fit, smaller sizes are tried."""
SIZE_MAX = {"cpu": 1024, "cuda": 65536}
SPARE = 0.1
"""The part of a GPU's memory that stays free."""
SHARE = 0.5
"""The part of the available CPU memory that is used."""
SLOW_S = 5.0
"""The longest useful batch on the CPU: a slower one gains nothing from a larger size."""
VECTORS = 3
"""Reserved vectors of the model's size: a flat gradient, an optimiser's state."""


def limit(job: JobFile, samples: int, device: str) -> int:
    """The largest size to try: an epoch still has a portion for every worker. samples: of an epoch;
    0: it is a stream, which has no length.
    """
    portions = job.workers.count * job.data.portion_batches * job.gradient.accumulate
    most = SIZE_MAX.get(device, 1)
    most = min(most, samples // portions) if samples else most
    return 1 << max(0, most.bit_length() - 1)


def batch_size(job: JobFile, replica: TorchReplica, loader: PortionLoader) -> int:
    """The size for this run. loader: of its data, with one batch per step. Raises TaskError for
    what the task raises, also if not even one sample fits into memory.
    """
    most = limit(job, loader.order.length, replica.device.type)
    memory = _Memory(replica, _sharers(job))
    size, found = min(FIRST, most), 0
    while 0 < size <= most:
        begun = time.monotonic()
        with explained(job, size):
            loaded = _that_fits(replica, loader, size, memory)
        took_s = time.monotonic() - begun
        if loaded is None:
            if found or size == 1:
                break
            most = size = size // 2
            continue
        found = size
        if (
            loaded.ended_after is not None
            or not memory.has_room_for_twice
            or (memory.is_of_cpu and took_s > SLOW_S)
        ):
            break
        size *= 2
    found = found or 1
    memory.begin()  # Free the memory of the trials.
    log.info("batch size %d: uses %s of %s bytes", found, memory.used, memory.budget)
    return found


def _sharers(job: JobFile) -> int:
    """The number of this job's processes with a model that share the memory of a device."""
    placed = placement.place(job)
    here = [name for name, agent in placed.items() if agent == placed["worker-0"]]
    workers = sum(name.startswith("worker-") for name in here) * job.ranks
    gpus = torch.cuda.device_count() if job.workers.device != "cpu" else 0
    return -(-workers // max(1, gpus))


def _that_fits(
    replica: TorchReplica, loader: PortionLoader, size: int, memory: _Memory
) -> Loaded | None:
    """A step of this size; None: it does not fit. Raises if not even one sample fits."""
    loader.resize(size)
    try:
        memory.begin()
        loaded = loader.step(0, 0, size, 0, shard=0)
        for batch, _ in loaded.batches:
            replica.try_batch(batch)
        return loaded if memory.end() else None
    except Exception as error:
        if size == 1 or not is_for_want_of_memory(error):
            raise
    finally:
        replica.forget_gradients()
    gc.collect()  # Free what the error references.
    return None


class _Memory:
    """used: bytes that the newest trial took; budget: what it may take."""

    def __init__(self, replica: TorchReplica, sharers: int) -> None:
        self._device, self._sharers = replica.device, sharers
        self._reserve = VECTORS * 4 * len(replica.parameters)
        self.is_of_cpu = replica.device.type != "cuda"
        self.used = self.budget = 0
        self.has_room_for_twice = True

    def begin(self) -> None:
        if self.is_of_cpu:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Reset the peak RSS.
            self._before = _kb("VmRSS") * 1024
            self.budget = int(SHARE * available() / self._sharers) - self._reserve
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        free = torch.cuda.mem_get_info(self._device)[0]
        ours = torch.cuda.memory_reserved(self._device)
        self.budget = int((1 - SPARE) * (free + ours) / self._sharers) - self._reserve

    def end(self) -> bool:
        """Whether the trial's memory fits into the budget."""
        if self.is_of_cpu:
            peak_kb = _kb("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.used = max(0, peak_kb * 1024 - self._before)
            self.has_room_for_twice = 2 * self.used <= self.budget
        else:
            torch.cuda.synchronize(self._device)
            self.used = torch.cuda.max_memory_reserved(self._device)
        return self.used <= self.budget


def available() -> int:
    """Bytes of memory that this process may still take, limited by the machine and its cgroup."""
    found = [_kb("MemAvailable", "/proc/meminfo") * 1024]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # There is no limit, or none that is visible.
        limit = int((group / "memory.max").read_text())
        found.append(max(0, limit - int((group / "memory.current").read_text())))
    return min(found)


def _kb(key: str, file: str = "/proc/self/status") -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0
