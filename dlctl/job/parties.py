"""The parties of split learning, as the job file lists them: their workers, tasks, files and hosts.

The workers of the clients come first, in the order of the job file; the head's worker is the last
one. `server-0` holds what the clients train, on the host of the first client, and `server-1` what
the head trains, on the head's host. What a worker may see and do follows from its part
(`dlctl/model/parts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlctl.job.config import CLIENT, HEAD, HOME, JobFile, Party

ROLES = (CLIENT, HEAD)
"""In the order of their workers and of their servers."""


def workers(parties: Sequence[Party]) -> list[Party]:
    """The party of each worker, by slot."""
    found = [party for role in ROLES for party in parties if party.role == role]
    return [party for party in found for _ in range(party.workers)]


def roles(job: JobFile) -> list[str]:
    """The role of each worker, by slot; "": the job has no parties."""
    if not job.parties:
        return [""] * job.workers.count
    return [party.role for party in workers(job.parties)]


def party_of(job: JobFile, slot: int) -> Party | None:
    """The party of a worker; None: the job has none."""
    return workers(job.parties)[slot] if job.parties else None


def job_of(job: JobFile, slot: int) -> JobFile:
    """The job as a worker of this slot reads it: with the task and the weights of its party."""
    if (party := party_of(job, slot)) is None:
        return job
    return replace(job, job=replace(job.job, task=party.task, weights=party.weights))


def files(job: JobFile) -> list[str]:
    """The files of the user's that the workers run: one, or that of each party."""
    return [party.task.rpartition(":")[0] for party in job.parties] or [job.job.file]


def hosts_of(job: JobFile) -> dict[str, str]:
    """Server or worker -> the name of its host in the job file, for a job with parties; "": this
    machine.
    """
    every = workers(job.parties)
    first = {role: next(party for party in every if party.role == role) for role in ROLES}
    found = {f"server-{number}": _host(first[role]) for number, role in enumerate(ROLES)}
    return found | {f"worker-{slot}": _host(party) for slot, party in enumerate(every)}


def _host(party: Party) -> str:
    return "" if party.host == HOME else party.host
