"""Checks of [[parties]], and the sections that follow from them.

The parties say how many workers and servers there are, where these run, and what each runs: so the
job file says none of that elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlctl.algorithms.base import Method
from dlctl.job import parties
from dlctl.job.config import CLIENT, HEAD, HOME, JobFile, Servers
from dlctl.jobfile.faults import Fault
from dlctl.jobfile.positions import KeyPath, get
from dlctl.stores import addresses

AT = ("parties",)
Verdict = tuple[str, str]
"""The fault and a suggestion; "" if there is none."""


def are_given(document: dict[str, Any]) -> bool:
    return isinstance(document.get("parties"), list) and bool(document["parties"])


def translate(document: dict[str, Any]) -> list[Fault]:
    """Fill in what follows from the parties. Returns the keys that must not be there."""
    if not are_given(document):
        return []
    tables = [table for table in document["parties"] if isinstance(table, dict)]
    found = []
    for path, instead in (
        (("job", "task"), "each of [[parties]] has its task"),
        (("job", "script"), "each of [[parties]] has a task, no training loop"),
        (("job", "module"), "each of [[parties]] has a task, no training loop"),
        (("job", "weights"), "write it into [[parties]]"),
        (("workers", "count"), "write workers into [[parties]]"),
        (("servers", "count"), "each side of the parties has one server"),
    ):
        if get(document, path) is not None:
            what = "with [[parties]] it is not written here"
            found.append(Fault(path, what, f"remove it: {instead}", at_key=True))
    mine = [table for table in tables if table.get("role") == CLIENT]
    counts = [table.get("workers", 1) for table in mine]
    follow: dict[str, dict[str, Any]] = {
        "job": {"task": next((t["task"] for t in (*mine, *tables) if "task" in t), "")},
        "workers": {"count": 1 + sum(n for n in counts if type(n) is int and n > 0)},
        "servers": {"count": len(parties.ROLES)},
    }
    for section, keys in follow.items():
        table = document.setdefault(section, {})
        if isinstance(table, dict):
            table |= keys
    return found


def check(
    document: dict[str, Any],
    directory: Path,
    check_task: Callable[[str, Path], Verdict],
    check_weights: Callable[[str, Path], Verdict],
) -> Iterator[Fault]:
    """Faults of the parties themselves; the schema reports values of a wrong type."""
    if not are_given(document):
        return
    tables = [(i, t) for i, t in enumerate(document["parties"]) if isinstance(t, dict)]
    yield from _check_names(tables)
    yield from _check_hosts(document, tables)
    for i, table in tables:
        for key, verdict in (("task", check_task), ("weights", check_weights)):
            text = table.get(key)
            if isinstance(text, str) and (text or key == "task"):
                message, suggestion = verdict(text, directory)
                if message:
                    yield Fault((*AT, i, key), message, suggestion or "a path beside the job file")
        if table.get("role") == HEAD and table.get("workers", 1) != 1:
            what = "the head has one worker, which steps for all clients"
            yield Fault((*AT, i, "workers"), what, "remove it")
    roles = Counter(r for _, table in tables if isinstance(r := table.get("role"), str))
    yield from _check_roles(roles, tables)


def _check_names(tables: list[tuple[int, dict[str, Any]]]) -> Iterator[Fault]:
    first: dict[Any, int] = {}
    for i, table in tables:
        name = table.get("name")
        if isinstance(name, str) and first.setdefault(name, i) != i:
            what = f'parties {first[name] + 1} and {i + 1} share the name "{name:.64}"'
            yield Fault((*AT, i, "name"), what, "give each its own")


def _check_hosts(
    document: dict[str, Any], tables: list[tuple[int, dict[str, Any]]]
) -> Iterator[Fault]:
    hosts = document.get("hosts")
    rows = [host for host in hosts if isinstance(host, dict)] if isinstance(hosts, list) else []
    known = [HOME, *(host["ssh"] for host in rows if host.get("ssh"))]
    for i, table in tables:
        host = table.get("host")
        if host is None:
            what = f'party "{table.get("name", i + 1)!s:.64}" has no host'
            instead = f'add host = "{known[-1]}", or the ssh of another of [[hosts]]'
            yield Fault((*AT, i, "host"), what, instead)
        elif isinstance(host, str) and host not in known:
            listed = ", ".join(f'"{name}"' for name in known)
            yield Fault((*AT, i, "host"), "is none of [[hosts]]", f"there are {listed}")
    for number, host in enumerate(rows):
        for key in ("servers", "workers"):
            if key in host:
                what = "with [[parties]] each of them says its host"
                yield Fault(("hosts", number, key), what, "remove it", at_key=True)
    of_clients = [t.get("host") for _, t in tables if t.get("role") == CLIENT]
    of_heads = [(i, t.get("host")) for i, t in tables if t.get("role") == HEAD]
    for i, host in of_heads:
        if host == HOME and any(other != HOME for other in of_clients):
            what = (
                "checkpoints have the parameters of all parties and are stored on this machine, "
                "which would be the head's"
            )
            yield Fault((*AT, i, "host"), what, "start the run on the machine of a client")


def _check_roles(roles: Counter[str], tables: list[tuple[int, dict[str, Any]]]) -> Iterator[Fault]:
    last = max((i for i, _ in tables), default=0)
    if roles[HEAD] and not roles[CLIENT]:
        yield Fault((*AT, last), "a head without clients", 'add a party with role = "client"')
    elif roles[CLIENT] and not roles[HEAD]:
        yield Fault((*AT, last), "clients without a head", 'add a party with role = "head"')
    for i, table in tables if roles[HEAD] > 1 else ():
        if table.get("role") == HEAD:
            yield Fault((*AT, i, "role"), f"{roles[HEAD]} parties are heads", "one has to be")


def located(job: JobFile, home: Path) -> JobFile:
    """The job with the full paths of the parties' files. home: the directory of the job file."""
    found = [
        dataclasses.replace(
            party,
            task=str(home / party.task),
            weights=addresses.located(party.weights, home),
        )
        for party in job.parties
    ]
    return dataclasses.replace(job, parties=tuple(found))


