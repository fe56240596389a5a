"""The parties of split learning: which daemons each of them has, and what each may see.

The workers of the clients come first, in the order of the job file; the head's worker is the last
one. `server-0` holds what the clients train, on the host of the first client, and `server-1` what
the head trains, on the head's host. So a shard never has parameters of both sides, and a worker
knows the servers of its own side only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlctl.job.config import CLIENT, HEAD, HOME, JobFile, Party

SIDES = (CLIENT, HEAD)
"""The roles, in the order of their servers and of their parameters in the layout of the run."""


def clients(parties: Sequence[Party]) -> list[Party]:
    return [party for party in parties if party.role == CLIENT]


def head(parties: Sequence[Party]) -> Party:
    """The party with the role of the head; a valid job with parties has one."""
    return next(party for party in parties if party.role == HEAD)


def workers(parties: Sequence[Party]) -> list[Party]:
    """The party of each worker, by slot."""
    found = [party for party in clients(parties) for _ in range(party.workers)]
    return [*found, head(parties)] if found else []


def head_slot(job: JobFile) -> int:
    """The slot of the head's worker; -1: the job has no parties."""
    return len(workers(job.parties)) - 1


def is_head(job: JobFile, slot: int) -> bool:
    return slot >= 0 and slot == head_slot(job)


def side_of(job: JobFile, slot: int) -> int:
    """The side of a worker, which is the number of its server: 0 of a client, 1 of the head."""
    return int(is_head(job, slot))


def role_of(job: JobFile, slot: int) -> str:
    """The role of a worker; "": the job has no parties."""
    return SIDES[side_of(job, slot)] if job.parties else ""


def slots_of(job: JobFile, shard: int, slots: Sequence[int]) -> tuple[int, ...]:
    """Those of the slots that may know this server: all of them without parties."""
    if not job.parties:
        return tuple(slots)
    return tuple(slot for slot in slots if side_of(job, slot) == shard)


def job_of(job: JobFile, slot: int) -> JobFile:
    """The job as a worker of this slot reads it: with the task and the weights of its party."""
    if not job.parties:
        return job
    party = workers(job.parties)[slot]
    return replace(job, job=replace(job.job, task=party.task, weights=party.weights))


def hosts_of(job: JobFile) -> dict[str, str]:
    """Server or worker -> the name of its host in the job file; "": this machine."""
    of_workers = [_host(party) for party in workers(job.parties)]
    found = {"server-0": of_workers[0], "server-1": of_workers[-1]}
    return found | {f"worker-{slot}": host for slot, host in enumerate(of_workers)}


def _host(party: Party) -> str:
    return "" if party.host == HOME else party.host
