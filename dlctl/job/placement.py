"""Which agent starts which daemon.

`agent-0` is on the coordinator's machine and always exists: it restarts a coordinator that has
died. Every other host has its own agent, agent-1, agent-2 ... in the order of the
job file, or in that of the launcher if it brings the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlctl.job import parties
from dlctl.job.config import Host, JobFile
from dlctl.util.names import HOME_AGENT


def agents(hosts: Sequence[Host]) -> dict[str, Host]:
    """Agent -> its host, including agents without daemons."""
    found = {HOME_AGENT: Host()}
    remote = 0
    for host in hosts:
        if host.is_other:
            remote += 1
            found[f"agent-{remote}"] = host
        else:
            found[HOME_AGENT] = host
    return found


def place(job: JobFile) -> dict[str, str]:
    """Daemon -> the agent that starts it, for all servers and workers of a job."""
    if job.parties:
        agent_of = {host.name: agent for agent, host in agents(job.places).items()}
        return {name: agent_of[host] for name, host in parties.hosts_of(job).items()}
    hosts = _with_daemons(job)
    workers = _spread(job.workers.count, {name: host.workers for name, host in hosts.items()})
    servers = _spread(
        job.servers.count,
        {
            name: 0 if is_beside(job) and name not in workers else host.servers
            for name, host in hosts.items()
        },
    )
    placed = {f"server-{i}": name for i, name in enumerate(servers)}
    return placed | {f"worker-{i}": name for i, name in enumerate(workers)}


def is_beside(job: JobFile) -> bool:
    """Whether only hosts with workers have servers, and all of these."""
    return job.servers.placement == "workers"


def servers_beside(job: JobFile) -> int:
    """How many servers the hosts with workers have if the job file states no number."""
    hosts = _with_daemons(job)
    workers = _spread(job.workers.count, {name: host.workers for name, host in hosts.items()})
    of_each = 1 if job.has_other_hosts else job.workers.count
    found = (hosts[name].servers for name in dict.fromkeys(workers))
    return sum(of_each if number is None else number for number in found)


def takes_workers(job: JobFile) -> dict[str, bool]:
    """The agents that workers may be added to, and whether the job allows workers there: a host
    whose `workers` is 0 is for servers, as long as there is another one.
    """
    return {name: host.workers != 0 for name, host in _with_daemons(job).items()}


def _with_daemons(job: JobFile) -> dict[str, Host]:
    """The hosts that run servers and workers: without the coordinator's machine if all hosts of the
    job are other machines."""
    hosts = agents(job.places)
    brought = job.launcher.places
    if brought and all(host.servers == 0 for host in brought):
        hosts[HOME_AGENT] = Host(workers=0)  # The hosts come and go: servers are not there.
    elif job.places and all(host.is_other for host in job.places):
        del hosts[HOME_AGENT]
    return hosts


def _spread(count: int, wanted: Mapping[str, int | None]) -> list[str]:
    """The agent of each: the numbers of hosts that state one, the rest evenly over the others."""
    left = count - sum(number or 0 for number in wanted.values())
    free = [name for name, number in wanted.items() if number is None]
    shares = {
        name: number if number is not None else _share(left, len(free), free.index(name))
        for name, number in wanted.items()
    }
    return [name for name, number in shares.items() for _ in range(max(0, number))][:count]


def _share(count: int, parts: int, index: int) -> int:
    return count // parts + (index < count % parts)
