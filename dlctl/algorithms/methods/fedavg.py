"""Federated averaging. McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Alg. 1; Li et al., "Federated Optimization in Heterogeneous
Networks", MLSys 2020 (FedProx); Reddi et al., "Adaptive Federated Optimization", ICLR 2021
(FedAdam, FedYogi); McMahan et al., "Learning Differentially Private Recurrent Language Models",
ICLR 2018, Alg. 1 (DP-FedAvg, with a fixed denominator).

There are K clients with their own data (`data.clients`), n_k samples each. In every round a random
subset starts at the same w and trains on its data; the updates are averaged by samples:

    round t:  S_t = max(1, C K) of the K clients, at random              # C = `fraction`
              each k of S_t:  w_k = w
                              E passes over its data, batch by batch:    # E = `local_passes`
                                  w_k = inner(w_k, grad + mu (w_k - w))  # mu = `prox_mu`
              w = outer(w, sum n_k (w - w_k) / sum n_k)                  # sum over S_t

With outer = SGD, lr 1, that is w = sum n_k/n w_k. FedAdam and FedYogi are an `[optimizer]` of that
name; FedProx is mu > 0. Clients are stateless: the inner optimiser is reset for each client.

- A data epoch is a round, and a portion is a client. A worker trains one client after the other,
  each from w, and pushes the mean of their updates when no client of the round is left. Which
  worker has which client only affects the order of the sum.
- A round is over when all workers with clients of it have pushed. Later pushes are LATE and
  dropped. It is also over when a client's worker has died and all others have pushed: the client
  is not trained again.
- With `round_s` it is also over when so many seconds have passed and the updates of `clients_min`
  clients have arrived.
- The batches of a client continue over the end of a pass: E passes over 10 samples are 10 E
  samples.
- An update that is not finite counts as if its client had not been drawn.
- Without `data.clients` every portion of the dataset is a client.
- A run that is stopped ends its round with the updates that have arrived, and resumes with the next
  round.
- Where each worker has its own clients (`partition = "workers"`) no other worker trains them: those
  of a missing worker are missing from the round.
- A worker that joins at the end of a round may train a client of the next one from the w of this
  one; its push is late then.

Differential privacy, of a client as a whole (`clip_norm` S, `noise_multiplier` z):

    each k of S_t:  D_k = (w - w_k) min(1, S / ||w - w_k||)
    w = outer(w, (sum D_k + N(0, z^2 S^2)) / m)                          # m = `clients_per_round`

All clients have equal weights, and m is fixed, even if clients are missing. The worker that trains
a client clips its update, and each shard adds noise to its part: workers, servers and every reader
of `noise_seed` have to be trusted. A round that is repeated from a checkpoint has the same noise:
an observer of both learns their difference. Buffers of the model, losses and metrics are without
noise. Epsilon is in `dlctl status` (`privacy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from dlctl.algorithms import barrier, privacy
from dlctl.algorithms.base import Fault, Lead, Method, Needs, PushKind, ReplicaSide, Start
from dlctl.algorithms.means import Mean
from dlctl.algorithms.needs import Gradient, NextBatch, NextData, Pull, Write
from dlctl.algorithms.quorum import Chosen
from dlctl.algorithms.rounds import Discards
from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.job.clients import Cohort
from dlctl.job.config import Choice, JobFile
from dlctl.model.vector import Vector, copy_of, euclidean_norm, is_finite, zeros_like
from dlctl.wire.messages import Json, Push


@dataclass(slots=True, kw_only=True)
class Options:
    fraction: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of all clients that a round draws, C; at least one client."""
    clients_per_round: Annotated[int, Ge(0)] = 0
    """Number of clients that a round draws instead; 0: by `fraction`."""
    local_passes: Annotated[int, Ge(1), Le(100000)] = 1
    """Passes of a client over its data in a round, E."""
    prox_mu: Annotated[float, Ge(0)] = 0.0
    """Strength of the pull of a client's steps to the start of the round (FedProx); 0: none."""
    round_s: Annotated[float, Ge(0)] = 0.0
    """Seconds after which a round ends without the clients still in training; 0: no limit."""
    clients_min: Annotated[int, Ge(1)] = 1
    """Clients whose updates must have arrived before `round_s` ends a round."""
    clip_norm: Annotated[float, Ge(0)] = 0.0
    """Largest norm of a client's update, for differential privacy: a longer one is scaled down to
    it; 0: no limit. With it all clients have equal weights."""
    noise_multiplier: Annotated[float, Ge(0)] = 0.0
    """Standard deviation of the noise on the sum of all updates, in multiples of `clip_norm`."""
    noise_seed: Annotated[int, Ge(0)] = 0
    """Seed of the noise. With it the noise can be removed: choose it at random, and keep it secret.
    """
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """The delta of (epsilon, delta)-differential privacy; less than 1 / number of clients."""


