"""Bugs of a cut of the model while the run is under way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from planting import Patch, mutant

from dlctl.roles.coordinator.supervision import recutting
from dlctl.roles.coordinator.supervision.registration import Registration
from dlctl.roles.protocol.effects import LoadArrays
from dlctl.roles.protocol.saving import Restoring
from dlctl.roles.server.server import Server
from dlctl.roles.server.table_shard import TableShard
from dlctl.roles.worker.joining import Joining
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.wire import messages as m


@mutant(
    "a worker pushes what is of the old bounds to the servers that have new ones",
    "LivenessChecker", "RecutChecker", scenario="recuts",
)  # fmt: skip
def old_bounds_with_a_new_term(patch: Patch) -> None:
    honest = Joining.on_joined

    def on_joined(self, message, now):
        bounds = self.topology.bounds
        lo, hi = bounds[message.shard : message.shard + 2]
        return honest(self, replace(message, cut=self.topology.cut, lo=lo, hi=hi), now)

    def on_new_bounds(self, message, send_queue, now):
        self.context.send("coordinator", m.Noted(self.registration.name, "bounds", message.number))
        return False

    patch.setattr(Joining, "on_joined", on_joined)
    patch.setattr(Joining, "on_new_bounds", on_new_bounds)


@mutant(
    "a server goes on while its part of the model is saved for another cut",
    "LivenessChecker", "RecutChecker", scenario="recuts",
)  # fmt: skip
def no_pause_for_a_cut(patch: Patch) -> None:
    def may_answer(self, fetch):
        has_own = self.dedup.settled(fetch.slot) >= fetch.after
        return has_own and self.side.may_read(fetch.slot, fetch.clock_min)

    patch.setattr(TableShard, "_may_answer", may_answer)
    patch.setattr(
        Server, "_takes_part", lambda self: self.serving is not None and not self._restoring
    )


@mutant(
    "a cut is made although a server that has saved was replaced, and goes on with its old part",
    "LivenessChecker", "RecutChecker", scenario="recuts",
)  # fmt: skip
def a_cut_of_replaced_servers(patch: Patch) -> None:
    patch.setattr(recutting, "is_current", lambda server, term: True)


@mutant(
    "workers are not told where servers are that were replaced while the model was cut anew",
    "LivenessChecker", scenario="recuts", first=39,
)  # fmt: skip
def servers_that_have_moved_in_a_cut(patch: Patch) -> None:
    def announce(self, now):
        self.tell_bounds(now)

    patch.setattr(Registration, "_announce", announce)


@mutant("a range of the model is handed over twice, and another one to nobody",
        "RecutChecker", scenario="recuts")  # fmt: skip
def handed_over_twice(patch: Patch) -> None:
    honest = Restoring.load

    def load(self, effect):
        if isinstance(effect, LoadArrays) and effect.own is not None:
            effect = replace(effect, lo=0, hi=effect.hi - effect.lo)
        honest(self, effect)

    patch.setattr(Restoring, "load", load)


@mutant(
    "the numbers of pushes begin anew with another part of the model",
    "LivenessChecker", "RecutChecker", scenario="recuts",
)  # fmt: skip
def forgotten_numbers(patch: Patch) -> None:
    honest = TableShard.restore
    patch.setattr(TableShard, "restore", lambda self, state, own=None: honest(self, state))


@mutant(
    "what was not acknowledged of the old part is sent with values to the new one",
    "GlobalBook", scenario="recuts",
)  # fmt: skip
def values_of_the_old_part(patch: Patch) -> None:
    honest = ShardClient.move

    def move(self, lo, hi, send_queue):
        values = {
            seq: self._unacknowledged(seq, send_queue).delta.arrays[0] for seq in self._unsettled
        }
        honest(self, lo, hi, send_queue)
        for seq, array in values.items():
            push = self._unacknowledged(seq, send_queue)
            if array.size:
                delta = replace(push.delta, arrays=(np.resize(array, hi - lo),))
                send_queue.replace(self.push_key(seq), replace(push, delta=delta))

    patch.setattr(ShardClient, "move", move)
