"""Checks of the hosts of a job: names, addresses, and the number of daemons on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dlctl.job.config import Servers, Workers
from dlctl.jobfile.faults import Fault
from dlctl.jobfile.positions import KeyPath, get
from dlctl.util import units
from dlctl.util.hostnames import FULL_PATH, address_fault, ssh_fault


def check(document: dict[str, Any]) -> Iterator[Fault]:
    """All faults of the section [[hosts]]; the schema reports values of a wrong type."""
    hosts = document.get("hosts")
    if not isinstance(hosts, list):
        return
    tables = [(("hosts", i), host) for i, host in enumerate(hosts) if isinstance(host, dict)]
    seen: set[str] = set()
    if not tables:
        return
    for path, host in tables:
        yield from _check_host(path, host)
        name = host.get("ssh", "")
        if isinstance(name, str) and name in seen:
            what = f'"{name}" is listed twice' if name else "this machine is listed twice"
            yield Fault((*path, "ssh") if name else path, what, "give it more servers or workers")
        seen.add(name if isinstance(name, str) else "")
    yield from _check_counts(document, tables)


def _check_host(path: KeyPath, host: dict[str, Any]) -> Iterator[Fault]:
    checks = {"ssh": ssh_fault, "data": address_fault, "bind": address_fault}
    for key, fault in checks.items():
        text = host.get(key)
        if isinstance(text, str) and text and (message := fault(text)):
            yield Fault((*path, key), message)
    for key in ("python", "dir"):
        text = host.get(key)
        if isinstance(text, str) and text and not FULL_PATH.fullmatch(text):
            yield Fault((*path, key), "must be a full path on that host")
    rate = host.get("bandwidth")
    if isinstance(rate, str) and rate and (message := _rate_fault(rate)):
        yield Fault((*path, "bandwidth"), message)
    if "batch_size" in host and host.get("workers") == 0:
        yield Fault((*path, "batch_size"), "has a meaning only with workers here", at_key=True)
    for key in ("python", "dir"):
        if host.get(key) and not host.get("ssh"):
            yield Fault((*path, key), "has a meaning only with ssh", at_key=True)


def _rate_fault(text: str) -> str:
    """What is wrong with the rate of a link; "" if nothing is."""
    try:
        return "" if units.parse_rate(text) else 'a link has a rate, as "100Mbit/s"'
    except ValueError as error:
        return str(error)


def _check_counts(
    document: dict[str, Any], tables: Sequence[tuple[KeyPath, dict[str, Any]]]
) -> Iterator[Fault]:
    """The hosts' numbers have to match the total number of servers and workers."""
    for section, default in (("servers", Servers().count), ("workers", Workers().count)):
        count = get(document, (section, "count"))
        if section == "servers" and count is None and _is_beside(document):
            continue  # It follows from these numbers.
        count = count if type(count) is int else default
        asked = [(path, host.get(section)) for path, host in tables]
        numbers = [number for _, number in asked if type(number) is int]
        if min(numbers, default=0) < 0:
            continue  # The schema reports it.
        if sum(numbers) > count or (len(numbers) == len(tables) and sum(numbers) != count):
            path = next((*path, section) for path, number in asked if type(number) is int)
            message = f"the hosts ask for {sum(numbers)} {section}; count in [{section}] is {count}"
            yield Fault(path, message)


def _is_beside(document: dict[str, Any]) -> bool:
    return bool(get(document, ("servers", "placement")) == "workers")
