"""The commits of a server that are under way, and what may not leave before they are durable.

A commit of a shard on a disk is a write, which the driver performs while pushes go on (`Commit`).
It answers when that commit, and with it all before, would survive a power loss (`Committed`). There
is one rule:

    What a server sends, to whomever, leaves when all commits that were begun before it are durable,
    in the order in which it was sent. The exit of the process is the last to leave.

So an ack leaves behind its commit, and so does the answer to a duplicate of a push whose commit is
under way. An answer to a fetch shows the shard as it was when it was read, at a version that no
power loss undoes: its values are copied, because the shard goes on. The coordinator and the lead
never receive a version, a held push or a sum that a power loss undoes. What is no message does not
wait: the log, and the copy of a checkpoint, which counts from when it is reported as saved.

One message overtakes all others: a report that repeats the last one, and says that the disk is
slow. Without that heartbeat a server that waits for its disk would be considered dead.

Other storages have no commits under way: then all of this costs a comparison.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace

import numpy as np

from dlctl.roles.protocol.context import Context
from dlctl.shards.log import LogWrite
from dlctl.util.names import WAITS_FOR_DISK
from dlctl.util.record import record
from dlctl.util.text import bounded_place
from dlctl.wire.machine import Effect, Event, Exit, Peer, Send
from dlctl.wire.messages import Buffers, Json, Message, Parameters, Report, SparseParameters

ANSWERS_MAX = 8
"""Answers with values that wait here, per peer, which has no use for more, and asks again."""
_ANSWERS = (Parameters, SparseParameters, Buffers)


@record
class Commit(Effect):
    """Perform this write, after those of all earlier commits; answered by `Committed`."""

    number: int
    """The number of the commit in this process: 1, 2, 3 ..."""
    write: LogWrite


@record
class Committed(Event):
    """The commit of this number and all before it are durable."""

    number: int


class Commits:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._begun = self._durable = self._passed = 0
        """Numbers of commits: the newest one, the newest durable one, the newest one whose effect
        has passed `hold`."""
        self._begun_at: deque[tuple[int, float, str]] = deque()
        """The commits under way: number, time and place of each."""
        self._held: deque[tuple[int, Effect]] = deque()
        """What waits, and the commit that it waits for, in order."""
        self._answers: dict[Peer, set[tuple[str, int]]] = {}
        """Answers with values among that: kind and number of the request. A request that is
        repeated meanwhile gets one answer."""
        self.is_ending = False
        """Whether the exit of the process is among that."""

    def begin(self, write: LogWrite, *, in_order: bool = False) -> int:
        """A table was committed; returns the number of the commit. in_order: it depends on commits
        of other tables before it, or others after it depend on it.
        """
        self._begun += 1
        write = replace(write, in_order=True) if in_order else write
        self.context.do(Commit(self._begun, write))
        return self._begun

    @property
    def durable(self) -> int:
        """The number of the newest commit that is."""
        return self._durable

    @property
    def under_way(self) -> int:
        """The number of commits that are not durable yet."""
        return self._begun - self._durable

    def waits_s(self, now: float) -> float:
        """How long the oldest of them has been under way."""
        return now - self._begun_at[0][1] if self._begun_at else 0.0

    def report(self, now: float) -> Json:
        """What a report says of a slow disk."""
        place = self._begun_at[0][2] if self._begun_at else ""
        wait = {"commits": self.under_way, "commit_wait_s": self.waits_s(now)}
        return {**wait, "commit_place": bounded_place(place)}

    def hold(self, effects: list[Effect], now: float) -> list[Effect]:
        """The effects of one event, without those that have to wait."""
        if self._begun == self._durable:
            return effects
        leaving: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Commit):
                self._passed = effect.number
                self._begun_at.append((effect.number, now, effect.write.log.where))
            elif self._passed > self._durable and _has_to_wait(effect):
                self._wait(effect)
                continue
            leaving.append(effect)
        return leaving

    def _wait(self, effect: Effect) -> None:
        if isinstance(effect, Exit):
            self.is_ending = True
        elif isinstance(effect, Send) and isinstance(effect.message, _ANSWERS):
            answers, which = self._answers.setdefault(effect.peer, set()), _request(effect.message)
            if which in answers or len(answers) == ANSWERS_MAX:
                return
            answers.add(which)
            if effect.message.borrows:
                effect = Send(effect.peer, _with_own_arrays(effect.message))
        self._held.append((self._passed, effect))

    def committed(self, number: int) -> list[Effect]:
        """All commits up to this one are durable; returns what may leave."""
        self._durable = max(self._durable, number)
        while self._begun_at and self._begun_at[0][0] <= self._durable:
            self._begun_at.popleft()
        leaving: list[Effect] = []
        while self._held and self._held[0][0] <= self._durable:
            _, effect = self._held.popleft()
            leaving.append(effect)
            if isinstance(effect, Send) and isinstance(effect.message, _ANSWERS):
                self._answers[effect.peer].discard(_request(effect.message))
                if not self._answers[effect.peer]:
                    del self._answers[effect.peer]
        return leaving


def _request(answer: Parameters | SparseParameters | Buffers) -> tuple[str, int]:
    return "buffers" if isinstance(answer, Buffers) else "values", answer.request


def _has_to_wait(effect: Effect) -> bool:
    if not isinstance(effect, Send):
        return isinstance(effect, Exit)
    message = effect.message
    return not (isinstance(message, Report) and message.phase == WAITS_FOR_DISK)


def _with_own_arrays(message: Message) -> Message:
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    own = {name: a.copy() for name, a in values.items() if isinstance(a, np.ndarray)}
    return replace(message, **own)
