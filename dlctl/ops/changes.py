"""How two versions of a job file differ, and how one differs from a live run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlctl.job.settings import EVERY_RUN, LiveSettings, flat, of_job
from dlctl.runs.snapshot import Snapshot

Json = dict[str, Any]
WORKERS = "workers.count"
DERIVED = "launcher.places"
"""A key that follows from the other keys of [launcher]."""


class KeyChange(NamedTuple):
    key: str
    before: Any
    """None: absent. A list if daemons of a run have different values."""
    after: Any
    setting: str = ""
    """The live setting whose initial value the key gives; "" if there is none."""

    def text(self) -> str:
        """The change for people: "workers.count: 4 -> 8"."""
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"

    def how_live(self) -> str:
        """The command that makes this change in a running job; "" if none does."""
        if self.after is None:
            return ""
        if self.key == WORKERS:
            return f"dlctl scale worker={self.after}"
        name = self.setting
        return f"dlctl set {shlex.quote(f'{name}={self.after}')}" if name else ""


def not_live(content: Json, name: str) -> list[str]:
    """Keys of a job file with this name, with their sections, that need a restart to change:
    ["servers.count"] for "servers.count" or "count".
    """
    live = of_job(content)
    keys = [key for key, _ in flat(content) if name in (key, key.partition(".")[2])]
    return [key for key in keys if not live.called(key)]


def differences(before: Json, after: Json) -> list[KeyChange]:
    """Keys that differ between two versions of a job file."""
    return _differences(dict(flat(before)), dict(flat(after)), of_job(before))


def from_live(snapshot: Snapshot, before: Json, after: Json) -> list[KeyChange]:
    """Keys in which `after` differs from the effective values of a live run. It was started with
    `before`; since then `set` and `scale` may have changed them.
    """
    old, new, live = dict(flat(before)), dict(flat(after)), of_job(before)
    if snapshot.run.get("ready_at") is not None:  # Before, the rows may be of an earlier execution.
        old[WORKERS] = sum(row.get("role") == "worker" for row in snapshot.daemons)
        for key in old:
            if name := live.called(key):
                old[key] = _effective(snapshot, live, name, old[key], new.get(key))
    return _differences(old, new, live)


def set_before(snapshot: Snapshot, before: Json, after: Json) -> tuple[Json, Json]:
    """Live settings of an ended run by daemon: (those it resumes with, those that a change of the
    job file has overridden since).
    """
    overruled = {change.setting for change in differences(before, after)}
    kept: Json = {}
    dropped: Json = {}
    for name, own in (snapshot.run.get("settings") or {}).items():
        for key, value in own.items():
            (dropped if key in overruled else kept).setdefault(name, {})[key] = value
    return kept, dropped


def settings_in_words(settings: Json) -> list[str]:
    """Live settings of daemons, as in "lr=0.05 of server-0"; equal settings are grouped."""
    owners: dict[str, list[str]] = {}
    for name, own in sorted(settings.items()):
        for key, value in own.items():
            owners.setdefault(f"{key}={EVERY_RUN.format(key, value)}", []).append(name)
    return [f"{text} of {', '.join(names)}" for text, names in owners.items()]


def _effective(snapshot: Snapshot, live: LiveSettings, name: str, before: Any, after: Any) -> Any:
    """The value of a live setting, as written in a job file; a list if daemons differ."""
    known, found = snapshot.run.get("settings") or {}, list[Any]()
    for row in snapshot.daemons:
        if row.get("role") in live.find(name).roles:
            value = known.get(row["name"], {}).get(name, _plain(live, name, before))
            found += [value] if value not in found else []
    for text in (before, after):
        if found in ([], [_plain(live, name, text)]):
            return text
    shown = [live.format(name, value) if live.has_unit(name) else value for value in found]
    return shown[0] if len(shown) == 1 else shown


def _plain(live: LiveSettings, name: str, value: Any) -> Any:
    """A value of the job file as daemons store it: "5MB/s" is 5e6, and "off" is None."""
    return live.parse(name, value) if isinstance(value, str) else value


def _differences(old: Json, new: Json, live: LiveSettings) -> list[KeyChange]:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key != DERIVED]
    return [KeyChange(key, old.get(key), new.get(key), live.called(key)) for key in keys]


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        # As [[hosts]]: without unset keys.
        value = [{key: set_to for key, set_to in item.items() if set_to} for item in value]
    return "none" if value is None else json.dumps(value)
