"""One checkpoint at a time: every shard and every replica saves, then the manifest makes it count.

A shard copies its state between two pushes, so each file is consistent in itself; no process waits
for another. Pushes of portions that were done before the first `Save` was sent are in every shard,
so the manifest lists these as done. With a compressor that leaves a residual, what a worker pushes
between a shard's copy and its own is in neither file. After a drain, as at every orderly stop, no
message is in flight and the files fit together exactly.

A file saved on another host counts once it has arrived here, complete and durable (`Transfers`);
then it is removed there. A worker's file saved on this machine counts once it has been verified: a
complete checkpoint supersedes older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dlctl.job.config import JobFile
from dlctl.records.manifest import state_of
from dlctl.records.memory import Entry, Memory
from dlctl.roles.coordinator.checkpoint_mirror import CheckpointMirror
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.records import (
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointEnded,
    CompleteCheckpoint,
    EventContext,
    Owner,
    RecordCheckpoint,
)
from dlctl.roles.protocol.files import Transfers, WantedFile, checkpoint_file, saved_file
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json

SAVE_S_MAX = 120.0
"""Timeout without an answer, and without progress in the transfer or check of a file. For a worker
that reports that it evaluates it starts when the evaluation ends, or had to end."""
STUCK_S_MAX = 10.0
"""The timeout if the only daemons left are workers that hang, and do not save. A worker that hangs
with all of its steps pushed can still save, unless torch keeps state for it.
"""
NO_PART = (-1, -1)
"""The bounds of no shard."""
Finished = Callable[[Json], None]
"""Called with the checkpoint's row; its "error" is "" if it is complete."""


@dataclass(slots=True)
class _Current:
    step: int
    begun: float
    heard_at: float
    """When it began, or the newest answer, progress of a file, or report of an evaluation."""
    manifest: Json
    """State at the start of the checkpoint; the files are filled in at the end."""
    is_last: bool
    of_servers: bool
    """It is for another cut of the model. Workers are not asked: they may wait for the servers,
    which wait for this."""
    directory: str = ""
    is_asked: bool = False
    """The daemons were asked to save."""
    late: dict[str, str] = field(default_factory=dict)
    """Daemon whose file has not arrived -> the file's name here while it is being transferred or
    verified; "" until the daemon has answered."""
    saved: dict[str, m.Saved] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)
    """Workers whose files are missing, although they had something to save."""
    error: str = ""
    listeners: list[Finished] = field(default_factory=list)


