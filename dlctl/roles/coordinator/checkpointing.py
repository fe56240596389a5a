"""One checkpoint at a time: every shard and every replica saves, then the manifest makes it count.

A shard copies its state between two pushes, so each file is consistent in itself; no process waits
for another. Pushes of portions that were done before the first `Save` was sent are in every shard,
so the manifest lists these as done. With a compressor that leaves a residual, what a worker pushes
between a shard's copy and its own is in neither file. After a drain, as at every orderly stop, no
message is in flight and the files fit together exactly.

A file saved on another host counts once it has arrived here, complete and durable (`Transfers`);
then it is removed there. A worker's file saved on this machine counts once it has been verified: a
complete checkpoint supersedes older ones.

Also defines the contents of a checkpoint and of its manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dlctl import messages as m
from dlctl import registry
from dlctl.config import Checkpoints, JobFile
from dlctl.flat import Layout
from dlctl.machine import Peer
from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Daemon, Membership
from dlctl.roles.coordinator.records import (
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointEnded,
    CompleteCheckpoint,
    History,
    RecordCheckpoint,
)
from dlctl.roles.protocol.files import Transfers, Wanted, checkpoint_file, saved_file
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.runs.manifest import FAILURE, MEAN
from dlctl.util.names import HOME_AGENT

SAVE_S_MAX = 120.0
"""Timeout without an answer, and without progress in the transfer or check of a file. For a worker
that reports that it evaluates it starts when the evaluation ends, or had to end."""
STUCK_S_MAX = 20.0
"""The same, if the only workers left report that they hang, and do not save. A worker that hangs
with all of its steps pushed can still save, unless torch keeps state for it."""
GIVEN_UP_S_MAX = 5.0
"""The same, if these workers have already timed out while draining."""
Finished = Callable[[Json], None]
"""Called with the checkpoint's row; its "error" is "" if it is complete."""


@dataclass(slots=True)
class _Current:
    number: int
    step: int
    begun: float
    manifest: Json
    """State at the start of the checkpoint; the files are filled in at the end."""
    is_last: bool
    directory: str = ""
    missing: set[str] = field(default_factory=set)
    """Daemons that have not answered."""
    coming: dict[str, str] = field(default_factory=dict)
    """Daemon whose file is being transferred or verified -> the file's name here."""
    heard_at: float = 0.0
    """Time of the requests, or of the newest answer or progress of a file."""
    evaluated_at: float = 0.0
    """When a missing worker last reported that it evaluates."""
    saved: dict[str, m.Saved] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)
    """Workers whose files are missing, although they had something to save."""
    error: str = ""
    listeners: list[Finished] = field(default_factory=list)


