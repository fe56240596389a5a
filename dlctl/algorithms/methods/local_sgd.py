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

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from dlctl import outdated
from dlctl.algorithms import barrier
from dlctl.algorithms.base import Method, Needs, PushKind, ReplicaSide, Start
from dlctl.algorithms.needs import Read, Write
from dlctl.algorithms.rounds import Rounds
from dlctl.job.config import Choice
from dlctl.job.settings import Live


@dataclass(slots=True, kw_only=True)
class Options:
    local_steps: Live[Annotated[int, Ge(1)]] = 16
    """Steps of a replica from one mean to the next, H."""
    overlap: bool = False
    """Continue with the next round while the mean of this one is in flight, and add the steps made
    meanwhile to it. For slow links; false: wait, as in the papers."""


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.local_steps, is_displacement=True)

    def begin(self, start: Start) -> None:
        self.rounds = self.arrival = Rounds(self)

    def run(self) -> Needs:
        return averaged(self, self.rounds, self.rounds.end)


def averaged(
    side: ReplicaSide,
    rounds: Rounds,
    end: Callable[[], bool],
    has_rest: Callable[[], bool] = lambda: False,
) -> Needs:
    """Rounds with a mean after each, for options with `local_steps` and `overlap`.

    end: adds what a round has come to to the residual; False: it is of no use. has_rest: whether
    there is something to push even if the round has no result.
    """
    clock = yield from barrier.join()
    while True:
        samples = yield from rounds.steps(side.options.local_steps)
        if rounds.is_ahead and side.view.clock_max <= clock:
            yield Read(wait=True, at_least=clock + 1)
        is_apart = rounds.is_ahead and side.view.clock_max != clock + 1
        rounds.is_ahead, clock = False, side.view.clock_max
        brings = (samples > 0 or has_rest()) and end()
        rounds.close()
        if brings:
            yield side.write_residual(samples=samples, clock=clock)
        else:
            yield Write(vector=None, clock=clock)
        if brings and side.options.overlap and not is_apart:
            rounds.is_ahead = True
            yield Read(wait=False, at_least=clock + 1)
        else:
            clock = yield from barrier.next_step(clock)


@dataclass(slots=True, kw_only=True)
class DilocoOptions(Options):
    local_steps: Live[Annotated[int, Ge(1)]] = 500
    """Steps of a replica from one mean to the next, H; the paper tries 50 to 2000."""


LOCAL_SGD = Method(
    Options=Options,
    replica=Replica,
    shard=barrier.Barrier,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
)
DILOCO = Method(
    Options=DilocoOptions,
    replica=Replica,
    shard=barrier.Barrier,
    optimizer=Choice(name="momentum", options={"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    inner=Choice(name="adamw", options={"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
)


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
