"""What two contents of a job file differ in, and what one differs in from a run that lives."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dlctl.cli.snapshot import Snapshot
from dlctl.settings import SETTINGS, format_value, has_unit, parse

WORKERS = "workers.count"
LIVE_SECTIONS = ("algorithm", "optimizer", "compression", "limits")
"""Sections of the job file whose keys are called as the live settings are."""
Json = dict[str, Any]


class Change(NamedTuple):
    key: str
    before: Any
    """None: there is none. A list, if daemons of a run differ in it."""
    after: Any

    def text(self) -> str:
        """As in "workers.count: 4 -> 8"."""
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"

    def how_live(self) -> str:
        """The command that makes this change in a running job; "" if none does."""
        if self.after is None:
            return ""
        if self.key == WORKERS:
            return f"dlctl scale worker={self.after}"
        name = _setting(self.key)
        return f"dlctl set {shlex.quote(f'{name}={self.after}')}" if name else ""


def not_live(content: Json, name: str) -> list[str]:
    """Keys of a job file that are called so, with their sections, and change with a restart only:
    ["servers.count"] of "servers.count" or "count".
    """
    keys = [key for key in _flat(content) if name in (key, key.partition(".")[2])]
    return [key for key in keys if not _setting(key)]


def differences(before: Json, after: Json) -> list[Change]:
    """Keys that differ between two contents of a job file."""
    return _differences(_flat(before), _flat(after))


def from_live(snapshot: Snapshot, before: Json, after: Json) -> list[Change]:
    """Keys in which `after` differs from what is in force in a run that lives. It was started with
    `before`; since then `set` and `scale` may have changed it.
    """
    old, new = _flat(before), _flat(after)
    if snapshot.run.get("ready_at") is not None:  # Before, the rows may be of an earlier execution.
        old[WORKERS] = sum(row.get("role") == "worker" for row in snapshot.daemons)
        for key in old:
            if name := _setting(key):
                old[key] = _in_force(snapshot, name, old[key], new.get(key))
    return _differences(old, new)


def _in_force(snapshot: Snapshot, name: str, before: Any, after: Any) -> Any:
    """The value of a live setting, as the job file says it; a list if daemons differ in it."""
    known = snapshot.run.get("settings")
    found: list[Any] = []
    for row in snapshot.daemons:
        if row.get("role") in SETTINGS[name].roles:
            own = known.get(row["name"]) if isinstance(known, dict) else None
            value = own[name] if isinstance(own, dict) and name in own else _plain(name, before)
            found += [value] if value not in found else []
    for text in (before, after):
        if found in ([], [_plain(name, text)]):
            return text
    shown = [format_value(name, value) if has_unit(name) else value for value in found]
    return shown[0] if len(shown) == 1 else shown


def _plain(name: str, value: Any) -> Any:
    """A value of the job file as daemons have it: "5MB/s" is 5e6, and "off" is None."""
    return parse(name, value) if isinstance(value, str) else value


def _setting(key: str) -> str:
    """The live setting that this key of the job file says at first; "" if it is none."""
    section, _, name = key.partition(".")
    return name if section in LIVE_SECTIONS and name in SETTINGS else ""


def _differences(old: Json, new: Json) -> list[Change]:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [Change(key, old.get(key), new.get(key)) for key in keys]


def _flat(value: Json) -> Json:
    return dict(_leaves(value))


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        # "options" is our own level: in the job file those keys stand beside the name.
        here = path if key == "options" and path else f"{path}.{key}" if path else key
        if isinstance(item, Mapping):
            yield from _leaves(item, here)
        else:
            yield here, item


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        # As [[hosts]]: what is not said of one is of no interest.
        value = [{key: said for key, said in item.items() if said} for item in value]
    return "none" if value is None else json.dumps(value)