@dataclass(eq=False)
class Checkpointing:
    context: History
    members: Membership
    options: Checkpoints
    number: int
    """Of the newest checkpoint so far."""
    transfers: Transfers
    leaves_residuals: bool = True
    """Whether workers have residuals, which a checkpoint without their files lacks."""
    newest: Json | None = field(default=None, init=False)
    last_error: str = field(default="", init=False)
    _current: _Current | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    """Time of the newest attempt, or of the release of the workers."""
    _next_at: float | None = field(default=None, init=False)
    _given_up: set[str] = field(default_factory=set, init=False)

    @property
    def active(self) -> bool:
        return self._current is not None

    def schedule(self, now: float, since_s: float = 0.0) -> None:
        """Schedule a checkpoint every `every_s` seconds, counted from the newest attempt, which was
        `since_s` ago.
        """
        self._since = now - since_s
        self._next_at = (
            max(now, self._since + self.options.every_s) if self.options.every_s else None
        )

    def since_s(self, now: float) -> float:
        """Seconds since the newest attempt."""
        return now - self._since

    def deadline(self) -> float | None:
        current = self._current
        if current is None:
            return self._next_at
        if current.directory and not self.late():
            return None
        since = max(current.begun, current.heard_at, current.evaluated_at)
        return since + self._limit_s(current)

    def _limit_s(self, current: _Current) -> float:
        late = [self.members.get(name) for name in current.missing]
        if current.coming or not late or not all(self._hangs(current, d) for d in late):
            return SAVE_S_MAX
        if current.error:
            return 0.0  # It fails anyway.
        return GIVEN_UP_S_MAX if current.missing <= self._given_up else STUCK_S_MAX

    def _hangs(self, current: _Current, daemon: Daemon | None) -> bool:
        """Whether it can hardly save: it hangs, or has steps that no shard accepts any more."""
        if daemon is None or daemon.saves(current.number):
            return False
        was_late = current.is_last and daemon.name in self._given_up
        return daemon.hangs or (was_late and daemon.phase in ("pushing", "fetching"))

    def _evaluates(self, current: _Current) -> bool:
        """Whether only workers are missing, and one of them must finish an evaluation first."""
        late = [d for d in map(self.members.get, current.missing) if d is not None]
        return all(d.role == "worker" for d in late) and any(d.evaluates for d in late)

    def _gives_up_at(self, current: _Current) -> float | None:
        """Upper bound of the time at which the missing daemons are given up."""
        until = self.deadline()
        if until is not None and self._evaluates(current):
            return max(until, current.begun + EVALUATE_S_MAX + SAVE_S_MAX)
        return until

    def does_without_at(self) -> float | None:
        """When the missing daemons are given up, if they hang or evaluate; else None."""
        current = self._current
        if current is None:
            return None
        is_usual = self._limit_s(current) == SAVE_S_MAX and not self._evaluates(current)
        return None if is_usual else self._gives_up_at(current)

    def is_due(self, now: float) -> bool:
        return self._current is None and self._next_at is not None and self._next_at <= now

    def late(self) -> list[str]:
        """Daemons whose file has not arrived."""
        current = self._current
        return sorted(current.missing | current.coming.keys()) if current else []

    def at_work_on(self) -> str:
        """What is being written while no file is missing: before the daemons are asked, and after
        the last file has arrived.
        """
        has_directory = self._current is not None and self._current.directory
        return "the manifest" if has_directory else "a directory for the checkpoint"

    def waiting(self) -> str:
        return ", ".join(self.late())

    def to_json(self) -> Json | None:
        """{"at": seconds, "waiting": names, "gives_up_at": seconds or None}; None: none active."""
        if self._current is None:
            return None
        until = self._gives_up_at(self._current)
        return {"at": self._current.begun, "waiting": self.waiting(), "gives_up_at": until}

    def begin(
        self, step: int, manifest: Json, now: float, listener: Finished | None,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Begin a checkpoint, or join the current one. is_last: shards must not change after they
        are saved.
        """
        if self._current is None:
            self.number += 1
            self._current = _Current(self.number, step, now, manifest, is_last)
            self.context.do(BeginCheckpoint(self.number, step))
        if listener is not None:
            self._current.listeners.append(listener)

    def on_event(self, event: CheckpointBegun | CheckpointEnded, now: float) -> None:
        current = self._current
        if current is None or current.number != event.number:
            return
        if event.error or isinstance(event, CheckpointEnded):
            self._end(event.error, now)
            return
        current.directory, current.heard_at = event.directory, now
        asked = self.members.of_role("server") + [
            d for d in self.members.of_role("worker")
            if d.alive and d.asked_for_data and not d.out_of_touch
        ]  # fmt: skip
        current.missing = {d.name for d in asked}
        for name in sorted(current.missing):
            message = m.Save(current.number, event.directory, current.is_last)
            self.context.ask(("save", name), name, message, now)
        self._complete_if_all(now)  # There may be no daemon to wait for.

    def on_saved(self, peer: Peer, message: m.Saved, now: float) -> None:
        current = self._current
        if current is None or message.checkpoint != current.number:
            return
        self.context.retries.done(("save", message.name), now)
        if message.name not in current.missing:
            return
        current.missing.discard(message.name)
        current.heard_at = now
        daemon = self.members.get(message.name)
        if message.error:
            self._fail(message.name, message.error)
        elif not message.file:
            current.saved[message.name] = message
        else:
            self._receive(current, message, daemon.agent if daemon else HOME_AGENT, now)
        self._complete_if_all(now)

    def _receive(self, current: _Current, saved: m.Saved, agent: str, now: float) -> None:
        """Transfer a file from the host where it was saved, or verify it if it is here. A server's
        file on this machine is trusted.
        """
        if saved.file != saved_file(saved.name) or not saved.sha256:
            error = "its file has an unexpected name, or no checksum"
            self._refuse(current, saved.name, error)
            return
        if agent == HOME_AGENT and saved.name.startswith("server"):
            current.saved[saved.name] = saved
            return
        file = checkpoint_file(current.directory, saved.file)
        current.coming[saved.name] = file
        done = partial(self._on_file, current.number, saved, agent)
        if agent == HOME_AGENT:
            self.transfers.check(file, saved.nbytes, saved.sha256, done, self._on_progress)
        else:
            wanted = Wanted(file, saved.nbytes, saved.sha256)
            self.transfers.fetch(agent, wanted, done, now, self._on_progress)

    def _on_progress(self, now: float) -> None:
        if self._current is not None:
            self._current.heard_at = now

    def _on_file(self, number: int, saved: m.Saved, agent: str, error: str, now: float) -> None:
        current = self._current
        if current is None or current.number != number:
            return
        file, current.heard_at = current.coming.pop(saved.name), now
        if error and agent == HOME_AGENT:
            self._refuse(current, saved.name, error)
        elif error:
            self._fail(saved.name, f"its file was not received from {agent}: {error}")
        else:
            current.saved[saved.name] = saved
            if agent != HOME_AGENT:
                self.context.send(agent, m.FileTaken(file))
        self._complete_if_all(now)

    def _refuse(self, current: _Current, name: str, error: str) -> None:
        """A saved file is invalid: fatal for a server's file, not for a worker's."""
        if name.startswith("server"):
            self._fail(name, error)
        else:
            self.context.note("warning", f"the checkpoint is saved without {name}: {error}")
            current.without.add(name)

    def _fail(self, name: str, error: str) -> None:
        """The first error counts; the checkpoint fails with it once all daemons have answered."""
        assert self._current is not None
        self._current.error = self._current.error or f"{name}: {error}"

    def on_gone(self, name: str, now: float) -> None:
        """A daemon has died. A checkpoint is complete without a worker's residual, not without a
        shard.
        """
        current = self._current
        if current is None or name not in current.missing:
            return
        self.context.retries.drop(("save", name))
        current.missing.discard(name)
        if name.startswith("server"):
            current.error = current.error or f"{name} died while it was saving"
        else:
            current.without.add(name)
        self._complete_if_all(now)

    def give_up(self, names: list[str]) -> None:
        """These workers have not drained in time: a shorter timeout applies to them."""
        self._given_up |= set(names)

    def on_host_gone(self, names: list[str], now: float) -> None:
        """The daemons' host is unreachable: files that workers saved there are lost, too."""
        current = self._current
        for name in names:
            if current is not None and name in current.coming and name.startswith("worker"):
                self.transfers.cancel(current.coming.pop(name))
                current.without.add(name)
                self._complete_if_all(now)
            self.on_gone(name, now)

    def on_deadline(self, now: float) -> None:
        current = self._current
        if current is None:
            return
        if now < current.begun + EVALUATE_S_MAX and self._evaluates(current):
            current.evaluated_at = now
        until = self.deadline()
        if until is None or now < until:
            return
        late = current.missing | current.coming.keys()
        if current.directory and all(name.startswith("worker") for name in late):
            # What they have not pushed belongs to portions that are not done: it is done again.
            self.context.note("warning", f"the checkpoint is saved without {self.waiting()}")
            current.without |= late
            self._stop_fetching(current)
            for name in current.missing:
                self.context.retries.drop(("save", name))
            current.missing.clear()
            self._complete_if_all(now)
        else:
            self._end(f"no answer from {self.waiting()} for {SAVE_S_MAX:.0f} s", now)

    def _complete_if_all(self, now: float) -> None:
        current = self._current
        if current is None or current.missing or current.coming or not current.directory:
            return
        if current.error:
            self._end(current.error, now)
            return
        # A run without servers has as many models as replicas; the first one is the run's.
        models = [s for s in self._saved("worker") if "lo" in s.state][:1]
        shards = self._saved("server") or models
        if not shards:
            self._end("no worker has saved its model", now)
            return
        manifest = current.manifest | {
            "number": current.number,
            "step": current.step,
            "shards": [part_of(s) for s in shards],
            "workers": [part_of(s) for s in self._saved("worker") if s.file],
        }
        complete = CompleteCheckpoint(
            current.number, current.directory, manifest, self.options.keep, self.options.best
        )
        self.context.do(complete)

    def _stop_fetching(self, current: _Current) -> None:
        for file in current.coming.values():
            self.transfers.cancel(file)
        current.coming.clear()

    def _saved(self, role: str) -> list[m.Saved]:
        assert self._current is not None
        found = (self._current.saved.get(d.name) for d in self.members.of_role(role))
        return [saved for saved in found if saved is not None]

    def _end(self, error: str, now: float) -> None:
        current, self._current = self._current, None
        assert current is not None
        for name in current.missing:
            self.context.retries.drop(("save", name))
        self._stop_fetching(current)
        row: dict[str, Any] = {
            "number": current.number,
            "step": current.step,
            "path": current.directory,
            "nbytes": sum(s.nbytes for s in current.saved.values()),
            "seconds": round(now - current.begun, 3),
            "at": now,
            "error": error,
            "without": sorted(current.without) if self.leaves_residuals else [],
        }
        self.last_error = error
        if not error:
            self.newest = row
            for name in row["without"]:
                text = f"the checkpoint at step {current.step} is without {name}'s residual"
                self.context.event("checkpoint", name, text)
        self.context.do(RecordCheckpoint(current.number, row))
        self.schedule(now)
        for listener in current.listeners:
            listener(row)


# ---------------------------------------------------------------- the manifest

FAILURE_CHARS = 500


def leaves_residuals(job: JobFile) -> bool:
    """Whether a push leaves a residual for the next one."""
    choice = job.compression
    return choice.name != "none" or choice.options.get("values", "float32") != "float32"


def manifest_of(
    run_id: str,
    job: JobFile,
    layout: Layout,
    data: Json,
    evaluation: Json | None,
    failure: str,
    frozen: Json | None,
) -> Json:
    """The manifest of a checkpoint that begins now, without its files.

    `data`: the run's progress (`LeaseScheduler.to_json`). `failure`: why the run has failed, or "".
    `frozen`: the file of its frozen parameters (`FrozenParameters.part`), if there are any.
    """
    is_mean = registry.load("algorithms", job.algorithm.name).shape.model == "mean"
    return {
        "run_id": run_id,
        "job": job.job.name,
        "samples": data["samples"],
        "layout": layout.to_rows(),
        "size": layout.size(),
        "algorithm": job.algorithm.name,
        "optimizer": job.optimizer.name,
        "inner": job.inner.name,
        "data": data,
        "evaluation": evaluation,
        **({"frozen": frozen} if frozen else {}),
        **({MEAN: True} if is_mean else {}),
        **({FAILURE: failure[:FAILURE_CHARS]} if failure else {}),
    }


def part_of(saved: m.Saved) -> Json:
    """The manifest's entry for one file."""
    part: Json = {"name": saved.name, "file": saved.file, "sha256": saved.sha256}
    part |= {"nbytes": saved.nbytes, "state": saved.state}
    lo_hi = {key: saved.state[key] for key in ("lo", "hi") if key in saved.state}
    return part | lo_hi
