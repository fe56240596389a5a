"""Downpour SGD. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Alg. 1.1 and §4.1.

Every replica runs on its own data and talks to the servers on its own schedule. In the paper's
words, n_fetch = `fetch_every_steps`, n_push = `push_every_steps`, alpha = the rate of the replica's
own optimiser (`[inner]`, plain SGD in the paper), eta = the rate of the servers' optimiser (Adagrad
in the paper, one accumulator per shard, in order of arrival):

    step = 0; accrued = 0
    loop:
        if step mod n_fetch == 0: start fetching the parameters     # overwrites the local ones
        gradient = grad(parameters, next mini-batch)
        accrued += gradient                                         # a sum, not a mean
        parameters -= alpha * gradient                              # the local step
        if step mod n_push == 0: start pushing accrued; accrued = 0
        step += 1

Consequences: fetch and push both happen at step 0, so the first push holds one gradient and later
ones n_push. Gradients computed while a push is in flight go into the next one. A fetch overwrites
local steps that are not pushed yet; they are not lost, they are in `accrued`. If a replica dies,
its unpushed gradients are lost, and the others do not wait.

Warm start (§4.1): one replica alone for the first steps, then the others from the resulting state
of the servers, the optimiser's included.

"auto" for n_fetch or n_push: each replica chooses the smallest number at which it waits for at most
`comm_share_max` of its time (see `roles/worker/pacing.py`). It only affects when it pushes or
fetches. A number may change at any time, so "step mod n == 0" is "n steps after the last time"
here; for a constant number it is the same.

`push_before_fetch` moves the pushes by one step: to n_push - 1, 2 n_push - 1 ... In the paper's
order a replica that pushes and fetches every n steps continues from parameters without its own last
n - 1 steps, because they are pushed a step later. With this option none is missing if n_push
divides n_fetch and `overlap` is false: else steps are computed between a push and the next fetch,
or while that is in flight.

Where the paper says nothing: fetched parameters are put in place between two steps, before the
local step of the gradient that was being computed. `overlap = false` waits for every fetch instead;
one worker with n_fetch = n_push = 1 is then exactly the servers' optimiser on one machine. The
local step may be any optimiser's, or none: with `[inner] name = "none"` a replica computes with the
fetched parameters until the next fetch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from dlctl.algorithms.base import (
    Automatic,
    Lead,
    Method,
    Needs,
    PushKind,
    PushOutcome,
    ReplicaSide,
    ShardSide,
)
from dlctl.algorithms.needs import Gradient, NextData, Read, Step
from dlctl.algorithms.rounds import Discards
from dlctl.compress.base import Delta
from dlctl.job.config import Choice
from dlctl.job.settings import Live
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED


@dataclass(slots=True, kw_only=True)
class Options:
    fetch_every_steps: Live[Annotated[int, Ge(1)] | Literal["auto"]] = 1
    """Steps between fetches, n_fetch; the first is at step 0. "auto": as few as `comm_share_max`
    allows; with `overlap`, as few as a fetch takes."""
    push_every_steps: Live[Annotated[int, Ge(1)] | Literal["auto"]] = 1
    """Steps between pushes, n_push; the first is at step 0. "auto": as few as `comm_share_max`
    allows."""
    comm_share_max: Annotated[float, Gt(0), Lt(1)] = 0.1
    """With "auto": fraction of a worker's time that it may wait for pushes and fetches."""
    auto_steps_max: Annotated[int, Ge(1)] = 64
    """With "auto": the most steps from one push or fetch to the next, however slow the link is."""
    warmstart_steps: Annotated[int, Ge(0)] = 0
    """Steps that one replica makes alone before the others are released."""
    push_before_fetch: bool = False
    """Push at the end of the step before a fetch, not of the step that begins with it: the fetched
    parameters then contain all gradients of this replica, if push_every_steps divides
    fetch_every_steps and `overlap` is false. The first push holds n_push gradients. For long
    intervals; in the paper it is false."""
    overlap: bool = True
    """Compute while fetches are in flight; false: wait for each fetch."""


class Replica(ReplicaSide):
    """The client of Alg. 1.1. `residual` is accrued: the residual of a push is in the next one.

    A discarded gradient is no step, so it leads to no fetch. After several in a row, which
    this replica's own steps may have caused, it fetches before each batch.
    """

    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        steps = options.push_every_steps
        return PushKind(steps if isinstance(steps, int) else 1)

    def automatic(self) -> Mapping[str, Automatic]:
        bounds = self.options.auto_steps_max, self.options.comm_share_max
        return {
            "push": Automatic("push_every_steps", *bounds),
            "fetch": Automatic("fetch_every_steps", *bounds),
        }

    def changes_parameters(self) -> bool:
        return self.has_inner

    def run(self) -> Needs:
        step = samples = 0
        fetched_at = -math.inf
        pushed_at = -1 if self.options.push_before_fetch else -math.inf
        discards = Discards()
        while True:
            data = yield NextData()
            if data is not None:
                fetches = step - fetched_at >= self.interval("fetch_every_steps")
                is_lost = discards.is_diverged
                if fetches or is_lost:
                    yield Read(wait=is_lost or not self.options.overlap)
                computed: Step | None = yield Gradient(step=self.has_inner)
                if discards.count(computed) or computed is None:
                    continue
                self.accrue(computed.gradient)
                samples += computed.samples
                fetched_at = step if fetches else fetched_at
            is_due = data is not None and step - pushed_at >= self.interval("push_every_steps")
            if samples and (data is None or is_due):
                yield self.write_residual(samples=samples)
                samples = 0
                pushed_at = step if is_due else pushed_at
            step += data is not None


class Server(ShardSide):
    """Applies at once: no waiting, no averaging, independent of other shards."""

    applies_as_pushed = True

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        staleness = max(0, self.shard.version - push.base_version)
        self.shard.apply(delta, push.samples)
        return [push.outcome(APPLIED, staleness)]


class WarmStart(Lead):
    """Lets the first replica work alone until it has made `warmstart_steps` acknowledged steps."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        left = self.options.warmstart_steps - self.steps_done
        if left <= 0 or slot == first_slot:
            return ""
        return f"warm start: worker-{first_slot} works alone for {left} more steps"


DOWNPOUR = Method(
    Options=Options,
    replica=Replica,
    shard=Server,
    lead=WarmStart,
    inner=Choice(name="sgd", options={"lr": 0.01}),
)
