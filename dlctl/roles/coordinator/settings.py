"""Live settings: a change is done when the daemons have acknowledged it, not when it was sent.

A request is validated here: either all of its keys are applied to all of its daemons, or none.
After a timeout the client learns which daemons have not answered. The request is resent until the
daemon answers or its process ends: the next process starts with the new values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlctl.errors import NotFound, RemoteProtocolError, UsageError
from dlctl.job.settings import EVERY_RUN, LiveSettings
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.records import EventContext
from dlctl.util.did_you_mean import did_you_mean
from dlctl.util.names import COORDINATOR
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json

ANSWER_S_MAX = 5.0
Answered = Callable[[Json], None]
"""Called with {"changes": [a row for each daemon and key], "missing": [names], "uneven": see
`SettingChanges.uneven`}.
"""


@dataclass(slots=True)
class _Change:
    wanted: dict[str, Json]
    """Daemon -> its keys and their values."""
    asked: dict[str, float]
    """Daemon that has not answered -> when the change began."""
    answered: Answered
    until: float
    rows: list[Json] = field(default_factory=list)


@dataclass(eq=False)
class SettingChanges:
    context: EventContext
    members: Membership
    live: LiveSettings = EVERY_RUN
    """The live settings of this job."""
    _open: dict[int, _Change] = field(default_factory=dict, init=False)

    def resume(self, before: Json) -> None:
        """Restore the settings from before a stop, for the daemons and keys that this job has."""
        for name, own in before.items():
            if (daemon := self.members.get(name)) is not None and isinstance(own, dict):
                daemon.settings = {k: v for k, v in own.items() if k in self.live.by_key}

    # ------------------------------------------------------------ requests

    def request(
        self, patterns: Sequence[str], texts: Mapping[str, str], now: float, answered: Answered
    ) -> None:
        """Set `texts`, values as users write them, on all daemons that match a pattern and have the
        setting; no patterns: on all that have it.

        Raises UsageError or NotFound before any change.
        """
        if not texts:
            raise UsageError("nothing to set: give KEY=VALUE", hint="dlctl set --list")
        values = {key: self.live.parse(key, text) for key, text in texts.items()}
        names = [*self.members.daemons, COORDINATOR]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                meant = did_you_mean(pattern, names)
                raise NotFound(f'no daemon is called "{pattern:.80}"; {meant}', hint="dlctl status")
        wanted: dict[str, Json] = {}
        for key, value in values.items():
            for name in self._having(key, patterns):
                wanted.setdefault(name, {})[key] = value
        shown = " ".join(f"{key}={text.strip()}" for key, text in texts.items())
        self.context.event("set", ", ".join(wanted), f"set {shown}")
        self.begin(wanted, now, answered)

    def _having(self, key: str, patterns: Sequence[str]) -> list[str]:
        """The daemons that have a setting. Raises UsageError if a pattern matches none of them."""
        roles = self.live.by_key[key].roles
        having = [name for name, daemon in self.members.daemons.items() if daemon.role in roles]
        if not having:
            raise UsageError(f"no daemon of this run has {key}")
        found = []
        for pattern in patterns or ["*"]:
            matching = fnmatch.filter(having, pattern)
            if not matching:
                owners = " and ".join(f"{role}s" for role in roles)
                raise UsageError(f"{pattern:.80} has no {key}: it is a setting of {owners}")
            found += matching
        return found

    # ------------------------------------------------------------ applying changes

    def begin(self, wanted: Mapping[str, Json], now: float, answered: Answered) -> None:
        """Apply values; `wanted`: daemon -> key -> value."""
        number = self.context.next_number()
        asked = dict.fromkeys(wanted, now)
        self._open[number] = _Change(dict(wanted), asked, answered, now + ANSWER_S_MAX)
        for name, values in wanted.items():
            daemon = self.members.daemons[name]
            daemon.settings = daemon.settings | values
            if not daemon.alive:
                continue
            # One request for all that is unacknowledged: an older request that is resent would undo
            # a newer one.
            older = self.context.retries.message(("change", name))
            unanswered = older.settings if isinstance(older, m.ChangeSettings) else {}
            self.context.ask(
                ("change", name), name, m.ChangeSettings(number, unanswered | values), now
            )

    def on_changed(self, peer: Peer, message: m.Changed, now: float) -> None:
        """Count a daemon's answer to a change. Raises RemoteProtocolError for values that no
        setting has.
        """
        values = (*message.before.values(), *message.after.values())
        if not all(value is None or isinstance(value, str | int | float) for value in values):
            raise RemoteProtocolError("these are no values of settings")
        self.context.noted(("change", message.name), now, change=message.change)
        for number, change in list(self._open.items()):
            if number <= message.change and message.name in change.asked:
                self._note(change, message, now)
                if not change.asked:
                    self._close(number)

    def _note(self, change: _Change, message: m.Changed, now: float) -> None:
        ms = (now - change.asked.pop(message.name)) * 1e3
        for key in change.wanted[message.name].keys() & message.after.keys():
            before, after = message.before.get(key), message.after[key]
            row = {"name": message.name, "key": key, "before": before, "after": after, "ms": ms}
            old, new = self.live.format(key, before), self.live.format(key, after)
            change.rows.append(row | {"old": old, "new": new})

    def deadline(self) -> float | None:
        return min((change.until for change in self._open.values()), default=None)

    def on_deadline(self, now: float) -> None:
        for number in [n for n, change in self._open.items() if change.until <= now]:
            self._close(number)

    def _close(self, number: int) -> None:
        change = self._open.pop(number)
        rows = sorted(change.rows, key=lambda row: (row["name"], row["key"]))
        missing = sorted(change.asked)
        change.answered({"changes": rows, "missing": missing, "uneven": self.uneven()})

    # ------------------------------------------------------------ shards

    def uneven(self) -> Json:
        """Setting -> server -> value, of what the shards of the model do not have in common."""
        servers = self.members.of_role("server")
        values = {
            key: {server.name: _value(server, key) for server in servers}
            for key, setting in self.live.by_key.items()
            if "server" in setting.roles and key in self.live.section
        }
        return {key: of for key, of in values.items() if len({*of.values()} - {None}) > 1}


def _value(daemon: Daemon, key: str) -> Any:
    """What was set for a daemon, else what it reports; None if neither is known."""
    reported = daemon.metrics.get("settings")
    found = daemon.settings.get(key, reported.get(key) if isinstance(reported, dict) else None)
    return found if isinstance(found, str | int | float) else None
