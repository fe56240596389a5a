"""Synchronous SGD: a barrier in the servers, perhaps with backup workers. Chen, Pan et al.,
"Revisiting Distributed Synchronous SGD", 2016; backup workers are its Alg. 3 and 4.

Every replica computes its gradient on the same parameters w_t. A shard waits for the push of step t
from every member, averages by the samples used and updates once:

    w_{t+1} = w_t - eta * sum_i n_i g_i / sum_i n_i          t = the shard's version

so that N workers with batch n are one worker with batch N n. The sum is taken in slot order,
whatever the order of arrival. Rules:

- a replica without data takes part with 0 samples, so that it does not block the barrier;
- a late push is LATE and dropped, never mixed into a later step; so is a second push of a replica
  for the same step;
- a refused push takes part in its step without samples and without a gradient, because its replica
  waits for the next step, too. It is settled with the other pushes of its step, so that a
  replacement server receives it again;
- steps without any push are skipped at once, however many; a push for a step that no shard can be
  at is refused;
- a replica that a shard has not waited for takes part without samples until all shards are at the
  same step again: a gradient is never of parameters of two steps;
- a replica that dies is no longer a member; one that joins counts from its first push on, because
  shards may be at different steps when it joins. Its first pushes have 0 samples;
- a shard whose server dies resumes at its step, and knows from which step on it counts each slot.
  Held pushes are resent: they had not been acknowledged.

With backup workers a step waits for the first N gradients only, of N + b replicas, and divides by
the samples of these; b = `backup_workers`:

    w_{t+1} = w_t - eta * sum n_i g_i / sum n_i         over the first N that arrive for step t

The coordinator decides which N for all shards (`quorum.py`), so a step takes one more round trip.
All other gradients of step t are LATE: they are dropped, never mixed into a later step, and do not
count as trained. Their replicas continue from the newest parameters. With b = 0 there is nothing
to decide.

- A step does not wait for replicas without data, and they are not among the N.
- Of several gradients that arrive at once, those of the replicas count that have counted least.
- While a replica is dead, N is one less; b does not change.
- A replica that is always slow contributes nothing. Every epoch redistributes the samples, so that
  different ones are missing each time; `dlctl status` shows the fraction of the steps in which each
  replica has counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from dlctl import outdated
from dlctl.algorithms import barrier, stepwise
from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, ShardSide
from dlctl.algorithms.quorum import Chosen, Counting
from dlctl.job.config import JobFile


@dataclass(slots=True, kw_only=True)
class Options:
    backup_workers: Annotated[int, Ge(0)] = 0
    """Workers whose gradients a step does not wait for, b: the slowest ones are dropped. Choose the
    rate for a batch of all other workers."""


class Replica(ReplicaSide):
    """Without backup workers every replica counts; with them some may not."""

    options: Options

    def run(self) -> Needs:
        some = bool(self.options.backup_workers)
        clock = yield from (barrier.join_chosen() if some else barrier.join())
        while True:
            samples = yield from stepwise.accrue(self)
            yield stepwise.write(self, samples, clock)
            clock = yield from (barrier.next_chosen(clock) if some else barrier.next_step(clock))


class Server(barrier.Barrier):
    @classmethod
    def of(cls, options: Options) -> type[ShardSide]:
        return Chosen if options.backup_workers else cls


class FirstOnes(Counting):
    """Which gradients count."""

    options: Options

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | None:
        idle = frozenset(slot for slot, samples in came.items() if not samples)
        gradients = came.keys() - idle
        most = max(1, len(members) - self.options.backup_workers)
        if len(gradients) < min(most, len(members - idle)):
            return None
        chosen = sorted(gradients, key=lambda slot: (self.counted[slot], slot))[:most]
        self.count(chosen)
        return idle.union(chosen)


def check(job: JobFile) -> list[Fault]:
    backups = job.algorithm.options["backup_workers"]
    if backups < job.workers.count:
        return []
    what = f"of {job.workers.count} workers {backups} are not waited for"
    where = ("algorithm", "backup_workers")
    return [(where, what, f"use {job.workers.count - 1} or less, or more workers")]


SYNC = Method(Options=Options, replica=Replica, shard=Server, lead=FirstOnes, check=check)


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
