"""Checks of [servers]: servers beside workers, and the servers' shares of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dlctl.job import placement, shard_weights
from dlctl.job.config import JobFile
from dlctl.jobfile.positions import KeyPath
from dlctl.util.text import plural

SERVERS_MAX = 256
"""As the schema has it for a number in the file."""
PORT_MAX = 65535
PLACEMENT: KeyPath = ("servers", "placement")
COUNT: KeyPath = ("servers", "count")


def counted(job: JobFile) -> JobFile:
    """The job, with as many servers as its hosts have beside workers."""
    if not placement.is_beside(job):
        return job
    return replace(job, servers=replace(job.servers, count=placement.servers_beside(job)))


def faults(job: JobFile) -> Iterator[tuple[KeyPath, str, str]]:
    """(key, what is wrong with it, what to write instead) of a job that is valid otherwise."""
    if placement.is_beside(job):
        yield from _beside(job)
    weights, count = job.servers.weights, job.servers.count
    if weights and len(weights) != count:
        what = f"{plural(len(weights), 'weight')} for {plural(count, 'server')}"
        yield ("servers", "weights"), what, "write one for each server, or remove it"
    if weights and job.servers.layout != shard_weights.EQUAL:
        what = f'layout = "{job.servers.layout}" has weights of its own'
        yield ("servers", "weights"), what, "remove one of the two"


def _beside(job: JobFile) -> Iterator[tuple[KeyPath, str, str]]:
    count = job.servers.count
    if not count:
        yield PLACEMENT, f"{job.algorithm.name} has no servers", "remove it"
        return
    if count > SERVERS_MAX:
        what = f"{count} servers beside workers; at most {SERVERS_MAX} are possible"
        yield PLACEMENT, what, f"set count in [servers] to {SERVERS_MAX} or less"
        return
    if job.network.port and job.network.port + count > PORT_MAX:
        what = f"{count} servers take the ports after it; the last port is {PORT_MAX}"
        yield ("network", "port"), what, "use a lower one"
    placed = placement.place(job)
    workers, servers = (
        [agent for name, agent in placed.items() if name.startswith(role)]
        for role in ("worker-", "server-")
    )
    if found := [*_of_hosts(job, workers)]:
        yield from found
        return
    hosts = len(set(workers))
    if count < hosts or len(servers) != count:
        has = f"the {plural(hosts, 'host')} with workers have {len(servers)} servers"
        what = f"{has}, and count is {count}" if count >= hosts else f"{hosts} hosts have workers"
        yield COUNT, what, "remove it: it follows from the hosts"


def _of_hosts(job: JobFile, workers: Sequence[str]) -> Iterator[tuple[KeyPath, str, str]]:
    """workers: the agent of each."""
    agents = {id(host): name for name, host in placement.agents(job.places).items()}
    for index, host in enumerate(job.hosts):
        has_workers = agents[id(host)] in workers
        if host.servers and not has_workers:
            what = 'placement = "workers": a host without workers has no servers'
            yield ("hosts", index, "servers"), what, "remove it"
        elif host.servers == 0 and has_workers:
            what = 'placement = "workers": a host with workers serves a part of the model'
            yield ("hosts", index, "servers"), what, "use 1 or more, or remove it"
