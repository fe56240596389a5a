"""What a sum of a group costs its members in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from daemons.simulator.costs import Costs
from dlctl.sim.cores import SimThread
from dlctl.sim.handling import BYTE_S, Handling
from dlctl.sim.process import Process
from dlctl.sim.request import LinkSpeed

RING_CPU_S = 3e-4
"""CPU time of each member of a sum beside the transfer: messages, threads, copies."""


def ring_s(nbytes: int, members: int, link: LinkSpeed | None) -> float:
    """How long the vector is under way."""
    sent = 2 * (members - 1) / members * nbytes
    if link is None:
        return sent * BYTE_S
    return sent / link.bytes_per_s + 2 * (members - 1) * link.latency_s


class RingSums:
    """Each member sends 2 (n - 1) / n of the vector around a ring (Patarasuk and Yuan, 2009), in as
    many messages, one after the other. link: None: all are on one machine.
    """

    def __init__(self, handling: Handling, costs: Costs, link: LinkSpeed | None) -> None:
        self._handling = handling
        self._costs = costs
        self._link = link
        self._threads: dict[Process, SimThread] = {}

    def transfer(self, process: Process, nbytes: int, members: int, do: Callable[[], None]) -> None:
        """Half of the CPU time, and the ring."""
        takes_s = max(ring_s(nbytes, members, self._link), self._costs.of_ring(_slot_of(process)))
        self._run(process, do, takes_s)

    def finish(self, process: Process, do: Callable[[], None]) -> None:
        """The other half, and two ways over the network."""
        self._run(process, do, 0.0 if self._link is None else 2 * self._link.latency_s)

    def _run(self, process: Process, do: Callable[[], None], sleeps_s: float) -> None:
        if process not in self._threads:
            self._threads[process] = self._handling.thread(process)
        cpu_s = self._costs.of_sum(_slot_of(process)) / 2
        self._threads[process].run(cpu_s, do, sleeps_s=sleeps_s)


def _slot_of(process: Process) -> int:
    return int(process.name.rpartition("-")[2])