@dataclass(eq=False)
class Checkpointing(Owner):
    PERSISTED = frozenset({"number"})
    context: EventContext
    members: Membership
    job: JobFile
    number: int
    """The number of the newest checkpoint, which may be in progress."""
    transfers: Transfers
    mirror: CheckpointMirror
    is_moving: Callable[[], bool] = lambda: False
    """Whether the servers are not all at one cut of the model: nobody is asked to save then."""
    newest: Json | None = field(default=None, init=False)
    last_error: str = field(default="", init=False)
    last_s: float = field(default=0.0, init=False)
    """Duration of the newest attempt that has ended."""
    _current: _Current | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    """Time of the newest attempt, or of the release of the workers."""
    _next_at: float | None = field(default=None, init=False)

    def memory(self) -> Iterator[Entry]:
        yield Entry("checkpoints", self.number)

    def recall(self, memory: Memory, now: float) -> None:
        """Nothing to recall: the number is known from the directories (`Past.checkpoints`)."""

    @property
    def active(self) -> bool:
        return self._current is not None

    def schedule(self, now: float, since_s: float = 0.0) -> None:
        """Schedule a checkpoint every `every_s` seconds, counted from the newest attempt, which was
        `since_s` ago.
        """
        self._since, every_s = now - since_s, self.job.checkpoints.every_s
        self._next_at = self._since + every_s if every_s else None

    def since_s(self, now: float) -> float:
        """Seconds since the newest attempt."""
        return now - self._since

    def deadline(self) -> float | None:
        current = self._current
        if current is None:
            return self._next_at
        if current.is_asked and not current.late:
            return None
        are_stuck = current.late and all(self._hangs(current, name) for name in current.late)
        stuck_s = 0.0 if current.error else STUCK_S_MAX  # It fails anyway.
        return current.heard_at + (stuck_s if are_stuck else SAVE_S_MAX)

    def _hangs(self, current: _Current, name: str) -> bool:
        """Whether a daemon can hardly save: it hangs, or has steps that no shard accepts."""
        if current.late[name]:
            return False
        daemon = self.members.daemons[name]
        pushes_in_vain = current.is_last and not daemon.drained
        pushes_in_vain &= daemon.phase in ("pushing", "fetching")
        return (daemon.hangs or pushes_in_vain) and not daemon.saves(self.number)

    def _evaluates(self, current: _Current) -> bool:
        """Whether only workers have not answered, and one must finish an evaluation first."""
        asked = [self.members.daemons[name] for name, file in current.late.items() if not file]
        return all(d.role == "worker" for d in asked) and any(d.evaluates for d in asked)

    def gives_up_at(self) -> float | None:
        """Upper bound of the time at which the late daemons are given up."""
        current, until = self._current, self.deadline()
        if current is not None and until is not None and self._evaluates(current):
            return max(until, current.begun + EVALUATE_S_MAX + SAVE_S_MAX)
        return until

    def is_due(self, now: float) -> bool:
        return self._current is None and self._next_at is not None and self._next_at <= now

    def late(self) -> list[str]:
        return sorted(self._current.late) if self._current is not None else []

    def waits_for(self) -> list[str]:
        """The late daemons; if there are none, what is being written: before the daemons are asked,
        and after the last file has arrived.
        """
        current = self._current
        if current is None or not current.directory:
            return ["a directory for it"]
        return self.late() or ["the manifest" if current.is_asked else "another cut of the model"]

    def to_json(self) -> Json | None:
        """{"at": seconds, "waiting": names, "gives_up_at": seconds or None}; None: none active."""
        if self._current is None:
            return None
        waiting = ", ".join(self.late())
        return {"at": self._current.begun, "waiting": waiting, "gives_up_at": self.gives_up_at()}

    def begin(
        self, step: int, manifest: Json, now: float, listener: Finished | None,
        is_last: bool = False, of_servers: bool = False,
    ) -> None:  # fmt: skip
        """Begin a checkpoint, or join the current one. is_last: shards must not change after they
        are saved. of_servers: for another cut of the model, without the workers' residuals; it
        fails if servers with other parts could not continue from it.
        """
        if self._current is None:
            self.number += 1
            self._current = _Current(step, now, now, manifest, is_last, of_servers)
            self.context.do(BeginCheckpoint(self.number, step))
        if listener is not None:
            self._current.listeners.append(listener)

    def on_event(self, event: CheckpointBegun | CheckpointEnded, now: float) -> None:
        current = self._current
        if current is None or self.number != event.number:
            return
        if event.error or isinstance(event, CheckpointEnded):
            self._end(event.error, now)
            return
        current.directory, current.heard_at = event.directory, now
        self.advance(now)

    def advance(self, now: float) -> None:
        """Ask the daemons to save as soon as there is a directory, and one cut of the model."""
        current = self._current
        is_ready = current is not None and current.directory and not current.is_asked
        if current is None or not is_ready or self.is_moving():
            return
        current.is_asked, current.heard_at = True, now
        workers = [
            d for d in self.members.of_role("worker")
            if d.alive and d.asked_for_data and not d.out_of_touch
        ]  # fmt: skip
        asked = self.members.of_role("server")
        if current.of_servers:
            current.without = {worker.name for worker in workers}
        else:
            asked = asked + workers
        current.late = {d.name: "" for d in asked}
        for name in current.late:
            message = m.Save(self.number, current.directory, current.is_last)
            self.context.ask(("save", name), name, message, now)
        self._complete_if_all(now)  # There may be no daemon to wait for.

    def on_saved(self, peer: Peer, message: m.Saved, now: float) -> None:
        current = self._current
        if current is None or message.checkpoint != self.number:
            return
        self.context.retries.done(("save", message.name), now)
        if current.late.get(message.name) != "":
            return
        current.heard_at = now
        if message.error:
            self._lack(message.name, message.error)
        elif not message.file:
            self._keep(message)
        else:
            self._receive(current, message, now)
        self._complete_if_all(now)

    def _receive(self, current: _Current, saved: m.Saved, now: float) -> None:
        """Transfer a file from the host where it was saved, or verify it if it is here. A server's
        file on this machine is trusted.
        """
        agent = self.members.daemons[saved.name].agent
        if saved.file != saved_file(saved.name) or not saved.sha256:
            self._lack(saved.name, "its file has an unexpected name, or no checksum")
            return
        if agent == HOME_AGENT and saved.name.startswith("server"):
            self._keep(saved)
            return
        file = checkpoint_file(current.directory, saved.file)
        current.late[saved.name] = file
        done = partial(self._on_file, self.number, saved, agent)
        if agent == HOME_AGENT:
            self.transfers.check(file, saved.nbytes, saved.sha256, done, self._on_progress)
        else:
            wanted = WantedFile(file, saved.nbytes, saved.sha256)
            self.transfers.fetch(agent, wanted, done, now, self._on_progress)

    def _keep(self, saved: m.Saved) -> None:
        """The checkpoint has all that this daemon has saved."""
        assert self._current is not None
        del self._current.late[saved.name]
        self._current.saved[saved.name] = saved

    def _on_progress(self, now: float) -> None:
        if self._current is not None:
            self._current.heard_at = now

    def _on_file(self, number: int, saved: m.Saved, agent: str, error: str, now: float) -> None:
        current = self._current
        if current is None or self.number != number:
            return
        current.heard_at = now
        if error:
            there = "" if agent == HOME_AGENT else f"its file was not received from {agent}: "
            self._lack(saved.name, there + error)
        else:
            if agent != HOME_AGENT:
                self.context.send(agent, m.FileTaken(current.late[saved.name]))
            self._keep(saved)
        self._complete_if_all(now)

    def _lack(self, name: str, error: str) -> None:
        """A daemon saves nothing that is of use. A checkpoint is complete without a worker's
        residual, not without a shard.
        """
        assert self._current is not None
        if name.startswith("server"):
            self._fail(name, error)
            return
        self.context.note("warning", f"the checkpoint is saved without {name}: {error}")
        self._current.without.add(name)
        self._forget(self._current, name)

    def _fail(self, name: str, error: str) -> None:
        """The first error counts; the checkpoint fails with it once all daemons have answered."""
        assert self._current is not None
        self._current.error = self._current.error or f"{name}: {error}"
        self._forget(self._current, name)

    def _forget(self, current: _Current, name: str) -> None:
        """Stop waiting for a daemon's part of the checkpoint."""
        self.context.retries.drop(("save", name))
        if file := current.late.pop(name):
            self.transfers.cancel(file)

    def on_gone(self, name: str, now: float, *, lost: str = "") -> None:
        """A daemon has died. lost: why a file that it has saved is lost, too; "" if it is not."""
        file = self._current.late.get(name) if self._current is not None else None
        if file == "" or (file and lost):
            self._lack(name, lost or "it died while it was saving")
            self._complete_if_all(now)

    def on_deadline(self, now: float) -> None:
        current = self._current
        if current is None:
            return
        if now < current.begun + EVALUATE_S_MAX and self._evaluates(current):
            current.heard_at = now
        until = self.deadline()
        if until is None or now < until:
            return
        if current.is_asked and all(name.startswith("worker") for name in current.late):
            # What they have not pushed belongs to portions that are not done: it is done again.
            for name in self.late():
                self._lack(name, "it has not saved in time")
            self._complete_if_all(now)
        else:
            self._end(f"{', '.join(self.waits_for())}: no answer for {SAVE_S_MAX:.0f} s", now)

    def _complete_if_all(self, now: float) -> None:
        current = self._current
        if current is None or current.late or not current.is_asked:
            return
        # A run without servers has as many models as replicas; the first one is the run's.
        models = [s for s in self._saved("worker") if "lo" in s.state][:1]
        shards = self._saved("server") or models
        if error := current.error or ("" if shards else "no worker has saved its model"):
            self._end(error, now)
            return
        manifest = current.manifest | {
            "number": self.number,
            "step": current.step,
            "shards": [part_of(s) for s in shards],
            "workers": [part_of(s) for s in self._saved("worker") if s.file],
        }
        if current.of_servers and (error := _misfit(manifest)):
            self._end(error, now)
            return
        options, directory = self.job.checkpoints, current.directory
        self.context.do(
            CompleteCheckpoint(self.number, directory, manifest, options.keep, options.best)
        )

    def _saved(self, role: str) -> list[m.Saved]:
        assert self._current is not None
        saved = self._current.saved
        return [saved[d.name] for d in self.members.of_role(role) if d.name in saved]

    def _end(self, error: str, now: float) -> None:
        current, self._current = self._current, None
        assert current is not None
        for name in list(current.late):
            self._forget(current, name)
        row: dict[str, Any] = {
            "number": self.number,
            "step": current.step,
            "path": current.directory,
            "nbytes": sum(s.nbytes for s in current.saved.values()),
            "seconds": round(now - current.begun, 3),
            "at": now,
            "error": error,
            "without": sorted(current.without) if self._leaves_residuals() else [],
        }
        self.last_error, self.last_s = error, row["seconds"]
        if not error:
            self.newest = row
            for name in row["without"]:
                text = f"the checkpoint at step {current.step} is without {name}'s residual"
                self.context.event("checkpoint", name, text)
        self.context.do(RecordCheckpoint(self.number, row))
        self.mirror.on_checkpoint(row, now)
        self.schedule(now)
        for listener in current.listeners:
            listener(row)

    def _leaves_residuals(self) -> bool:
        """Whether a push leaves a residual for the next one, which a checkpoint may lack."""
        choice = self.job.compression
        return choice.name != "none" or choice.options.get("values", "float32") != "float32"


# ---------------------------------------------------------------- the manifest


def _misfit(manifest: Json) -> str:
    """Why no server with another part of the model can continue from it; "": one can."""
    try:
        state_of(manifest, *NO_PART)
    except ValueError as error:
        return str(error)
    return ""


def part_of(saved: m.Saved) -> Json:
    """The manifest's entry for one file."""
    part: Json = {"name": saved.name, "file": saved.file, "sha256": saved.sha256}
    part |= {"nbytes": saved.nbytes, "state": saved.state}
    lo_hi = {key: saved.state[key] for key in ("lo", "hi") if key in saved.state}
    return part | lo_hi
