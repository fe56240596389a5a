"""Bugs of what all roles share: retries, messages, ends; and of what runs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from planting import Patch, mutant

from dlctl.roles.agent.children import HostedProcesses
from dlctl.roles.protocol.retry import Retries
from dlctl.roles.server.server import Server
from dlctl.roles.worker.worker import Worker
from dlctl.sim import group
from dlctl.sim.states import KeptStates
from dlctl.wire import messages as m


@mutant("a push carries other gradients when it is sent again", "Book", scenario="downpour-topk")
def retry_is_changed(patch: Patch) -> None:
    honest = Retries._repeat

    def repeat(self, item, now):
        if isinstance(item.message, m.Push):
            values, positions = item.message.delta.arrays
            delta = replace(item.message.delta, arrays=(np.zeros_like(values), positions))
            item.message = replace(item.message, delta=delta)
        return honest(self, item, now)

    patch.setattr(Retries, "_repeat", repeat)


@mutant(
    "a server that stands still is replaced before it is dead, and its state taken from it",
    "TermsChecker", seeds=10, first=63,
)  # fmt: skip
def two_servers_of_one_shard(patch: Patch) -> None:
    """As if an agent did not kill, and no lock kept the next one out."""
    honest_kill, honest_take = HostedProcesses.on_kill, KeptStates._take

    def on_kill(self, message, now):
        child = self._children.get(message.name)
        if child is None or not child.alive or not message.name.startswith("server"):
            honest_kill(self, message, now)
            return
        child.exited = m.ProcessExited(message.name, message.incarnation, -9, (), "")
        self.on_ended(child.exited, now)

    def take(self, spec):
        kept = self.kept.get(spec.shard)
        if kept is not None and kept.holder not in (None, self.process):
            kept.holder.given_up = True
        return honest_take(self, spec)

    patch.setattr(HostedProcesses, "on_kill", on_kill)
    patch.setattr(KeptStates, "_take", take)


@mutant("parameters are sent without a copy, while pushes change them", "FetchesChecker")
def no_copy(patch: Patch) -> None:
    patch.setattr(m.Parameters, "borrows", False)


@mutant("what gets no answer is not sent again", "LivenessChecker", "Outcome")
def no_retries(patch: Patch) -> None:
    def due(self, now):
        for item in self._items.values():
            if item.due <= now:
                self._rearm(item, now)
        return []

    patch.setattr(Retries, "due", due)


@mutant("daemons do not end when they are asked to", "NothingLeft", first=1)
def left_behind(patch: Patch) -> None:
    for role in (Server, Worker):
        patch.setitem(role._FROM_COORDINATOR, m.Shutdown, lambda self, message, now: None)
        patch.setattr(role, "handle", _deaf(role.handle))


def _deaf(honest):
    """A machine that does not end when it is asked to."""

    def handle(self, event, now):
        effects = honest(self, event, now)
        return [e for e in effects if type(e).__name__ != "Exit"]

    return handle


@mutant(
    "who comes to a group at work does not get its model", "GroupChecker", scenario="toys",
    first=3, seeds=1,
)  # fmt: skip
def who_joins_is_not_given_the_model(patch: Patch) -> None:
    honest = group.plan_of
    patch.setattr(group, "plan_of", lambda rows: honest(rows)._replace(joined=0))
