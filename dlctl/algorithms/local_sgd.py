"""Local SGD and DiLoCo. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
Alg. 1; Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
Alg. 1.

N replicas begin a round with the same parameters theta and make H steps, each on its own data; the
differences to theta are averaged, and the servers' optimiser takes the mean as a gradient (in
DiLoCo's words, the outer gradient). H = `local_steps`, and on a shard's side:

    round t:  replica i:  theta_i = theta                     # fetched
                          H times: theta_i = inner(theta_i, grad(theta_i, next mini-batch))
                          push Delta_i = theta - theta_i
              shard:      theta = outer(theta, sum_i n_i Delta_i / sum_i n_i)      n_i: samples

They are one method with two names, which differ in their defaults:

               inner             outer                              H
    local-sgd  SGD, lr 0.01      SGD, lr 1: the mean of replicas    16
    diloco     AdamW, lr 4e-4    Nesterov, lr 0.7, momentum 0.9     500

- local_steps = 1 with inner = SGD and outer = SGD, lr 1, is synchronous SGD.
- The inner optimiser keeps its state from round to round, and in checkpoints (DiLoCo, §2).
- A schedule changes the inner rate; the outer rate is constant.

In the paper replicas have equal weights; here they are weighted by samples, which differ only where
data ends. Delta_i is computed when it is pushed, and added to the compressor's residual of the
previous push, so that nothing is lost if a replica is stopped before H steps. A change below the
last bit of a weight does not change it, as in any training in float32.

With `overlap` a replica does not wait for the mean. It continues from theta_i, and when the new
theta has arrived, after some steps of the next round, it adds these steps to theta:

                          theta_i = theta - (steps since the push)

This delays a part of the steps by a round, as Streaming DiLoCo (Douillard et al., 2025) does when
it overlaps communication with computation, with the whole vector as the only fragment. There the
two are mixed, theta_i = alpha theta_i + (1 - alpha) theta; here no step is weakened, and none
counts twice. No replica gets further ahead than a round.

Everything else is as in `sync`: the members, those that a round waits for, and that a push for a
past round is dropped. A replica without data in the middle of a round pushes the steps that it has
made. One whose steps diverge pushes nothing of its round, waits for the mean of the others and
resumes from that; so does one with several discarded gradients in a row. A single such gradient is
left out, as in every method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dlctl.algorithms import sync
from dlctl.algorithms.base import Method, Needs, PushKind, Start
from dlctl.algorithms.needs import LEFT_OUT_MAX, Gradient, NextData, Read, Write
from dlctl.config import Choice
from dlctl.settings import Setting, count
from dlctl.vector import Vector, copy_of, is_finite


@dataclass(slots=True, kw_only=True)
class Options:
    local_steps: Annotated[int, Ge(1)] = 16
    """Steps of a replica from one mean to the next, H. Changes live."""
    overlap: bool = False
    """Continue with the next round while the mean of this one is in flight, and add the steps made
    meanwhile to it. For slow links; false: wait, as in the papers."""


class Replica(sync.Replica):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.local_steps, is_way=True)

    def begin(self, start: Start) -> None:
        self._is_ahead = False
        """A push is in flight, and this replica has continued without its mean."""
        self._base: Vector | None = None
        """The parameters before the steps that no push holds; None: there are no such steps."""
        self._is_on_way = False
        """A round is under way: `_base` and the parameters differ by steps of this replica."""
        self._has_data = True
        """Whether the newest round has made all of its steps."""

    def run(self) -> Needs:
        clock = yield from self._join()
        while True:
            samples = yield from self._accrue()
            if self._is_ahead and self.view.clock_max <= clock:
                yield Read(wait=True, at_least=clock + 1)
            is_apart = self._is_ahead and self.view.clock_max != clock + 1
            self._is_ahead, clock = False, self.view.clock_max
            brings = bool(samples) or self.owes()
            if brings and not self._take_way():
                brings, samples = False, 0
            self._is_on_way = False
            yield self._push(brings, samples, clock)
            self._is_ahead = brings and self.options.overlap and not is_apart
            if self._is_ahead:
                yield Read(wait=False, at_least=clock + 1)
            else:
                clock = yield from self._next_step(clock)

    def placing(self, lo: int, hi: int) -> None:
        """From here until `placed`, `_base` holds the steps to add to the values read."""
        if not self._is_on_way:
            self._base = None
        elif self._base is not None and self._is_ahead:
            self._base[lo:hi] -= self.parameters[lo:hi]
        elif self._base is not None:
            self._base[lo:hi] = 0

    def placed(self, lo: int, hi: int) -> None:
        if self._base is not None:
            self.parameters[lo:hi] -= self._base[lo:hi]
            self._base[lo:hi] += self.parameters[lo:hi]

    def owes(self) -> bool:
        """Whether there is something to push even if this round has no result."""
        return False

    def round_steps(self) -> int:
        return self.options.local_steps

    def _accrue(self) -> sync.Accrues:
        """A round's steps. Returns their samples; 0 if they diverge, and none of them counts.

        Then this replica's parameters are useless, and so are slices of a mean that have been
        placed: they contain steps that are dropped here. So no step follows until all slices were
        fetched again.
        """
        steps = samples = left_out = 0
        if self._base is None:
            self._base = copy_of(self.parameters)
        self._is_on_way = self._has_data = True
        while steps < self.round_steps():
            if left_out >= LEFT_OUT_MAX and (steps or self._is_ahead):
                self._is_on_way = False
                return 0
            if (yield NextData()) is None:
                self._has_data = False
                break
            computed = yield Gradient(step=True, gather=False)
            if computed is None:
                left_out += 1
                continue
            left_out = 0
            steps += 1
            samples += computed.samples
        return samples

    def _take_way(self) -> bool:
        """Add the outer gradient of this round to the residual. Returns whether the sum is finite;
        else it is dropped. A residual that is itself not finite was restored from a checkpoint like
        this: no round would ever count with it, so it is reset.
        """
        way, self._base = self._base, None
        assert way is not None
        way -= self.parameters
        if self.has_residual():
            way += self.residual
        if is_finite(way):
            self.residual = way
            return True
        if self.has_residual() and not is_finite(self.residual):
            self.residual = None
        return False

    def _push(self, brings: bool, samples: int, clock: int = 0) -> Write:
        """brings: the round has an outer gradient. A vector without a residual is not copied: the
        next round allocates another one.
        """
        if not brings:
            return Write(vector=None, samples=samples, clock=clock)
        return self.write_residual(samples=samples, clock=clock)


@dataclass(slots=True, kw_only=True)
class DilocoOptions(Options):
    local_steps: Annotated[int, Ge(1)] = 500
    """Steps of a replica from one mean to the next, H; the paper tries 50 to 2000. Changes live."""


LIVE = {
    "local_steps": Setting(help="steps of a replica alone from one mean to the next", parse=count)
}
LOCAL_SGD = Method(
    Options=Options,
    replica=Replica,
    shard=sync.Barrier,
    live=LIVE,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
)
DILOCO = Method(
    Options=DilocoOptions,
    replica=Replica,
    shard=sync.Barrier,
    live=LIVE,
    optimizer=Choice(name="momentum", options={"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    inner=Choice(name="adamw", options={"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
)
