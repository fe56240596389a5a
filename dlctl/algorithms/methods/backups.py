"""Synchronous SGD with backup workers. Chen, Pan et al., "Revisiting Distributed Synchronous SGD",
2016, Alg. 3 and 4.

Of N + b replicas, b = `backup_workers`, a step waits for the first N gradients only, and divides by
the samples of these:

    w_{t+1} = w_t - eta * sum n_i g_i / sum n_i         over the first N that arrive for step t

The coordinator decides which N for all shards (`quorum.py`), so a step takes one more round trip.
All other gradients of step t are LATE: they are dropped, never mixed into a later step, and do not
count as trained. Their replicas continue from the newest parameters. With b = 0 no decision is
needed: it is the barrier of `sync.py`.

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
from typing import Annotated

from annotated_types import Ge

from dlctl.algorithms import barrier
from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, ShardSide
from dlctl.algorithms.methods import sync
from dlctl.algorithms.methods.quorum import Chosen, Counting
from dlctl.job.config import JobFile


@dataclass(slots=True, kw_only=True)
class Options(sync.Options):
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
            samples = yield from sync.accrue(self)
            yield sync.write(self, samples, clock)
            clock = yield from (barrier.next_chosen(clock) if some else barrier.next_step(clock))


class Server(sync.Barrier):
    @classmethod
    def of(cls, options: Options) -> type[ShardSide]:
        return Chosen if options.backup_workers else cls


class FirstOnes(Counting):
    """Decides that the first gradients of a step count, as many as the job needs."""

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
