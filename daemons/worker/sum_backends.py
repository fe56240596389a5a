"""Where a group sums its vectors: in host memory by gloo, or on GPUs by NCCL.

NCCL is chosen if each member has a GPU of its own, and all have the same version of it. NCCL does
not notice that a member has died: a sum on a GPU would last for ever, and whatever waits for it. So
this process waits in the thread of the group, which looks whether the generation is over; that
thread alone aborts the communicator, because two aborts at once may block each other.

A member whose communicator could not be made goes on with gloo, and with it all others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # Its types lack the stores.
NEVER = timedelta(days=7)
"""Timeout of a part of a sum that is begun early."""
LOOK_S = 0.0005
"""Interval between two looks at an operation of NCCL; a sum of 100 MB takes some milliseconds."""
REPORTS_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Otherwise torch ends the process after an error or a timeout of NCCL."""


class GivenUp(Exception):
    """This generation has been superseded."""


class Device(NamedTuple):
    """What a member can sum on besides its host's memory; empty if on nothing else."""

    gpu: str = ""
    """The UUID of the GPU; "": the member has none for this."""
    nccl: str = ""
    """The version of NCCL."""


def uses_nccl(devices: Sequence[Device]) -> bool:
    """Whether these members sum by NCCL. All get the same answer, since all have the same list."""
    gpus, versions = {device.gpu for device in devices}, {device.nccl for device in devices}
    has_own = len(gpus) == len(devices) > 1 and "" not in gpus
    return has_own and len(versions) == 1 and "" not in versions


def device_of(device: torch.device) -> Device:
    """The GPU of the replica's model, if NCCL can sum there: not over parts of one GPU (MIG)."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return Device()
    properties: Any = torch.cuda.get_device_properties(device)
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if "MIG" in properties.name or not hasattr(properties, "uuid"):
        return Device()
    return Device(str(properties.uuid), ".".join(map(str, version)))


class Gloo:
    """A sum cannot be interrupted: it ends when it times out, or when a member closes its
    connections, as the one that ends this does.
    """

    takes_parts = True

    def __init__(self, store: Any, rank: int, size: int, host: str, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def start(self, part: Tensor) -> Any:
        """Start the sum of a part, in place. Raises whatever gloo raises."""
        options = dist.AllreduceOptions()
        options.timeout = NEVER
        return self._group.allreduce([part], options)

    def sum(self, vector: Tensor, limit_s: float, is_over: Callable[[], bool]) -> None:
        """Sum a vector over the group in place."""
        self._group.allreduce([vector]).wait(timedelta(seconds=limit_s))

    def end(self) -> None:
        """The connections close with the last reference."""


class Nccl:
    takes_parts = False

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._is_over = False

    def start(self, part: Tensor) -> Any:
        raise ConnectionError("NCCL sums whole vectors only")

    def sum(self, vector: Tensor, limit_s: float, is_over: Callable[[], bool]) -> None:
        """Sum a vector over the group in place, by way of the GPU. Raises GivenUp if the generation
        ends meanwhile, TimeoutError, and ConnectionError; each of them ends the communicator.
        """
        try:
            on_gpu = vector.to(self._device, copy=True)
            work, until = self._group.allreduce([on_gpu]), time.monotonic() + limit_s
            pause = threading.Event()
            while not work.is_completed():
                if is_over():
                    raise GivenUp
                if time.monotonic() > until:
                    raise TimeoutError(f"a sum by NCCL took longer than {limit_s:g} s")
                pause.wait(LOOK_S)
            if (error := work.exception()) is not None:
                raise ConnectionError(f"NCCL: {error}")
            work.wait()
            vector.copy_(on_gpu)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Abort the communicator, once; operations on it end on the other members too."""
        if not self._is_over:
            self._is_over = True
            with suppress(RuntimeError):  # It may have failed because there is none any more.
                self._group.abort()


def join_nccl(
    store: Any, rank: int, size: int, device: torch.device, timeout_s: float,
    is_over: Callable[[], bool],
) -> Nccl:  # fmt: skip
    """Join a group on GPUs; a first sum makes its communicator. Raises as `Nccl.sum`."""
    os.environ.update(REPORTS_ONLY)
    torch.cuda.set_device(device)  # It holds for this thread only.
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    made = Nccl(dist.ProcessGroupNCCL(store, rank, size, options), device)
    made.sum(torch.zeros(1, device="cpu"), timeout_s, is_over)
    return made
