"""Hosts of a batch system in virtual time: each is queued, given and taken back on its own.

An order for the agent of a host that is not there waits in the queue; its coordinator is told so
until the host is given. The host of an agent without workers is given back, as
a launcher cancels its job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from dlctl.roles.coordinator.records import LaunchAgent
from dlctl.roles.protocol.effects import AgentWaits, HostTaken
from dlctl.sim.process import Process
from dlctl.sim.timeline import Timeline
from dlctl.util.names import HOME_AGENT

POLL_S = 0.5
UNWANTED = "no worker is to run there"
CANCEL_S = 0.2
"""From the wish to give a host back until it is gone."""


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
        self._returned: set[str] = set()
        """Agents whose hosts were given back."""
        self._wanted: frozenset[str] | None = None
        """Agents that need hosts; None: all."""
        self._orders: dict[str, tuple[LaunchAgent, Callable[[LaunchAgent], None]]] = {}
        """Agent -> the newest order for it, and who carries it out."""
        self.incarnations: dict[str, int] = {}
        """Agent -> that of the newest order, for those that were ever ordered."""

    def take_order(self, order: LaunchAgent, launch: Callable[[LaunchAgent], None]) -> bool:
        """Whether the order waits in the queue."""
        self.incarnations[order.name] = order.incarnation
        self._orders.pop(order.name, None)
        if not self._is_without(order.name) and self._is_wanted(order.name):
            return False
        self._orders[order.name] = order, launch
        self._wait(order)
        self._grant(order.name)
        return True

    def cancel(self, name: str) -> None:
        self._orders.pop(name, None)

    def _wait(self, order: LaunchAgent) -> None:
        if self._orders.get(order.name, (None,))[0] is not order:
            return
        if self.place.coordinator.alive:
            is_wanted = self._is_wanted(order.name)
            why = "job 17 is pending: Priority" if is_wanted else UNWANTED
            waits = AgentWaits(order.name, order.incarnation, why)
            self.place.coordinator.post(waits)
            self.place.timeline.after(POLL_S, lambda: self._wait(order))

    def holds(self) -> set[str]:
        """Agents that were ordered and have a host."""
        return {agent for agent in self.incarnations if not self._is_without(agent)}

    def _is_without(self, agent: str) -> bool:
        return agent in self._away or agent in self._returned

    def _is_wanted(self, agent: str) -> bool:
        return agent == HOME_AGENT or self._wanted is None or agent in self._wanted

    # ------------------------------------------------------------ the coordinator

    def want(self, agents: Collection[str]) -> None:
        self._wanted = frozenset(agents)
        for agent in self.incarnations:
            if not self._is_wanted(agent):
                self.place.timeline.after(CANCEL_S, partial(self._give_back, agent))
            self._grant(agent)

    def _give_back(self, agent: str) -> None:
        if not self._is_wanted(agent) and not self._is_without(agent):
            self._returned.add(agent)
            self.place.lose_host(agent)
            self._tell(agent, UNWANTED, is_gone=True)

    def _grant(self, agent: str) -> None:
        """Carry out its order, if its host is there or can be had again."""
        if agent in self._away or not self._is_wanted(agent):
            return
        if agent in self._returned:
            self._returned.discard(agent)
            self.place.join(agent)
        order, launch = self._orders.pop(agent, (None, None))
        if order is not None and launch is not None and self.place.coordinator.alive:
            launch(order)

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
        if agent not in self._returned:
            self.place.join(agent)
        self._grant(agent)

    def _tell(self, agent: str, why: str, *, is_gone: bool) -> None:
        if agent in self.incarnations and self.place.coordinator.alive:
            taken = HostTaken(agent, self.incarnations[agent], is_gone, why)
            self.place.coordinator.post(taken)