def drawn(options: Options, clients: int) -> int:
    """The number of clients that take part in a round."""
    wanted = options.clients_per_round or max(1, round(options.fraction * clients))
    return min(wanted, clients)


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        return PushKind(1, is_displacement=True)

    def begin(self, start: Start) -> None:
        self._base = copy_of(self.parameters)
        """The parameters at the start of the round."""
        self._sum = zeros_like(self.parameters)
        """The sum of the updates of this round's clients, each times its number of samples."""

    def run(self) -> Needs:
        clock = yield from barrier.join_chosen()
        while True:
            samples = yield from self._round()
            yield Write(vector=self.residual if samples else None, samples=samples, clock=clock)
            clock = yield from barrier.next_chosen(clock)

    def _round(self) -> Generator[NextData | Gradient, Any, int]:
        """Train clients until there are none, or the next one is of another round. Returns the
        samples of the result, which is in the residual then.
        """
        self._base[:] = self.parameters
        self._sum[:] = 0
        total, data_epoch, has_more = 0, None, True
        while has_more and (data := (yield NextData())) is not None:
            if data_epoch is None:
                data_epoch = data.data_epoch
            if data.data_epoch != data_epoch:
                break
            samples, has_more = yield from self._client(data)
            total += samples if self._take_displacement(samples) else 0
        if total:
            self.residual += self._sum if self.options.clip_norm else self._sum / np.float32(total)
        return total

    def _client(self, data: NextBatch) -> Generator[NextData | Gradient, Any, tuple[int, bool]]:
        """Train from `_base` on all its data. Returns its samples, 0 if its steps diverge, and
        whether there may be another client.
        """
        self.parameters[:] = self._base
        mu = self.options.prox_mu
        pull = Pull(mu, self._base) if mu else None
        portion, samples, discards, has_more = data.portion, 0, Discards(), True
        while True:
            step = yield Gradient(step=True, gather=False, pull=pull, fresh=not samples)
            discards.count(step)
            samples += step.samples if step is not None else 0
            if data.is_last:
                break
            following = yield NextData()
            if following is None or following.portion != portion:
                # Only a loop of the user's own ends a client without having said so.
                has_more = following is not None
                break
            data = following
        return 0 if discards.is_diverged else samples, has_more

    def _take_displacement(self, samples: int) -> bool:
        """Add the update of a client to the sum. Returns whether it is valid."""
        displacement: Vector = self._base - self.parameters
        if not samples or not is_finite(displacement):
            return False
        weight = float(samples)
        if self.options.clip_norm:
            weight = min(1.0, self.options.clip_norm / max(euclidean_norm(displacement), 1e-30))
        self._sum += displacement * np.float32(weight)
        return True


class Private(Mean):
    """The mean by samples, or a noisy sum over a fixed number of clients."""

    def shares(self, pushes: Sequence[Push]) -> list[np.float32]:
        options: Options = self.side.options
        if not options.clip_norm:
            return super().shares(pushes)
        return [np.float32(1 / options.clients_per_round)] * len(pushes)

    def of(self, kept: Sequence[Any], shares: Sequence[np.float32]) -> Delta:
        mean, side = super().of(kept, shares), self.side
        options: Options = side.options
        if options.noise_multiplier:
            # Deterministic: a server that dies within the step does not draw new noise.
            rng = np.random.default_rng([options.noise_seed, side.shard.version, side.lo])
            scale = options.noise_multiplier * options.clip_norm / options.clients_per_round
            noise = rng.standard_normal(side.shard.size, np.float32) * np.float32(scale)
            mean = mean._replace(values=mean.values + noise)
        return mean


