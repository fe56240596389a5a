"""Streaming DiLoCo. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025
(arXiv 2501.18512), Alg. 2.

DiLoCo that never sends all parameters at once. They are cut into P fragments; every H / P steps the
replicas exchange one of them, in turn, so that each is exchanged every H steps. No replica waits:
the result of an exchange replaces the fragment tau steps after the push, mixed with the replica's
own fragment of that time.

    replica i, every H / P steps, for the next fragment p:
        push Delta_i = ref_p - theta_i,p                      # ref: the last result for p
        tau steps later:
            ref_p = theta_p                                   # from the servers
            theta_i,p = alpha theta_i,p + (1 - alpha) theta_p
    shard, when all have pushed p:
        theta_p = outer(theta_p, mean_i Delta_i)              # momentum is of p alone

P = `fragments`, H = `local_steps`, tau = `delay_steps`, alpha = `mix`. At most one fragment is in
flight. `compression` applies to fragments; the paper sends 4 bits: `name = "e3m0"`. The rounding
error is in the next push of that fragment; the paper drops it.

- Fragments are ranges of the flat vector of equal length, layer after layer ("sequential" in the
  paper); the paper prefers layers in strides.
- Replicas have equal weights, as in the paper.
- Where data ends, and before a checkpoint, the fragments are exchanged one after the other without
  steps between, so that each step is in all of them. Only then a step counts as done.
- With tau = 0 and alpha = 0 a replica waits for each fragment.

The members of an exchange, and those it waits for, are as in `sync`. A replica whose steps diverge
drops them, and resumes from the servers' parameters.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from dlctl import outdated
from dlctl.algorithms import barrier
from dlctl.algorithms.base import Method, Needs, PushKind, ReplicaSide, Start
from dlctl.algorithms.means import SparseMean, even_shares
from dlctl.algorithms.needs import Gradient, NextData, Range, Read, View, Write
from dlctl.algorithms.rounds import Reference, StepsMade, local_steps
from dlctl.job.config import Choice, JobFile
from dlctl.job.settings import Live
from dlctl.model.flat import slice_bounds
from dlctl.model.vector import Vector, copy_into, copy_of, is_finite
from dlctl.wire import messages
from dlctl.wire.messages import Array


@dataclass(slots=True, kw_only=True)
class Options:
    local_steps: Live[Annotated[int, Ge(1)]] = 100
    """Steps from one exchange of a fragment to the next exchange of that fragment, H; at least one
    for each fragment."""
    fragments: Annotated[int, Ge(2), Le(64)] = 4
    """Parts in which the parameters are exchanged, P; in one part it would be "diloco"."""
    delay_steps: Annotated[int, Ge(0)] = 1
    """Steps from the push of a fragment until the result replaces it, tau; less than local_steps /
    fragments."""
    mix: Annotated[float, Ge(0), Le(1)] = 0.5
    """Weight of a replica's own values at that time, alpha; 0: none."""


class Fragments(Reference):
    """The parameters in parts that are exchanged in turn. The reference is the last result for each
    of them; a replica's own steps since are on top of it.
    """

    vector: Vector

    def __init__(self, side: ReplicaSide, fragments: int) -> None:
        super().__init__(side)
        self.parts = min(fragments, len(side.parameters))
        self.vector = copy_of(side.parameters)
        self.is_diverged = False

    def at(self, clock: int) -> Range:
        """The elements exchanged at `clock`."""
        return slice_bounds(len(self.vector), self.parts, clock % self.parts)

    def steps(self, count: int) -> Generator[NextData | Gradient, Any, StepsMade]:
        made: StepsMade = yield from local_steps(count)
        self.is_diverged |= made.is_diverged
        return made

    def take(self, lo: int, hi: int) -> bool:
        """Add the outer gradient of a fragment to the residual, unless the sum is not finite."""
        side = self.side
        moved = self.vector[lo:hi] - side.parameters[lo:hi]
        moved += side.residual[lo:hi]
        if self.is_diverged or not is_finite(moved):
            self.is_diverged = True
            if not is_finite(side.residual[lo:hi]):
                side.residual[lo:hi] = 0
            return False
        side.residual[lo:hi] = moved
        self.vector[lo:hi] = side.parameters[lo:hi]
        return True

    def read(self, clock: int, *, wait: bool) -> Read:
        """A read of the result for the fragment that is exchanged at `clock`."""
        return Read(wait=wait, at_least=clock + 1, ranges=(self.at(clock),), into="beside")

    def mix(self, clock: int, values: Vector, own: float) -> None:
        """Take the result for a fragment; own: the weight of the replica's own values."""
        lo, hi = self.at(clock)
        copy_into(self.vector[lo:hi], values)
        model = self.side.parameters[lo:hi]
        model *= own
        model += (1 - own) * self.vector[lo:hi] if own else self.vector[lo:hi]

    def state(self) -> dict[str, Vector]:
        return {"own": self.side.parameters, "ref": self.vector}

    def restore(self, state: Mapping[str, Array]) -> None:
        if {"own", "ref"} <= state.keys() and state["own"].size == len(self.vector):
            copy_into(self.side.parameters, state["own"])
            copy_into(self.vector, state["ref"])
            self.has_model = True


