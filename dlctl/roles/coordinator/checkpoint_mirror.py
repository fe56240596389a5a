"""How far the mirror of the checkpoints is behind, and why: `[checkpoints] mirror`.

A process beside the coordinator uploads them (`daemons/mirror/`). Training never waits for it; only
the end of a run does, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dlctl.problems import RUN, Problem, known
from dlctl.roles.coordinator.records import EventContext, HurryMirror, MirrorCheckpoint
from dlctl.roles.protocol.effects import MirrorNews
from dlctl.util import values
from dlctl.wire.messages import Json

BEHIND_S = 600.0
"""Without a newer checkpoint in the mirror, while one waits, it is behind."""
LASTING = ("missing", "denied", "credentials", "expired", "foreign")
"""Causes that no repetition cures (`dlctl/stores/objects.py`)."""


@dataclass(eq=False)
class CheckpointMirror:
    context: EventContext
    address: str
    """"": the run has none."""
    newest: Callable[[], Json | None]
    """The row of the newest checkpoint of the run."""
    mirrored: Json = field(default_factory=dict, init=False)
    """number, step and at (seconds) of the newest one in the mirror; {}: none, or unknown yet."""
    pending: bool = field(default=False, init=False)
    """A checkpoint waits, or is under way."""
    sent: tuple[int, int] = field(default=(0, 0), init=False)
    """Bytes of the one under way, and of all of it."""
    why: str = field(default="", init=False)
    """Why uploads fail; "" if they do not."""
    cause: str = field(default="", init=False)
    _since: float | None = field(default=None, init=False)
    """When the mirror fell behind; None: it is not."""
    _failed_at: float = field(default=0.0, init=False)
    _asked: int = field(default=0, init=False)
    """The newest checkpoint that is to be uploaded, by its number."""
    _is_given_up: bool = field(default=False, init=False)
    _is_known: bool = field(default=False, init=False)
    """There has been news: before, an upload of an earlier coordinator may be unfinished."""

    def on_checkpoint(self, row: Json, now: float) -> None:
        """The run has a new complete checkpoint."""
        if self.address and not row["error"]:
            self.pending, self._asked = True, row["number"]
            self._since = now if self._since is None else self._since
            self.context.do(MirrorCheckpoint(row["number"]))

    def on_news(self, news: MirrorNews, now: float) -> None:
        before = self.mirrored.get("number")
        if news.mirrored:
            self.mirrored = {**news.mirrored, "at": now - news.age_s}
        self._is_known = True
        # News may have been under way when the run saved a newer one.
        self.sent, self.pending = news.sent, news.pending or news.asked < self._asked
        if not self.pending:
            self._since, self._is_given_up = None, False
        elif self._since is None or self.mirrored.get("number") != before:
            self._since = now
        if news.why and not self.why:
            self._failed_at = now
            text = f"the mirror does not take checkpoints: {news.why}; training goes on"
            code = "mirror-refused" if news.cause in LASTING else "mirror-behind"
            self.context.event("mirror", "", text, code=code)
        elif self.why and not news.why:
            self.context.event("mirror", "", "the mirror takes checkpoints again")
        self.why, self.cause = news.why, news.cause

    def hurry(self) -> None:
        """The run ends: try again at once."""
        if self.address:
            self.context.do(HurryMirror())

    def give_up(self) -> None:
        """The run ends without its last upload: that is a problem, however short the wait was."""
        self._is_given_up = True

    def waits_for(self) -> list[str]:
        """What the end of the run waits for."""
        if not self.address or (self._is_known and not self.pending):
            return []
        sent, nbytes = self.sent
        part = f"{values.size(sent)} of {values.size(nbytes)}" if nbytes else ""
        found = "; ".join(filter(None, (part, self.why)))
        return [
            f"the upload of the last checkpoint to {self.address}{f': {found}' if found else ''}"
        ]

    def to_json(self) -> Json | None:
        """For `status`; None: the run has no mirror."""
        if not self.address:
            return None
        newest, step = self.newest() or {}, self.mirrored.get("step")
        lag = newest["step"] - step if newest and step is not None else None
        found: dict[str, Any] = {
            "address": self.address, "number": None, "step": None, "at": None, **self.mirrored,
            "pending": self.pending, "lag_steps": lag, "why": self.why, "cause": self.cause,
        }  # fmt: skip
        if self.pending:
            sent, under_way = self.sent
            found |= {"behind_since": self._since, "sent_bytes": sent, "of_bytes": under_way}
        return found

    def problems(self, now: float) -> Iterator[Problem]:
        facts = known(address=self.address, step=self.mirrored.get("step"), why=self.why)
        if self.why and self.cause in LASTING:
            facts |= {"cause": self.cause}
            yield Problem("mirror-refused", RUN, self._failed_at, facts)
        elif self.why or self._is_given_up or self._is_long_behind(now):
            since = self._failed_at if self.why else self._since
            yield Problem("mirror-behind", RUN, since, facts)

    def _is_long_behind(self, now: float) -> bool:
        return self._since is not None and now - self._since > BEHIND_S
