"""Findings about addresses, ports, firewalls and the links between hosts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlctl.health.findings import FAULT, LINKS, OK, WARNING, Facts, Finding, duration_text
from dlctl.health.needs import CONTROL, HostNeed
from dlctl.job.config import JobFile
from dlctl.util import hints
from dlctl.util.text import plural
from dlctl.util.units import short_rate

COMMAND_CHARS_MAX = 120


def keys(job: JobFile, place: str) -> Finding | None:
    """Whether connections to a port need a key; None: the job uses no ports."""
    if not job.uses_tcp:
        return None
    if job.is_encrypted:
        return Finding(place, "keys", OK, "every TCP connection is encrypted and authenticated")
    return Finding(
        place,
        "keys",
        WARNING,
        "none: every user of this machine can reach the ports of the run",
        'remove encryption = "none" in [network]',
    )


def firewall(need: HostNeed, facts: Facts) -> Finding:
    """The firewall that was found; only a connection shows whether it blocks the run."""
    found = facts["firewall"]
    return Finding(need.name, "firewall", OK, str(found["words"]), facts=found)


# ---------------------------------------------------------------- listening


def listening(
    need: HostNeed, facts: Facts, places: Sequence[Facts], run_of: Mapping[int, str]
) -> Iterator[Finding]:
    """`places`: results of the probe's attempts; `run_of`: pid -> running run of the same job."""
    for place in places:
        daemon = place["name"]
        where = f"{place['address']}, port {place['port'] or 'any'}"
        if "told" in place:
            advertised = (
                "" if place["told"] == place["address"] else f", advertised as {place['told']}"
            )
            yield Finding(need.name, daemon, OK, f"can listen at {where}{advertised}", facts=place)
        else:
            yield _cannot_listen(need, facts, place, where, run_of)


def _cannot_listen(
    need: HostNeed, facts: Facts, place: Facts, where: str, run_of: Mapping[int, str]
) -> Finding:
    daemon, kind = place["name"], place["kind"]
    if kind == "taken":
        return _taken(need, place, run_of)
    if kind == "not ours":
        own = "; ".join(
            f"{name} {', '.join(found)}" for name, found in facts["addresses"].items() if found
        )
        key = "address in [network]" if daemon == CONTROL else "data (or bind) in [[hosts]]"
        text = f"{place['address']} is not an address of this host; it has {own}"
        fix = f"set {key} to one of these"
        if not need.is_here:
            fix += "; behind NAT, set data to the address that others use, bind to its own"
        return Finding(need.name, daemon, FAULT, text, fix, place)
    if kind == "not permitted":
        text = f"may not listen at {where}: {place['words']}"
        fix = "ports below 1024 are for root: set port in [network] to a higher one"
        return Finding(need.name, daemon, FAULT, text, fix, place)
    text = f"cannot listen at {where}: {place['words']}"
    return Finding(need.name, daemon, FAULT, text, "set data or bind in [[hosts]]", place)


def _taken(need: HostNeed, place: Facts, run_of: Mapping[int, str]) -> Finding:
    owner, port = place["owner"], place["port"]
    pid = owner.get("pid")
    if pid in run_of:
        text = f"port {port} is held by {run_of[pid]}, which is running"
        return Finding(need.name, place["name"], OK, text, facts=place)
    if not owner:
        text = f"port {port} is taken by a process that this user may not see"
        look = f"sudo ss -ltnp 'sport = :{port}'"
        fix = hints.either(hints.command(look, "shows the process"), "another port in [network]")
        return Finding(need.name, place["name"], FAULT, text, fix, place)
    command = shlex.join(owner["command"])[:COMMAND_CHARS_MAX]
    text = f"port {port} is taken by pid {pid}: {command}"
    fix = f"end it there (kill {pid}), or set another port in [network]"
    if "daemons." in command:
        fix = "it is another run: see dlctl ps on that host; or set another port in [network]"
    return Finding(need.name, place["name"], FAULT, text, fix, place)


# ---------------------------------------------------------------- links


def link(
    source: HostNeed,
    target: HostNeed,
    target_facts: Facts,
    place: Facts,
    reached: Facts,
    fixed_port: bool,
) -> Finding:
    """A finding about one host's link to a daemon's `place` on another."""
    subject = f"{source.name} -> {target.name}"
    where = f"{place['name']} at {place['told']}, port {place['port']}"
    facts = {**reached, "daemon": place["name"], "address": place["told"], "port": place["port"]}
    if "kind" not in reached:
        return Finding(LINKS, subject, OK, f"{place['name']}: {_speed(reached)}", facts=facts)
    key = "address in [network]" if place["name"] == CONTROL else f"data of {target.name}"
    door = _open_door(target_facts, place["port"], source.name, fixed_port)
    texts = {
        "refused": (
            f"{where}: connection refused, although a probe listens there: a firewall rejects it, "
            "or this address leads to another machine",
            f"{door}; or correct {key}",
        ),
        "silent": (
            f"{where}: a firewall drops packets to this port ({reached.get('words')})",
            door,
        ),
        "dark": (
            f"{where}: {reached.get('words')}: the address is wrong, or a firewall drops all "
            "packets",
            f"correct {key}, to an address that {source.name} can reach; or {door}",
        ),
        "no route": (
            f"{where}: no route ({reached.get('words')})",
            f"correct {key}, to an address that {source.name} can reach: ip route get "
            f"{place['told']}",
        ),
        "unknown name": (
            f"{where}: {source.name} cannot resolve this name ({reached.get('words')})",
            f"correct {key}, to an IP address or a name that every host resolves",
        ),
    }
    other = (
        f"{where}: another process answers there ({reached.get('words')})",
        f"correct {key}: it leads to another machine, or a proxy between them interferes",
    )
    found, fix = texts.get(str(reached["kind"]), other)
    return Finding(LINKS, subject, FAULT, found, fix, facts)


def not_reached(source: HostNeed, target: HostNeed) -> Finding:
    """A link that was not measured before the listeners' timeout of a minute."""
    fix = f"dlctl doctor JOBFILE --host {target.name if source.is_here else source.name}"
    subject = f"{source.name} -> {target.name}"
    return Finding(LINKS, subject, WARNING, "not measured: out of time", fix)


def _speed(reached: Facts) -> str:
    text = f"round trip {duration_text(reached['round_trip_s'])}"
    up, down = (reached.get(f"{way}_bytes_per_s") for way in ("up", "down"))
    if up and down:
        text += f", {short_rate(up)} there, {short_rate(down)} back"
    return text


def _open_door(facts: Facts, port: int, source: str, fixed_port: bool) -> str:
    """How to open the port, as a command of the firewall that was found."""
    if not fixed_port:
        return (
            "set port in [network], so that the ports are always the same, and open these there "
            "(dlctl man hosts: ADDRESSES AND PORTS)"
        )
    commands: dict[str, Any] = {
        "ufw": f"ufw allow {port}/tcp",
        "firewalld": f"firewall-cmd --permanent --add-port={port}/tcp && firewall-cmd --reload",
        "nft": f"nft insert rule inet TABLE CHAIN tcp dport {port} accept",
        "iptables": f"iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
    }
    known = commands.get(str(facts.get("firewall", {}).get("family", "")))
    return f"open port {port} there for {source}" + (f": {known}" if known else "")


def count_text(faults: int, warnings: int) -> str:
    """The number of faults and warnings: "2 faults, 1 warning"; "" if there are none."""
    parts = [plural(faults, "fault")] if faults else []
    return ", ".join(parts + ([plural(warnings, "warning")] if warnings else []))
