"""Hosts of a batch system in virtual time: each is queued, given and taken back on its own.

An order for the agent of a host that is not there waits in the queue; its coordinator is told so
until the host is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dlctl.roles.coordinator.records import LaunchAgent
from dlctl.roles.protocol.effects import AgentWaits, HostTaken
from dlctl.sim.process import Process
from dlctl.sim.timeline import Timeline

POLL_S = 0.5


class BatchedWorld(Protocol):
    """What the batch system does to the world."""

    timeline: Timeline
    coordinator: Process

    def lose_host(self, agent: str) -> None: ...

    def join(self, agent: str) -> None: ...

    def living(self) -> list[str]: ...


class BatchHosts:
    def __init__(self, place: BatchedWorld) -> None:
        self.place = place
        self._away: set[str] = set()
        """Agents whose hosts are not ours now."""
        self._orders: dict[str, tuple[LaunchAgent, Callable[[LaunchAgent], None]]] = {}
        """Agent -> the newest order for it, and who carries it out."""
        self.incarnations: dict[str, int] = {}
        """Agent -> that of the newest order, for those that were ever ordered."""

    def take_order(self, order: LaunchAgent, launch: Callable[[LaunchAgent], None]) -> bool:
        """Whether the order waits in the queue."""
        self.incarnations[order.name] = order.incarnation
        self._orders.pop(order.name, None)
        if order.name not in self._away:
            return False
        self._orders[order.name] = order, launch
        self._wait(order)
        return True

    def cancel(self, name: str) -> None:
        self._orders.pop(name, None)

    def _wait(self, order: LaunchAgent) -> None:
        if self._orders.get(order.name, (None,))[0] is not order:
            return
        if self.place.coordinator.alive:
            waits = AgentWaits(order.name, order.incarnation, "job 17 is pending: Priority")
            self.place.coordinator.post(waits)
            self.place.timeline.after(POLL_S, lambda: self._wait(order))

    # ------------------------------------------------------------ the owner

    def queue(self, agent: str) -> None:
        """The host is not given yet."""
        self._away.add(agent)

    def notify(self, agent: str) -> None:
        """The host will soon be taken back: a signal before the preemption."""
        self._tell(agent, "job 17 is about to lose its node", is_gone=False)

    def take(self, agent: str) -> None:
        """The host is taken back, with all that runs there."""
        self._away.add(agent)
        self.place.lose_host(agent)
        self._tell(agent, "job 17 was preempted", is_gone=True)

    def give(self, agent: str) -> None:
        self._away.discard(agent)
        self.place.join(agent)
        order, launch = self._orders.pop(agent, (None, None))
        if order is not None and launch is not None and self.place.coordinator.alive:
            launch(order)

    def _tell(self, agent: str, why: str, *, is_gone: bool) -> None:
        if agent in self.incarnations and self.place.coordinator.alive:
            taken = HostTaken(agent, self.incarnations[agent], is_gone, why)
            self.place.coordinator.post(taken)
