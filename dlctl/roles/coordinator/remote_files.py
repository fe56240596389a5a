"""Logs and ack records of other hosts are copied into the run directory as they grow.

The coordinator asks the agents, again and again, for what comes behind the bytes that it has. It
asks only for files of processes that it had started by just this agent, so that no host can put
anything into another one's files. Where a log was rotated, the copy is rotated, too, and goes on
with the newest part: last lines of the one before may be on their host only. A process that
has ended is asked about once more; then its files are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dlctl import messages as m
from dlctl.errors import RemoteProtocolError
from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Daemon, Membership
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.files import (
    ACKS,
    LOGS,
    NOT_THERE,
    MirrorFailed,
    ReplaceFile,
    RequestNumbers,
    RotateLog,
    TakeLog,
)
from dlctl.util.names import HOME_AGENT

LOOK_S, LOOK_S_MAX = 0.5, 4.0
"""Between two looks whether a log has grown: ever longer, as long as it has not."""
RECORD_LOOK_S = 2.0
"""The same for an ack record, which grows all the time."""
PIECE_BYTES = 256 * 1024
MEMORY = "log/"
"""The beginning of the keys under which the next coordinator finds how far this one has come."""


@dataclass(slots=True)
class _File:
    label: str
    """The process that writes it, "worker-0.3"."""
    agent: str
    name: str
    part: int = 0
    """Of a log: the part that is being copied, as the agent numbers them; 0: none yet."""
    offset: int = 0
    """Of a log: bytes of that part that are here."""
    data: bytes = b""
    """Of an ack record: what is here."""
    request: int = 0
    """The newest question."""
    look_at: float = 0.0
    pause_s: float = LOOK_S
    """Before the next question, if nothing has come."""
    is_last: bool = False
    """It was asked when nobody wrote to the file any more."""

    @property
    def is_log(self) -> bool:
        return self.name.startswith(LOGS)

    @property
    def pause_s_min(self) -> float:
        return LOOK_S if self.is_log else RECORD_LOOK_S

    def writer(self) -> tuple[str, int]:
        """(name, incarnation) of the process that writes it."""
        name, _, incarnation = self.label.rpartition(".")
        return name, int(incarnation)


class LogMirror:
    def __init__(
        self, context: Context, members: Membership, sizes: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """sizes: of the logs that are in the run directory, by the labels of their processes."""
        self.context = context
        self.members = members
        self.sizes = sizes
        self._files: dict[str, _File] = {}
        self._outstanding = context.measures_apart()
        self._numbers = RequestNumbers()
        self._look_at = 0.0
        self._troubled: set[str] = set()
        """Files with which something went wrong: it is said once."""
        self._is_ending = False

    # ------------------------------------------------------------ what is followed

    def follow(self, daemon: Daemon) -> None:
        """A process is about to be started; nothing is to be done if that is on this machine."""
        if daemon.agent != HOME_AGENT:
            self._add(f"{daemon.name}.{daemon.incarnation}", daemon.agent)

    def _add(self, label: str, agent: str, part: int = 0, offset: int = 0) -> None:
        log = _File(label, agent, log_of(label), part, offset)
        self._files[log.name] = log
        if label.startswith("worker"):
            record = _File(label, agent, f"{ACKS}/{label}")
            self._files[record.name] = record

    def memory(self) -> Iterator[tuple[str, Any]]:
        """Agent and part of each log."""
        for file in self._files.values():
            if file.is_log:
                yield MEMORY + file.label, [file.agent, file.part]

    def recall(self, memory: Json, now: float) -> None:
        for key, value in memory.items():
            if key.startswith(MEMORY):
                label = key.removeprefix(MEMORY)
                self._add(label, value[0], value[1], self.sizes.get(label, 0) if value[1] else 0)

    def lose(self, agent: str) -> None:
        """Nothing comes from this host any more."""
        for file in [file for file in self._files.values() if file.agent == agent]:
            self._close(file)

    def finish(self, now: float) -> None:
        """All processes but the agents have ended: whatever comes now is the last of it."""
        self._is_ending = True
        for file in self._files.values():
            self._outstanding.drop(file.request)
        self._look(now)

    def pending(self) -> list[str]:
        """Agents that can be asked and have not answered for all their files."""
        return sorted({file.agent for file in self._files.values() if self._is_there(file.agent)})

    def _close(self, file: _File) -> None:
        del self._files[file.name]
        self._outstanding.drop(file.request)
        self._troubled.discard(file.name)

    # ------------------------------------------------------------ asking

    def deadline(self) -> float | None:
        if not self._files:
            return None
        due = self._outstanding.deadline()
        return self._look_at if due is None else min(self._look_at, due)

    def on_deadline(self, now: float) -> None:
        self.context.do(*self._outstanding.due(now))
        if now >= self._look_at:
            self._look(now)

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_S
        for file in self._files.values():
            is_due = file.look_at <= now or self._has_ended(file)
            if is_due and file.request not in self._outstanding and self._is_there(file.agent):
                self._ask(file, now)

    def _is_there(self, agent: str) -> bool:
        daemon = self.members.get(agent)
        return daemon is not None and daemon.alive and daemon.registered

    def _ask(self, file: _File, now: float) -> None:
        file.request, file.is_last = self._numbers.next(now), self._has_ended(file)
        question = m.ReadFile(file.request, file.name, file.part, file.offset, PIECE_BYTES)
        self.context.do(self._outstanding.add(file.request, file.agent, question, now))

    def _has_ended(self, file: _File) -> bool:
        name, incarnation = file.writer()
        daemon = self.members.get(name, incarnation)
        return self._is_ending or daemon is None or not daemon.alive

    # ------------------------------------------------------------ answers

    def on_data(self, message: m.FileData, now: float) -> None:
        """Raises RemoteProtocolError if it is not from the host that the file is on."""
        file = self._files.get(message.file)
        if file is None or message.request != file.request:
            return
        if message.name != file.agent:
            raise RemoteProtocolError("it was not asked for this file")
        if self._outstanding.done(file.request, now) is None:
            return
        has_news = bool(message.data) and message.data != file.data
        longer_s = min(2 * file.pause_s, LOOK_S_MAX)
        file.pause_s = file.pause_s_min if has_news else max(longer_s, file.pause_s_min)
        file.look_at = now + file.pause_s
        if message.error not in ("", NOT_THERE):
            self._complain(file, message.error)
        is_complete = bool(message.error)  # Or there is none yet, and none has to come.
        if not message.error:
            is_complete = self._take(file, message) if file.is_log else self._replace(file, message)
        if is_complete and file.is_last:
            self._close(file)
        elif not is_complete and message.data:
            self._ask(file, now)  # Otherwise it has time: nobody can keep us busy with nothing.

    def _replace(self, record: _File, message: m.FileData) -> bool:
        if len(message.data) == message.size and message.data != record.data:
            record.data = message.data
            self.context.do(ReplaceFile(record.name, message.data))
        return True

    def _take(self, log: _File, message: m.FileData) -> bool:
        """Whether all of the log is here now."""
        if message.part != log.part or message.size < log.offset:
            if log.offset:
                self.context.do(RotateLog(log.name))
            log.part, log.offset = message.part, 0
        if message.offset != log.offset:
            return False
        if message.data:
            self.context.do(TakeLog(log.name, log.offset, message.data))
            log.offset += len(message.data)
        return log.offset >= message.size

    def on_failed(self, event: MirrorFailed) -> None:
        """A full disk, say: it is tried again with every look."""
        file = self._files.get(event.file)
        if file is None:
            return
        file.offset, file.data = min(file.offset, event.offset), b""
        self._complain(file, event.error)

    def _complain(self, file: _File, error: str) -> None:
        if file.name not in self._troubled:
            self._troubled.add(file.name)
            self.context.note("warning", f"cannot copy {file.name} of {file.agent}: {error}")


def log_of(label: str) -> str:
    """The name of the log of a process, "worker-0.3"."""
    return f"{LOGS}/{label}.jsonl"
