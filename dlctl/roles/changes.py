"""Live settings: a change is done when the daemons have said so, not when it was sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dlctl import messages as m
from dlctl.errors import DlctlError
from dlctl.messages import Json
from dlctl.roles.journal import History
from dlctl.roles.membership import Membership
from dlctl.settings import parse, require

ANSWER_S_MAX = 5.0
Answered = Callable[[Json], None]


@dataclass(slots=True)
class _Change:
    asked: dict[str, float]
    """Daemon -> when it was asked; answered ones are removed."""
    answered: Answered
    until: float
    rows: list[Json] = field(default_factory=list)


class Changes:
    def __init__(self, desk: History, members: Membership) -> None:
        self.desk = desk
        self.members = members
        self.number = 0
        self._open: dict[int, _Change] = {}

    def begin_texts(
        self, names: list[str], texts: dict[str, str], now: float, answered: Answered
    ) -> None:
        """Like `begin`, with values as people write them. Raises DlctlError."""
        values = {key: parse(key, text) for key, text in texts.items()}
        for name in names:
            if name not in self.members.daemons:
                raise DlctlError(f"this run has no {name:.80}")
            daemon = self.members.daemons[name]
            if daemon.role == "worker":
                require(name, daemon.metrics.get("settings"), values)
        shown = " ".join(f"{key}={text}" for key, text in texts.items())
        self.desk.event("set", ", ".join(names), f"set {shown}")
        self.begin(names, values, now, answered)

    def begin(self, names: list[str], values: Json, now: float, answered: Answered) -> None:
        """Set `values` on daemons; `answered` gets {"changes": [...], "missing": [names]}."""
        self.number += 1
        number = self.number
        change = _Change(dict.fromkeys(names, now), answered, now + ANSWER_S_MAX)
        self._open[number] = change
        for name in names:
            daemon = self.members.daemons[name]
            daemon.settings = daemon.settings | values
            self.desk.ask(("change", number, name), name, m.Change(number, values), now)

    def on_changed(self, message: m.Changed, now: float) -> None:
        change = self._open.get(message.change)
        self.desk.outstanding.done(("change", message.change, message.name), now)
        if change is None or message.name not in change.asked:
            return
        ms = (now - change.asked.pop(message.name)) * 1e3
        for key, after in message.after.items():
            before = message.before.get(key)
            change.rows.append(
                {"name": message.name, "key": key, "before": before, "after": after, "ms": ms}
            )
        if not change.asked:
            self._close(message.change)

    def deadline(self) -> float | None:
        return min((change.until for change in self._open.values()), default=None)

    def on_deadline(self, now: float) -> None:
        for number in [n for n, change in self._open.items() if change.until <= now]:
            self._close(number)

    def _close(self, number: int) -> None:
        change = self._open.pop(number)
        for name in change.asked:
            self.desk.outstanding.drop(("change", number, name))
        rows = sorted(change.rows, key=lambda row: (row["name"], row["key"]))
        change.answered({"changes": rows, "missing": sorted(change.asked)})
