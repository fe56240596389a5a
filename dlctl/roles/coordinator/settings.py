"""Live settings: a change is done when the daemons have said so, not when it was sent.

Whoever has asked for it hears after a while who has not answered. The daemon goes on being asked
until it answers, or its process has ended: the next one begins with what is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dlctl import messages as m
from dlctl.errors import DlctlError
from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Membership
from dlctl.roles.coordinator.records import History
from dlctl.settings import parse, require, require_decay

ANSWER_S_MAX = 5.0
Answered = Callable[[Json], None]


@dataclass(slots=True)
class _Change:
    keys: frozenset[str]
    asked: dict[str, float]
    """Daemon -> when it was asked; answered ones are removed."""
    answered: Answered
    until: float
    rows: list[Json] = field(default_factory=list)


class SettingChanges:
    def __init__(
        self,
        context: History,
        members: Membership,
        optimizer: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`optimizer`: the options of the servers' one in the job file; a new rate has to go with
        those that are not live.
        """
        self.context = context
        self.members = members
        self.optimizer = optimizer
        self.number = 0
        self._open: dict[int, _Change] = {}

    def begin_texts(
        self, names: list[str], texts: dict[str, str], now: float, answered: Answered
    ) -> None:
        """Like `begin`, with values as people write them. Raises DlctlError."""
        values = {key: parse(key, text) for key, text in texts.items()}
        require_decay(values, self.optimizer)
        for name in names:
            if name not in self.members.daemons:
                raise DlctlError(f"this run has no {name:.80}")
            daemon = self.members.daemons[name]
            if daemon.role == "worker":
                require(name, daemon.metrics.get("settings"), values)
        shown = " ".join(f"{key}={text}" for key, text in texts.items())
        self.context.event("set", ", ".join(names), f"set {shown}")
        self.begin(names, values, now, answered)

    def begin(self, names: list[str], values: Json, now: float, answered: Answered) -> None:
        """Set `values` on daemons; `answered` gets {"changes": [...], "missing": [names]}."""
        self.number += 1
        number = self.number
        asked = dict.fromkeys(names, now)
        self._open[number] = _Change(frozenset(values), asked, answered, now + ANSWER_S_MAX)
        for name in names:
            daemon = self.members.daemons[name]
            daemon.settings = daemon.settings | values
            # One question for all that it has not answered: an older one that is sent again would
            # undo a newer one.
            wanted = self._unanswered(name) | values
            self.context.ask(("change", name), name, m.Change(number, wanted), now)

    def _unanswered(self, name: str) -> Json:
        message = self.context.retries.message(("change", name))
        return message.settings if isinstance(message, m.Change) else {}

    def on_changed(self, message: m.Changed, now: float) -> None:
        newest = self.context.retries.message(("change", message.name))
        if isinstance(newest, m.Change) and newest.change == message.change:
            self.context.retries.done(("change", message.name), now)
        for number, change in list(self._open.items()):
            if number <= message.change and message.name in change.asked:
                self._note(change, message, now)
                if not change.asked:
                    self._close(number)

    def _note(self, change: _Change, message: m.Changed, now: float) -> None:
        ms = (now - change.asked.pop(message.name)) * 1e3
        for key in change.keys & message.after.keys():
            before, after = message.before.get(key), message.after[key]
            change.rows.append(
                {"name": message.name, "key": key, "before": before, "after": after, "ms": ms}
            )

    def gone(self, name: str) -> None:
        """Its process has ended. Who still waits for an answer gets it from the next one."""
        if not any(name in change.asked for change in self._open.values()):
            self.context.retries.drop(("change", name))

    def deadline(self) -> float | None:
        return min((change.until for change in self._open.values()), default=None)

    def on_deadline(self, now: float) -> None:
        for number in [n for n, change in self._open.items() if change.until <= now]:
            self._close(number)

    def _close(self, number: int) -> None:
        change = self._open.pop(number)
        for name in change.asked:
            daemon = self.members.get(name)
            if daemon is None or not daemon.alive:
                self.gone(name)
        rows = sorted(change.rows, key=lambda row: (row["name"], row["key"]))
        change.answered({"changes": rows, "missing": sorted(change.asked)})
