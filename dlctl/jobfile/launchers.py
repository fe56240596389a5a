"""The section [launcher]: its older forms, its checks, and what a job needs of its launcher.

The one place that knows the older forms:

    a section that is called as a launcher   [launcher] with that name, and the same keys
    [[hosts]] with ssh                       [launcher] name = "ssh"
    neither                                  [launcher] name = "local"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from dlctl import registry
from dlctl.job.config import Choice, JobFile, Launch
from dlctl.jobfile.faults import Fault
from dlctl.jobfile.positions import KeyPath
from dlctl.launch import launcher

SECTION = "launcher"
NAME: KeyPath = (SECTION, "name")
LOCAL, LISTED = "local", "ssh"
"""What starts the agents without a section [launcher]: without and with names in [[hosts]]."""
_KNOWN = {field.name for field in dataclasses.fields(JobFile)}


class LauncherForm(NamedTuple):
    """How the job file names its launcher."""

    section: KeyPath
    """What [launcher] is called there."""
    faults: list[Fault]

    def as_written(self, faults: list[Fault]) -> list[Fault]:
        """Faults of [launcher], at the keys that the file has instead."""
        if self.section == (SECTION,):
            return faults
        return [fault._replace(path=self._path(fault.path)) for fault in faults]

    def _path(self, path: KeyPath) -> KeyPath:
        if path[:1] != (SECTION,):
            return path
        return self.section if path == NAME else (*self.section, *path[1:])


def translate(document: dict[str, Any]) -> LauncherForm:
    """Give the document the section [launcher], if it has an older form of it."""
    named = [key for key in document if key not in _KNOWN and _is_launcher(key)]
    tables = {key: document.pop(key) for key in named}
    if named and (SECTION in document or len(named) > 1):
        faults = [_twice(key, named, has_both=SECTION in document) for key in named]
        document.setdefault(SECTION, {"name": LOCAL})
        return LauncherForm((SECTION,), faults)
    if SECTION in document:
        table = document[SECTION]
        is_named = not isinstance(table, dict) or "name" in table
        return LauncherForm((SECTION,), [] if is_named else [_unnamed()])
    if named:
        (name,) = named
        table = tables[name]
        is_table = isinstance(table, dict)
        document[SECTION] = {**table, "name": name} if is_table else table
        own = [Fault((name, "name"), "unknown key", at_key=True)]
        return LauncherForm((name,), own if is_table and "name" in table else [])
    document[SECTION] = {"name": LISTED if _names(document) else LOCAL}
    return LauncherForm(("hosts",), [])


def _unnamed() -> Fault:
    known = f"known: {', '.join(registry.names('launchers'))}"
    return Fault(NAME, '"name" is missing', known, at_key=True)


def _is_launcher(key: str) -> bool:
    return registry.is_known("launchers", key)


def _twice(key: str, named: list[str], *, has_both: bool) -> Fault:
    what = f'[{key}] is another form of [launcher] with name = "{key}"'
    others = "that section" if has_both else " and ".join(f"[{k}]" for k in named if k != key)
    return Fault((key,), f"{what}: it excludes {others}", "remove one of them", at_key=True)


def _names(document: dict[str, Any]) -> list[str]:
    """The other hosts that [[hosts]] lists."""
    hosts = document.get("hosts")
    tables = hosts if isinstance(hosts, list) else []
    return [host["ssh"] for host in tables if isinstance(host, dict) and host.get("ssh")]


def has_others(document: dict[str, Any]) -> bool:
    """Whether other machines take part; then the transport is always tcp. After `translate`."""
    table = document.get(SECTION)
    name = table.get("name") if isinstance(table, dict) else None
    return bool(_names(document)) or name not in (LOCAL, LISTED)


def check(chosen: Choice | None, document: dict[str, Any]) -> Iterator[Fault]:
    """What is wrong with valid options, and with the hosts that the file lists."""
    if chosen is None:
        return
    own = launcher.made(chosen.name, chosen.options)
    for key, message, suggestion in own.check():
        path = key if isinstance(key, tuple) else (key,)
        yield Fault((SECTION, *path), message, suggestion)
    listed, others = bool(document.get("hosts")), bool(_names(document))
    if own.takes_hosts and not others:
        yield Fault(NAME, f"{chosen.name} needs the names of hosts", "add [[hosts]]")
    elif not own.takes_hosts and (others or (listed and own.places())):
        what = "brings its own hosts" if own.places() else "has no hosts besides this machine"
        yield Fault(
            NAME, f"{chosen.name} {what}: it excludes [[hosts]]", _who("takes_hosts", "take them")
        )


def resolved(chosen: Choice) -> Launch:
    own = launcher.made(chosen.name, chosen.options)
    return Launch(name=chosen.name, options=chosen.options, places=own.places())


def workers_min(chosen: Choice) -> int | None:
    return launcher.made(chosen.name, chosen.options).workers_min


def lacking(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Abilities that the job needs and its launcher does not declare."""
    own = launcher.of(job)
    if own.moves and job.servers.count and job.servers.durability != "disk":
        what = "the coordinator and its servers may be started again on another machine"
        yield ("servers", "durability"), what, 'use "disk"'
    if own.outlives or not any(host.is_other for host in job.places):
        return
    lost = _only_in_processes(job, method)
    if lost and "coordinator" in method.shape.survives:
        what = f"daemons of {job.launcher.name} end with the coordinator that has started them"
        instead = 'use durability = "process"' if job.servers.count else "use a method with servers"
        yield NAME, f"{what}, and {lost}", f"{instead}; {_who('outlives', 'keep them')}"


def _only_in_processes(job: JobFile, method: Any) -> str:
    """What no file has between two checkpoints; "" if files have everything."""
    if job.servers.count and job.servers.durability == "none":
        return 'with durability = "none" the shards would be lost'
    if method.shape.model != "tables" and not job.servers.count:
        return f"the models of {job.algorithm.name} are in its workers only"
    return ""


def _who(ability: str, do: str) -> str:
    return f"launchers that {do}: {', '.join(launcher.that_have(ability))}"
