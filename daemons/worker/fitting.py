"""`workers.batch_size = "auto"`: the largest power of two that there is memory for, by trying.

Forward and backward passes of real samples, twice as many each time. On a GPU until there is no
memory left, or less than a tenth of the worker's share; on the CPU, where nobody says no before the
kernel ends the process, until the next one would need half of what is available, or one takes too
long to be worth it. Nothing of that stays: neither in the model nor in any generator.
"""

from __future__ import annotations

import gc
import logging
import resource
import time
from contextlib import suppress
from pathlib import Path

import torch

from daemons.worker.data import PortionLoader
from daemons.worker.failures import explained, is_for_want_of_memory
from daemons.worker.replica import Replica
from dlctl import placement
from dlctl.config import JobFile

log = logging.getLogger("dlctl")
FIRST = 8
"""A batch of one sample is too small for some models, as those with BatchNorm. If there is no room
for these, it goes down from here."""
SIZE_MAX = {"cpu": 1024, "cuda": 65536}
SPARE = 0.1
"""Of a GPU's memory."""
SHARE = 0.5
"""Of what is available on the CPU."""
SLOW_S = 5.0
"""On the CPU a batch that takes so long gains nothing by being larger."""
VECTORS = 3
"""Room is left for so many of the model's size: a gradient in one piece, an optimiser's state."""


def limit(job: JobFile, samples: int, device: str) -> int:
    """The largest size that is tried: with that, there is a portion for every worker in an epoch of
    so many samples; 0: of a stream, which has no end.
    """
    portions = job.workers.count * job.data.portion_batches * job.gradient.accumulate
    most = SIZE_MAX.get(device, 1)
    most = min(most, samples // portions) if samples else most
    return 1 << max(0, most.bit_length() - 1)


def batch_size(job: JobFile, replica: Replica, loader: PortionLoader) -> int:
    """The size for this run. loader: of its data, with one batch to a step. Raises TaskError for
    what the task raises, also if there is no memory for a single sample.
    """
    most = limit(job, loader.order.length, replica.device.type)
    memory = _Memory(replica, _sharers(job))
    size, found = min(FIRST, most), 0
    while 0 < size <= most:
        begun = time.monotonic()
        fits = _fits(job, replica, loader, size, memory)
        took_s = time.monotonic() - begun
        if not fits:
            if found or size == 1:
                break
            most = size = size // 2
            continue
        found = size
        if (
            loader.ended_after is not None
            or not memory.has_room_for_twice
            or (memory.is_of_cpu and took_s > SLOW_S)
        ):
            break
        size *= 2
    found = found or 1
    memory.begin()  # Nothing that was tried is kept.
    log.info("batch size %d: %s of memory, of %s", found, memory.used, memory.budget)
    return found


def _sharers(job: JobFile) -> int:
    """Processes of this job with a model each that share the memory."""
    placed = placement.place(job)
    here = [name for name, agent in placed.items() if agent == placed["worker-0"]]
    workers = sum(name.startswith("worker-") for name in here) * job.ranks
    gpus = torch.cuda.device_count() if job.workers.device != "cpu" else 0
    return -(-workers // max(1, gpus))


def _fits(
    job: JobFile, replica: Replica, loader: PortionLoader, size: int, memory: _Memory
) -> bool:
    """Try it. If not even one sample fits, the error says so."""
    loader.resize(size)
    try:
        with explained(job, size):
            memory.begin()
            for batch, _ in loader.step(0, 0, size, 0, shard=0):
                replica.try_batch(batch)
            return memory.end()
    except Exception as error:
        if size == 1 or not is_for_want_of_memory(error):
            raise
    finally:
        replica.forget_gradients()
    gc.collect()  # What the error has held.
    return False


class _Memory:
    """used: bytes that the newest trial took; budget: what it may take."""

    def __init__(self, replica: Replica, sharers: int) -> None:
        self._device, self._sharers = replica.device, sharers
        self._reserve = VECTORS * 4 * len(replica.parameters)
        self.is_of_cpu = replica.device.type != "cuda"
        self.used = self.budget = 0
        self.has_room_for_twice = True

    def begin(self) -> None:
        if self.is_of_cpu:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
            self._before = _status_kb("VmRSS") * 1024
            self.budget = int(SHARE * available() / self._sharers) - self._reserve
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        free = torch.cuda.mem_get_info(self._device)[0]
        ours = torch.cuda.memory_reserved(self._device)
        self.budget = int((1 - SPARE) * (free + ours) / self._sharers) - self._reserve

    def end(self) -> bool:
        """Whether it fits."""
        if self.is_of_cpu:
            self.used = max(0, _peak_bytes() - self._before)
            self.has_room_for_twice = 2 * self.used <= self.budget
        else:
            torch.cuda.synchronize(self._device)
            self.used = torch.cuda.max_memory_reserved(self._device)
        return self.used <= self.budget


def _peak_bytes() -> int:
    return (_status_kb("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _status_kb(key: str) -> int:
    return _kb(Path("/proc/self/status"), key)


def available() -> int:
    """Bytes of memory that this process may still take: of the machine, and of its cgroup."""
    found = [_kb(Path("/proc/meminfo"), "MemAvailable") * 1024]
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # There is no limit, or none that can be seen.
        limit = int((group / "memory.max").read_text())
        found.append(max(0, limit - int((group / "memory.current").read_text())))
    return min(found)


def _kb(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0