def faults(job: JobFile, method: Method) -> Iterator[tuple[KeyPath, str, str]]:
    """What does not go with parties, or with a method that needs them."""
    name = job.algorithm.name
    if job.parties and not method.shape.is_divided:
        what = f"{name} has no parties: every worker of it has the whole model"
        yield AT, what, 'use [algorithm] name = "split", or remove [[parties]]'
    if not job.parties and method.shape.is_divided:
        what = f"{name} divides the model among parties, and the job has none"
        instead = "add [[parties]]: `dlctl init --example split` has two"
        yield ("algorithm", "name"), what, instead
    if not job.parties:
        return
    if job.gradient.accumulate != 1:
        what = "the head makes a step with every batch"
        yield ("gradient", "accumulate"), what, "use 1, and a larger batch_size"
    for key, plain in (("clip_norm", 0.0), ("precision", "fp32"), ("compile", False)):
        if getattr(job.gradient, key) != plain:
            what = "it would be the clients' alone: the head computes as its task says"
            yield ("gradient", key), what, "remove it"
    plain_servers = Servers()
    for key in ("placement", "layout", "weights"):
        if getattr(job.servers, key) != getattr(plain_servers, key):
            what = "each side of the parties has one server, with its part of the model"
            yield ("servers", key), what, "remove it"
    if job.average.evaluate:
        what = "the head answers evaluations with its current values, not with their average"
        yield ("average", "evaluate"), what, "remove it; exports have the average of both sides"
    yield from _shared_folders(job)
    if job.workers.batch_size == "auto":
        what = "the batch size is found with one process, and a client has a part of the model"
        yield ("workers", "batch_size"), what, "use a number"
    if job.parameters:
        what = "the groups would have to match the parameters of each party"
        yield ("parameters",), what, "remove it; weights with requires_grad = False are not split"
    if job.replica.ranks * job.replica.hogwild * job.workers.processes > 1:
        yield ("replica",), "a worker of a party is one process", "remove it"
    if job.takes_guests or job.workers.min is not None:
        key = "max" if job.takes_guests else "min"
        what = "the workers of a run with parties are those of [[parties]]"
        yield ("workers", key), what, "remove it"
    if job.launcher.places:
        yield ("launcher", "name"), "parties name their hosts", "use [[hosts]] with ssh"


def _shared_folders(job: JobFile) -> Iterator[tuple[KeyPath, str, str]]:
    """Folders whose files would be copied to the host of another party."""
    for i, party in enumerate(job.parties):
        mine = Path(party.task.rpartition(":")[0]).parent
        for other in job.parties:
            its = Path(other.task.rpartition(":")[0]).parent
            if other.host != party.host and its.is_relative_to(mine):
                what = f'the files of party "{other.name}", in the same folder or below it, would '
                what += f"be copied to the host of this one, {party.host}"
                yield (*AT, i, "task"), what, "give each party a folder of its own"
                break
