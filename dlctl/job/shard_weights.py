"""The weights by which a job's model is cut into shards: `[servers] layout`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dlctl.job import placement
from dlctl.job.config import JobFile
from dlctl.job.link_shares import HostLink, Kind, shares
from dlctl.util import units

EQUAL = "equal"
KINDS: dict[str, Kind] = {"bandwidth": "each way", "shared-bandwidth": "shared"}
ELEMENTS_MIN = 256
"""A smaller part of the model costs its messages, and saves nothing: the others take it over."""
LAYOUT = ("servers", "layout")
Fault = tuple[tuple[str, ...], str, str]


def of_job(job: JobFile, size: int) -> list[float]:
    """The weight of each server's shard, for a model of so many elements; 0: it has nothing. They
    are alike until the bandwidths of all hosts are known.
    """
    count = job.servers.count
    if job.servers.layout == EQUAL:
        return [1.0] * count
    found, placed = of_hosts(job), placement.place(job)
    if not found:
        return [1.0] * count
    servers = [placed[f"server-{index}"] for index in range(count)]
    return of_links(found, servers, job.servers.layout, size)


def of_links(
    links: Mapping[str, HostLink], servers: Sequence[str], layout: str, size: int
) -> list[float]:
    """The weight of each server's shard. links: agent -> its host's. servers: their agents."""
    best = shares(list(links.values()), KINDS[layout], least=ELEMENTS_MIN / max(size, 1))
    on_host = Counter(servers)
    each = {agent: share / max(on_host[agent], 1) for agent, share in zip(links, best, strict=True)}
    return [each[agent] for agent in servers]


def of_hosts(job: JobFile) -> dict[str, HostLink]:
    """Agent -> the link of its host, of all that have daemons; {}: of some the job states none."""
    hosts, placed = placement.agents(job.places), placement.place(job)
    servers, workers = Counter[str](), Counter[str]()
    for name, agent in placed.items():
        (servers if name.startswith("server-") else workers)[agent] += 1
    stated = {agent: hosts[agent].bandwidth for agent in sorted({*placed.values()})}
    if not all(stated.values()):
        return {}
    return {
        agent: HostLink(units.parse_rate(rate) or 0.0, workers[agent], servers[agent] > 0)
        for agent, rate in stated.items()
    }


def faults(job: JobFile, *, measures: bool) -> Iterator[Fault]:
    """What the layout lacks: (key, what is wrong, what to write instead). measures: the method
    allows that the model is cut anew, by measured bandwidths.
    """
    if job.servers.layout == EQUAL:
        return
    hosts, placed = placement.agents(job.places), placement.place(job)
    if not job.servers.count:
        yield LAYOUT, "there are no servers", "remove it"
    elif not job.places:
        what = "it follows the bandwidths of hosts, and all daemons are on this machine"
        yield LAYOUT, what, f'add [[hosts]], or use "{EQUAL}"'
    elif measures and job.servers.recut_s:
        return
    elif lacking := [a for a in dict.fromkeys(placed.values()) if not hosts[a].bandwidth]:
        names = ", ".join(hosts[agent].name or "this machine" for agent in lacking[:8])
        what = f"these hosts have no bandwidth: {names}"
        yield LAYOUT, what, 'add bandwidth = "100Mbit/s" to them in [[hosts]]'