class Replica(ReplicaSide):
    keeps_position = True
    options: Options

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        return PushKind(options.local_steps, is_displacement=True, is_all=False)

    def begin(self, start: Start) -> None:
        self.fragments = self.arrival = Fragments(self, self.options.fragments)
        self._unsent = 0
        """Exchanges until all steps are in every fragment."""

    def state(self) -> dict[str, Vector]:
        return {"residual": self.residual, **self.fragments.state()}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.fragments.restore(state)

    def run(self) -> Needs:
        clock = yield from barrier.join()
        carried = ahead = 0
        """Samples and steps since the newest push."""
        while True:
            each = max(1, self.options.local_steps // self.fragments.parts)
            made = yield from self._steps(each - ahead)
            has_pushed = yield from self._push(clock, made.samples + carried)
            carried, ahead, has_data = 0, 0, made.has_data
            if has_data and has_pushed and self.options.delay_steps:
                ahead = min(self.options.delay_steps, each - 1)
                yield self.fragments.read(clock, wait=False)
                made = yield from self._steps(ahead)
                carried, has_data = made.samples, made.has_data
            clock = yield from self._merge(clock)
            while not has_data and self._unsent:
                yield from self._push(clock, carried)
                carried = 0
                clock = yield from self._merge(clock)

    def _steps(self, count: int) -> Generator[NextData | Gradient, Any, StepsMade]:
        made: StepsMade = yield from self.fragments.steps(count)
        if made.steps:
            self._unsent = self.fragments.parts
        return made

    def _push(self, clock: int, samples: int) -> Generator[Write, Any, bool]:
        """Push the next fragment, empty without new steps. Returns whether there were any."""
        lo, hi = self.fragments.at(clock)
        if not self._unsent or not self.fragments.take(lo, hi):
            yield Write(vector=None, clock=clock, holds_steps=self.fragments.is_diverged)
            return False
        self._unsent -= 1
        yield Write(
            vector=self.residual[lo:hi], ranges=((lo, hi),), to_all=True, of=self.fragments.parts,
            samples=samples, clock=clock,
        )  # fmt: skip
        return True

    def _merge(self, clock: int) -> Generator[NextData | Read | Write, Any, int]:
        """Wait for the result for a fragment, and mix it in. Returns the clock."""
        view: View = yield self.fragments.read(clock, wait=True)
        assert view.values is not None
        if self.fragments.is_diverged or view.clock_max != clock + 1:
            return (yield from self._start_over(view.clock_max))
        self.fragments.mix(clock, view.values, self.options.mix)
        return clock + 1

    def _start_over(self, clock: int) -> Generator[NextData | Read | Write, Any, int]:
        """Start over from the servers' parameters; steps that were not pushed do not count."""
        if self.fragments.is_diverged:
            self.fragments.has_model, self._unsent = False, 0
        elif self._unsent:
            self._unsent = self.fragments.parts
        self.fragments.is_diverged = False
        return (yield from barrier.meet(clock))


class FragmentMean(SparseMean):
    """A step updates a fragment; a push of the whole vector means that its replica has nothing."""

    takes_parts = True

    def counts(self, push: messages.Push) -> bool:
        return push.is_part

    def shares(self, pushes: Sequence[messages.Push]) -> list[np.float32]:
        return even_shares(pushes)


def check(job: JobFile) -> list[tuple[tuple[str, ...], str, str]]:
    """Conflicting options of the job file."""
    options = job.algorithm.options
    each = options["local_steps"] // options["fragments"]
    if each < 1:
        what = f"{options['fragments']} fragments in {options['local_steps']} steps"
        return [(("algorithm", "fragments"), what, f"use at most {options['local_steps']}")]
    if options["delay_steps"] >= each > 0 and options["delay_steps"]:
        what = f"a fragment is pushed every {each} steps"
        return [(("algorithm", "delay_steps"), what, f"use at most {each - 1}")]
    return []


STREAMING_DILOCO = Method(
    Options=Options,
    replica=Replica,
    shard=barrier.Barrier,
    mean=FragmentMean,
    optimizer=Choice(name="momentum", options={"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    inner=Choice(name="adamw", options={"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    check=check,
)


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
