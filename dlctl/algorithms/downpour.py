"""Downpour SGD. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, Alg. 1.1 and §4.1.

Every replica runs on its own data and talks to the servers on its own schedule. In the paper's
words, n_fetch = `fetch_every_steps`, n_push = `push_every_steps`, alpha = `local_lr`, eta = the
rate of the servers' optimiser (Adagrad in the paper, one accumulator per shard, in order of
arrival):

    step = 0; accrued = 0
    loop:
        if step mod n_fetch == 0: start fetching the parameters     # overwrites the local ones
        gradient = grad(parameters, next mini-batch)
        accrued += gradient                                         # a sum, not a mean
        parameters -= alpha * gradient                              # the local step
        if step mod n_push == 0: start pushing accrued; accrued = 0
        step += 1

What follows from it: fetch and push both happen at step 0, so the first push holds one gradient and
later ones n_push. Gradients that come while a push is in flight go into the next one. A fetch
overwrites local steps that are not pushed yet; they are not lost, they are in `accrued`. A replica
that dies takes its unpushed gradients with it, and the others do not wait.

Warm start (§4.1): one replica alone for the first steps, then the rest from the state that it left
in the servers, the optimiser's included.

Where the paper says nothing: fetched parameters are put in place between two steps, before the
local step of the gradient that was being computed. `overlap = false` waits for every fetch instead;
one worker with n_fetch = n_push = 1 is then exactly the servers' optimiser on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dlctl import messages
from dlctl.algorithms.base import (
    Algorithm,
    CoordinatorSide,
    Fetch,
    NextData,
    NextGradient,
    Outcome,
    Push,
    Requests,
    ServerSide,
    WorkerSide,
)
from dlctl.compress.base import Delta
from dlctl.messages import APPLIED


@dataclass(slots=True, kw_only=True)
class Options:
    fetch_every_steps: Annotated[int, Ge(1)] = 1
    """Steps between fetches, n_fetch; the first is at step 0. Changes live."""
    push_every_steps: Annotated[int, Ge(1)] = 1
    """Steps between pushes, n_push; the first is at step 0. Changes live."""
    local_lr: Annotated[float, Ge(0)] = 0.01
    """Rate of a replica's own steps between two fetches, alpha. Changes live."""
    warmstart_steps: Annotated[int, Ge(0)] = 0
    """Steps that one replica makes alone before the others are released."""
    overlap: bool = True
    """Compute while fetches are under way; false: wait for each fetch."""


class Replica(WorkerSide):
    """The client of Alg. 1.1. `residual` is accrued: what a push leaves is in the next one."""

    options: Options

    def run(self) -> Requests:
        step = samples = 0
        while True:
            data = yield NextData()
            if data is not None:
                if step % self.options.fetch_every_steps == 0:
                    yield Fetch(wait=not self.options.overlap)
                computed = yield NextGradient()
                if computed is None:
                    continue  # It was not finite, and is left out.
                self.residual += computed.gradient
                self.parameters -= self.options.local_lr * computed.gradient
                samples += computed.samples
            if samples and (data is None or step % self.options.push_every_steps == 0):
                yield Push(self.residual, samples)
                samples = 0
            step += data is not None


class Server(ServerSide):
    """Applies at once: no waiting, no averaging, no regard for what other shards have."""

    def push(self, push: messages.Push, delta: Delta) -> list[Outcome]:
        staleness = max(0, self.shard.version - push.base_version)
        self.shard.apply(delta)
        return [Outcome(push.slot, push.epoch, push.seq, APPLIED, staleness)]


class WarmStart(CoordinatorSide):
    """Lets the first replica work alone until it has made `warmstart_steps` acknowledged steps."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        left = self.options.warmstart_steps - self.steps_done
        if left <= 0 or slot == first_slot:
            return ""
        return f"warm start: worker-{first_slot} works alone for {left} more steps"


DOWNPOUR = Algorithm(
    Options=Options,
    worker=Replica,
    server=Server,
    coordinator=WarmStart,
    live=("fetch_every_steps", "push_every_steps", "local_lr"),
)