class FedAvgLead(Lead):
    """Which clients are drawn, and when a round is over."""

    portions = "clients"
    cuts_epochs = True
    chooses = True
    options: Options

    def __post_init__(self) -> None:
        self._clients = 0
        self._is_over = False
        """Whether the round of `data_epoch` is over."""
        self._rounds = self._came = 0
        """Rounds with any update; the number of clients in the newest one."""

    def cohort(self, clients: int) -> Cohort:
        self._clients = clients
        options = self.options
        if options.clip_norm and options.clients_per_round > clients:
            raise DlctlError(
                f"algorithm.clients_per_round is {options.clients_per_round}, and there are "
                f"{clients} clients",
                hint="the noise is that of so many: make it no larger than data.clients",
            )
        return Cohort(drawn(options, clients), options.local_passes)

    def may_lease(self, slot: int, first_slot: int) -> str:
        if self.epoch.left or not self.epoch.portions:
            return ""
        return f"round {self.data_epoch} ends when all of its clients are done"

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float | None:
        epoch = self.epoch
        under_way = {slot: n for slot, n in epoch.under_way.items() if slot in members}
        clients = sum(n for slot, n in under_way.items() if slot in came)
        is_all_leased = epoch.portions > 0 and not epoch.left
        is_complete = is_all_leased and under_way.keys() <= came.keys()
        round_s = self.options.round_s or math.inf
        is_late = waited_s >= round_s and clients >= self.options.clients_min
        if not (is_complete or is_late or members <= came.keys()):
            return round_s if waited_s < round_s < math.inf else None
        brings = any(came.values())
        if brings:
            self._rounds, self._came = self._rounds + 1, clients
        # Without any update the round is over only if no client is left to train.
        self._is_over = brings or is_all_leased
        return frozenset(came)

    def cut_epoch(self) -> bool:
        is_over, self._is_over = self._is_over, False
        return is_over

    def state(self) -> Json:
        counts = {"rounds": self._rounds, "came": self._came}
        return {"epoch": self.data_epoch, "over": self._is_over, **counts}

    def resume(self, state: Json) -> None:
        self.data_epoch, self._is_over = state["epoch"], state["over"]
        self._rounds, self._came = state["rounds"], state["came"]

    def figures(self) -> Json:
        found: Json = {"rounds": self._rounds, "clients": self._came}
        options = self.options
        if not options.noise_multiplier:
            return found
        privacy.accounting()  # Slow the first time: called before training, so it delays no step.
        if self._clients:
            epsilon = privacy.epsilon(
                self._clients, drawn(options, self._clients), options.noise_multiplier,
                self._rounds, options.delta,
            )  # fmt: skip
            found |= {"epsilon": round(epsilon, 4), "delta": options.delta}
        return found


def check(job: JobFile) -> list[Fault]:
    """The requirements of differential privacy."""
    options = Options(**job.algorithm.options)
    where = "algorithm"
    if not options.clip_norm:
        if not options.noise_multiplier:
            return []
        return [((where, "noise_multiplier"), "means nothing without clip_norm", "add clip_norm")]
    faults: list[Fault] = []
    if not options.clients_per_round or not job.data.clients:
        what = "the mean is over a fixed number of clients, which is not set"
        faults.append(((where, "clip_norm"), what, "add clients_per_round, and data.clients"))
    if job.compression.name != "none":
        what = "a compressor's residual for the next round is not clipped"
        faults.append((("compression", "name"), what, 'use "none" with algorithm.clip_norm'))
    if options.noise_multiplier and not privacy.has_accountant():
        faults.append(((where, "noise_multiplier"), privacy.MISSING, privacy.HINT))
    return faults


FEDAVG = Method(
    Options=Options,
    replica=Replica,
    shard=Chosen,
    mean=Private,
    lead=FedAvgLead,
    optimizer=Choice(name="sgd", options={"lr": 1.0}),
    inner=Choice(name="sgd", options={"lr": 0.01}),
    check=check,
)
