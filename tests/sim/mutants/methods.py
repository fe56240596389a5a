"""Bugs of methods and compressors: what a replica or a shard makes of gradients."""

from __future__ import annotations

from dataclasses import replace

from planting import Patch, mutant

from dlctl.algorithms import barrier
from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import Decision, View
from dlctl.algorithms.holding import JointStep
from dlctl.algorithms.methods.kfac_twin import KfacTwin
from dlctl.algorithms.methods.local_sgd import Replica
from dlctl.algorithms.needs import Gradient, Read, Write
from dlctl.algorithms.quorum import Chosen
from dlctl.algorithms.rounds import Rounds
from dlctl.algorithms.tables import Parts
from dlctl.compress.topk import TopK
from dlctl.roles.server.reporting import Reporting
from dlctl.roles.worker.services.reading import OneRead


@mutant("what a sparse push leaves behind is forgotten", "AcksChecker", scenario="downpour-topk")
def residual_is_lost(patch: Patch) -> None:
    honest = TopK.take

    def take(self, u, shard=0):
        packed = honest(self, u, shard)
        u[:] = 0
        return packed

    patch.setattr(TopK, "take", take)


@mutant("a barrier counts workers and not their samples", "LedgerChecker", scenario="sync", first=5)
def mean_of_means(patch: Patch) -> None:
    honest = JointStep.make

    def make(self, held):
        return honest(self, [each._replace(push=replace(each.push, samples=1)) for each in held])

    patch.setattr(JointStep, "make", make)


@mutant(
    "steps that are made while the mean is under way are wiped out by it", "OwnStepsChecker",
    scenario="local-sgd",
)  # fmt: skip
def steps_under_way_are_wiped_out(patch: Patch) -> None:
    def after(self, lo, hi):
        if self.vector is not None:
            self.vector[lo:hi] = self.side.parameters[lo:hi]

    patch.setattr(Rounds, "after", after)


@mutant(
    "what a push has left behind is taken for steps of the next round", "OwnStepsChecker",
    scenario="local-sgd", first=5,
)  # fmt: skip
def leftovers_are_steps(patch: Patch) -> None:
    def after(self, lo, hi):
        if self.is_ahead:
            self.side.parameters[lo:hi] -= self.side.residual[lo:hi]
        if self.vector is not None:
            self.vector[lo:hi] = self.side.parameters[lo:hi]

    patch.setattr(Rounds, "after", after)


@mutant(
    "steps since the push are lost when a mean is placed", "OwnStepsChecker",
    scenario="local-sgd",
)  # fmt: skip
def steps_are_lost_to_a_mean(patch: Patch) -> None:
    def before(self, lo, hi):
        if self.vector is not None:
            self.vector[lo:hi] = 0

    patch.setattr(Rounds, "before", before)


@mutant(
    "a replica pushes its next round before the mean of this one has come", "OwnStepsChecker",
    scenario="local-sgd", first=5,
)  # fmt: skip
def a_round_further_ahead(patch: Patch) -> None:
    honest = Replica.run

    def run(self):
        requests, value = honest(self), None
        while True:
            request = requests.send(value)
            if self.rounds.is_ahead and isinstance(request, Read) and self.residual.any():
                self.view = View(request.at_least, request.at_least)
                request = replace(request, wait=False)
            value = yield request

    patch.setattr(Replica, "run", run)
    patch.setattr(OneRead, "serves", lambda self, other: True)


@mutant("a round that the end of the data cuts short is not pushed", "AcksChecker", "LedgerChecker",
    scenario="local-sgd", first=1,
)  # fmt: skip
def short_rounds_are_dropped(patch: Patch) -> None:
    def steps(self, count):
        self.is_open = True
        self.vector = self.side.parameters.copy()
        made = samples = 0
        while made < count:
            computed = yield Gradient(step=True, gather=False)
            if computed is None:
                self.vector[:] = self.side.parameters
                return 0
            made += 1
            samples += computed.samples
        return samples

    patch.setattr(Rounds, "steps", steps)


@mutant(
    "a gradient is computed although its shards are at different steps", "ClockChecker",
    scenario="sync-recovery", first=442,
)  # fmt: skip
def shards_may_be_steps_apart(patch: Patch) -> None:
    def next_step(clock):
        return (yield Read(wait=True, at_least=clock + 1)).clock_max

    def meet(clock):
        yield Write(vector=None, clock=clock)
        return (yield Read(wait=True, at_least=clock + 1)).clock_max

    patch.setattr(barrier, "next_step", next_step)
    patch.setattr(barrier, "meet", meet)


@mutant(
    "a portion of a batch counts twice", "SameResult", scenario="sandblaster", seeds=30, first=2
)
def portion_counts_twice(patch: Patch) -> None:
    honest = Parts.push

    def push(self, push, delta):
        self._parts = 0
        return honest(self, push, delta)

    patch.setattr(Parts, "push", push)


@mutant("a barrier waits for workers that have died", "LivenessChecker", scenario="sync")
def barrier_waits_for_the_dead(patch: Patch) -> None:
    honest = Barrier.members

    def members(self, slots):
        return honest(self, slots | self.roster.members)

    patch.setattr(Barrier, "members", members)


@mutant(
    "each shard decides by its own arrivals", "QuorumChecker", scenario="toys", first=5, seeds=1
)
def quorum_per_shard(patch: Patch) -> None:
    honest = Chosen._hold

    def hold(self, held):
        outcomes = honest(self, held)
        clock = self.shard.version
        here = [(slot, term) for at, slot, term in self._held if at == clock]
        if len(here) < 2:
            return outcomes
        return [*outcomes, *self.decided(Decision(clock, frozenset(here[:2]), frozenset()))]

    patch.setattr(Chosen, "_hold", hold)
    patch.setattr(Reporting, "on_decided", lambda self, message: None)


@mutant(
    "the lost push of a dead worker is waited for", "LivenessChecker", scenario="toys", first=5,
    seeds=1,
)  # fmt: skip
def lost_pushes_of_the_dead_are_waited_for(patch: Patch) -> None:
    def missing(self, decision):
        here = {(slot, term) for clock, slot, term in self._held if clock == decision.clock}
        return decision.used - here

    patch.setattr(Chosen, "_missing", missing)


@mutant(
    "who joins a group keeps the factors that it begins with", "GroupChecker",
    scenario="serverless", seeds=1, first=18,
)  # fmt: skip
def own_factors_after_a_join(patch: Patch) -> None:
    patch.setattr(KfacTwin, "take", lambda self, given: ())
