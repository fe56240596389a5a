"""The memory that the workers of a host share, as in `daemons/worker/hogwild/workers.py`: it lives
as long as any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dlctl.sim.process import Process
from dlctl.wire.messages import Array


@dataclass(slots=True)
class _Memory:
    parameters: Array
    mark: Array
    holders: list[Process] = field(default_factory=list)


class SharedModels:
    """The models in shared memory on all hosts of a simulated run."""

    def __init__(self) -> None:
        self.made = 0
        self._of_hosts: dict[str, _Memory] = {}

    def join(self, process: Process, initial: Array) -> tuple[Array, Array]:
        """float32[d], uint8[1]: shared with this host's workers, or new ones with these values."""
        memory = self._of_hosts.get(process.agent)
        if memory is None or not any(holder.alive for holder in memory.holders):
            self.made += 1
            memory = _Memory(initial.copy(), np.zeros(1, np.uint8))
            self._of_hosts[process.agent] = memory
        memory.holders.append(process)
        return memory.parameters, memory.mark
