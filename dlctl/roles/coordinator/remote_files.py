"""Copies logs and ack records of other hosts into the run directory as they grow.

The coordinator polls the agents for the bytes behind those that it has. It asks an agent only for
files of processes that this agent has started, so that no host can write to another host's files.
When a log is rotated, the copy is rotated, too, and continues with the newest part: the last lines
of the previous part may remain on their host only. After a process has exited, its files are
requested once more; then they are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dlctl.errors import RemoteProtocolError
from dlctl.records.memory import LOG, Entry, Memory
from dlctl.roles.coordinator.members.membership import Daemon, Membership
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
from dlctl.wire import messages as m

LOOK_S = 1.0
"""Polling interval of a file that has been copied up to its end."""
PIECE_BYTES = 256 * 1024


@dataclass(slots=True)
class _File:
    label: str
    """The process that writes it, "worker-0.3"."""
    agent: str
    name: str
    part: int = 0
    """The part of a rotated log that is being copied, in the agent's numbering; 0: none yet."""
    offset: int = 0
    """Bytes of that part of the log that have been copied."""
    data: bytes = b""
    """The copy of an ack record so far; a log is copied to a file."""
    request: int = 0
    """Number of the newest request."""
    has_warned: bool = False
    """A file causes one warning only."""
    is_last: bool = False
    """The newest request was sent after the writing process had exited."""

    @property
    def key(self) -> tuple[str, int]:
        """The key of the newest request in `Retries`."""
        return "log", self.request

    @property
    def is_log(self) -> bool:
        return self.name.startswith(LOGS)


class LogMirror:
    def __init__(self, context: Context, members: Membership, sizes: Mapping[str, int]) -> None:
        """sizes: label of a process -> bytes of its log in the run directory."""
        self.context = context
        self.members = members
        self.sizes = sizes
        self._files: dict[str, _File] = {}
        self._changed: dict[str, str] = {}
        """Logs that have changed since they were persisted -> their labels."""
        self._numbers = RequestNumbers()
        self._look_at = 0.0
        self._is_ending = False

    # ------------------------------------------------------------ the files

    def follow(self, daemon: Daemon) -> None:
        """A process is about to be started; only those on other hosts are followed."""
        if daemon.agent != HOME_AGENT:
            self._add(f"{daemon.name}.{daemon.incarnation}", daemon.agent)

    def _add(self, label: str, agent: str, part: int = 0, offset: int = 0) -> None:
        log = _File(label, agent, f"{LOGS}/{label}.jsonl", part, offset)
        self._files[log.name] = log
        self._changed[log.name] = label
        if label.startswith("worker"):
            record = _File(label, agent, f"{ACKS}/{label}")
            self._files[record.name] = record

    def changes(self) -> Iterator[Entry]:
        """Agent and part of each log that has changed since the last call."""
        changed, self._changed = self._changed, {}
        for name, label in changed.items():
            file = self._files.get(name)
            yield Entry(LOG + label, None if file is None else [file.agent, file.part])

    def recall(self, memory: Memory, now: float) -> None:
        for label, (agent, part) in memory.under(LOG):
            self._add(label, agent, part, self.sizes.get(label, 0) if part else 0)

    def lose(self, agent: str) -> None:
        """Stop copying from a host that is given up."""
        for file in [file for file in self._files.values() if file.agent == agent]:
            self._close(file)

    def finish(self, now: float) -> None:
        """All processes but the agents have exited: request all files for the last time."""
        self._is_ending = True
        for file in self._files.values():
            self.context.retries.drop(file.key)
        self._look(now)

    def pending(self) -> list[str]:
        """Reachable agents that have not answered for all their files."""
        return sorted({file.agent for file in self._files.values() if self._is_there(file.agent)})

    def _close(self, file: _File) -> None:
        del self._files[file.name]
        if file.is_log:
            self._changed[file.name] = file.label
        self.context.retries.drop(file.key)

    # ------------------------------------------------------------ asking

    def deadline(self) -> float | None:
        return self._look_at if self._files else None

    def on_deadline(self, now: float) -> None:
        if now >= self._look_at:
            self._look(now)

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_S
        for file in self._files.values():
            if file.key not in self.context.retries and self._is_there(file.agent):
                self._ask(file, now)

    def _is_there(self, agent: str) -> bool:
        daemon = self.members.get(agent)
        return daemon is not None and daemon.alive and daemon.registered

    def _ask(self, file: _File, now: float) -> None:
        file.request, file.is_last = self._numbers.next(now), self._has_ended(file)
        question = m.ReadFile(file.request, file.name, file.part, file.offset, PIECE_BYTES)
        self.context.ask(file.key, file.agent, question, now)

    def _has_ended(self, file: _File) -> bool:
        name, _, incarnation = file.label.rpartition(".")
        daemon = self.members.get(name, int(incarnation))
        return self._is_ending or daemon is None or not daemon.alive

    # ------------------------------------------------------------ answers

    def on_data(self, message: m.FileData, now: float) -> None:
        """Receive a piece of a file. Raises RemoteProtocolError if it is from another host."""
        file = self._files.get(message.file)
        if file is None or message.request != file.request:
            return
        if message.name != file.agent:
            raise RemoteProtocolError("it was not asked for this file")
        if self.context.retries.done(file.key, now) is None:
            return
        if message.error not in ("", NOT_THERE):
            self._complain(file, message.error)
        is_complete = bool(message.error)  # A missing file may never be written.
        if not message.error:
            is_complete = self._take(file, message) if file.is_log else self._replace(file, message)
        if is_complete and file.is_last:
            self._close(file)
        elif not is_complete and message.data:
            self._ask(file, now)  # Not for an empty answer: no host can keep us busy with those.

    def _replace(self, record: _File, message: m.FileData) -> bool:
        if len(message.data) == message.size and message.data != record.data:
            record.data = message.data
            self.context.do(ReplaceFile(record.name, message.data))
        return True

    def _take(self, log: _File, message: m.FileData) -> bool:
        """Append to the copy. Returns whether it is complete now."""
        if message.part != log.part or message.size < log.offset:
            if log.offset:
                self.context.do(RotateLog(log.name))
            log.part, log.offset = message.part, 0
            self._changed[log.name] = log.label
        if message.offset != log.offset:
            return False
        if message.data:
            self.context.do(TakeLog(log.name, log.offset, message.data))
            log.offset += len(message.data)
        return log.offset >= message.size

    def on_failed(self, event: MirrorFailed) -> None:
        """A write has failed, on a full disk for example; it is retried at every poll."""
        file = self._files.get(event.file)
        if file is None:
            return
        file.offset, file.data = min(file.offset, event.offset), b""
        self._complain(file, event.error)

    def _complain(self, file: _File, error: str) -> None:
        if not file.has_warned:
            file.has_warned = True
            self.context.note("warning", f"cannot copy {file.name} of {file.agent}: {error}")
