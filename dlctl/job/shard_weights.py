"""The weights by which a job's model is cut into shards: `[servers] layout`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

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


class HostLinks(NamedTuple):
    """The hosts with daemons, by their agents."""

    agents: tuple[str, ...]
    links: tuple[HostLink, ...]
    servers: Counter[str]
    """Agent -> servers on its host."""


def of_job(job: JobFile, size: int) -> list[float]:
    """The weight of each server's shard, for a model of so many elements; 0: it has nothing."""
    count = job.servers.count
    if job.servers.layout == EQUAL:
        return [1.0] * count
    links, placed = of_links(job), placement.place(job)
    of_host = shares(links.links, KINDS[job.servers.layout], least=ELEMENTS_MIN / max(size, 1))
    each = {
        agent: share / links.servers[agent]
        for agent, share in zip(links.agents, of_host, strict=True)
        if links.servers[agent]
    }
    return [each[placed[f"server-{index}"]] for index in range(count)]


def of_links(job: JobFile) -> HostLinks:
    """The hosts of a job whose layout is by their bandwidths; these are known."""
    hosts, placed = placement.agents(job.places), placement.place(job)
    servers, workers = Counter[str](), Counter[str]()
    for name, agent in placed.items():
        (servers if name.startswith("server-") else workers)[agent] += 1
    names = tuple(sorted({*placed.values()}))
    links = tuple(
        HostLink(units.parse_rate(hosts[name].bandwidth) or 0.0, workers[name], servers[name] > 0)
        for name in names
    )
    return HostLinks(names, links, servers)


def faults(job: JobFile) -> Iterator[Fault]:
    """What the layout lacks: (key, what is wrong, what to write instead)."""
    if job.servers.layout == EQUAL:
        return
    hosts, placed = placement.agents(job.places), placement.place(job)
    if not job.servers.count:
        yield LAYOUT, "there are no servers", "remove it"
    elif not job.places:
        what = "it follows the bandwidths of hosts, and all daemons are on this machine"
        yield LAYOUT, what, f'add [[hosts]], or use "{EQUAL}"'
    elif lacking := [a for a in dict.fromkeys(placed.values()) if not hosts[a].bandwidth]:
        names = ", ".join(hosts[agent].name or "this machine" for agent in lacking[:8])
        what = f"these hosts have no bandwidth: {names}"
        yield LAYOUT, what, 'add bandwidth = "100Mbit/s" to them in [[hosts]]'
