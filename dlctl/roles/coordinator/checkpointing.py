"""One checkpoint at a time: every shard and every replica saves, then the manifest makes it count.

A shard copies its state between two pushes, so each file is consistent in itself; nobody waits for
another. Pushes of portions that were done before the first `Save` went out are in every shard, so
these are what the manifest calls done. With a compressor that leaves a residual, what a worker
pushes between a shard's copy and its own is in neither file. After a drain, as at every orderly
stop, nothing is on the way and the files fit together exactly.

What was saved on another host counts when it has come to this one, whole and durably (`Transfers`);
then it is removed there. What a worker has saved beside the coordinator counts when that has looked
at it: a checkpoint that is called complete takes the places of older ones.

What a checkpoint holds, and what its manifest says of its run and of each file.
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
"""Without an answer, or without any bytes of what is on its way from another host, or looked at
here. A worker that evaluates, as it says itself, has so long when it has ended that, or when it had
to end it."""
STUCK_S_MAX = 20.0
"""The same, if only workers are waited for that hang, as they say themselves, and do not save. One
that hangs with all of its steps pushed can save nevertheless, unless torch keeps something for it:
it begins at once, and says so."""
GIVEN_UP_S_MAX = 5.0
"""The same, if these have been waited for before, while draining."""
Finished = Callable[[Json], None]
"""Called with the checkpoint's row; its "error" is "" if it is complete."""


@dataclass(slots=True)
class _Current:
    number: int
    step: int
    begun: float
    manifest: Json
    """As it was when the checkpoint began; the files are filled in at the end."""
    is_last: bool
    directory: str = ""
    missing: set[str] = field(default_factory=set)
    """Who has not answered."""
    coming: dict[str, str] = field(default_factory=dict)
    """Whose file is on its way from another host, and its name here."""
    heard_at: float = 0.0
    """When they were asked, or the newest answer came, or bytes of what is on its way or looked at.
    """
    evaluated_at: float = 0.0
    """When a worker that is waited for said last that it evaluates."""
    saved: dict[str, m.Saved] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)
    """Workers whose files will not come, although they had something to save."""
    error: str = ""
    listeners: list[Finished] = field(default_factory=list)


@dataclass(eq=False)
class Checkpointing:
    context: History
    members: Membership
    options: Checkpoints
    number: int
    """Of the newest checkpoint that there has been."""
    transfers: Transfers
    leaves_residuals: bool = True
    """Whether pushes leave something that a checkpoint without a worker's file has lost."""
    newest: Json | None = field(default=None, init=False)
    last_error: str = field(default="", init=False)
    _current: _Current | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    """The newest attempt, or when the workers were let loose."""
    _next_at: float | None = field(default=None, init=False)
    _given_up: set[str] = field(default_factory=set, init=False)

    @property
    def active(self) -> bool:
        return self._current is not None

    def schedule(self, now: float, since_s: float = 0.0) -> None:
        """From now on a checkpoint every `every_s` seconds, the next one so long after the newest
        attempt, which was `since_s` ago.
        """
        self._since = now - since_s
        self._next_at = (
            max(now, self._since + self.options.every_s) if self.options.every_s else None
        )

    def since_s(self, now: float) -> float:
        """How long the newest attempt is ago."""
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
            return 0.0  # Nothing comes of it any more.
        return GIVEN_UP_S_MAX if current.missing <= self._given_up else STUCK_S_MAX

    def _hangs(self, current: _Current, daemon: Daemon | None) -> bool:
        """Whether it can hardly save: it hangs, or has steps that no shard takes any more."""
        if daemon is None or daemon.saves(current.number):
            return False
        was_late = current.is_last and daemon.name in self._given_up
        return daemon.hangs or (was_late and daemon.phase in ("pushing", "fetching"))

    def _evaluates(self, current: _Current) -> bool:
        """Whether only workers are waited for, and one of them cannot save before it has ended an
        evaluation.
        """
        late = [d for d in map(self.members.get, current.missing) if d is not None]
        return all(d.role == "worker" for d in late) and any(d.evaluates for d in late)

    def _gives_up_at(self, current: _Current) -> float | None:
        """When those are given up that it waits for, at the latest."""
        until = self.deadline()
        if until is not None and self._evaluates(current):
            return max(until, current.begun + EVALUATE_S_MAX + SAVE_S_MAX)
        return until

    def does_without_at(self) -> float | None:
        """When those are given up that it waits for, if they can hardly answer, or not before."""
        current = self._current
        if current is None:
            return None
        is_usual = self._limit_s(current) == SAVE_S_MAX and not self._evaluates(current)
        return None if is_usual else self._gives_up_at(current)

    def is_due(self, now: float) -> bool:
        return self._current is None and self._next_at is not None and self._next_at <= now

    def late(self) -> list[str]:
        """Whose file is not here yet."""
        current = self._current
        return sorted(current.missing | current.coming.keys()) if current else []

    def at_work_on(self) -> str:
        """What is being made while nobody's file is waited for: before they are asked, and after
        the last one has come.
        """
        has_directory = self._current is not None and self._current.directory
        return "the manifest" if has_directory else "a directory for the checkpoint"

    def waiting(self) -> str:
        return ", ".join(self.late())

    def to_json(self) -> Json | None:
        """{"at": seconds, "waiting": names, "gives_up_at": seconds or None} of a present one."""
        if self._current is None:
            return None
        until = self._gives_up_at(self._current)
        return {"at": self._current.begun, "waiting": self.waiting(), "gives_up_at": until}

    def begin(
        self, step: int, manifest: Json, now: float, listener: Finished | None,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Begin a checkpoint, or join the one that is under way. is_last: shards have to stay as
        they are saved.
        """
        if self._current is None:
            self.number += 1
            self._current = _Current(self.number, step, now, manifest, is_last)
            self.context.do(BeginCheckpoint(self.number, step))
        if listener is not None:
            self._current.listeners.append(listener)

    def on_event(self, event: CheckpointBegun | CheckpointEnded, now: float) -> None:
        if isinstance(event, CheckpointBegun):
            self.on_begun(event, now)
        elif self._current is not None and self._current.number == event.number:
            self._end(event.error, now)

    def on_begun(self, event: CheckpointBegun, now: float) -> None:
        current = self._current
        if current is None or current.number != event.number:
            return
        if event.error:
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
        self._complete_if_all(now)  # Without servers and workers there is nobody to wait for.

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
            self._look_at(current, message, daemon.agent if daemon else HOME_AGENT, now)
        self._complete_if_all(now)

    def _look_at(self, current: _Current, saved: m.Saved, agent: str, now: float) -> None:
        """Have a file come from the host where it was saved, or have it looked at here; but a
        server is believed.
        """
        if saved.file != saved_file(saved.name) or not saved.sha256:
            error = "its file has another name than it should, or no checksum"
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
            self._fail(saved.name, f"its file did not come from {agent}: {error}")
        else:
            current.saved[saved.name] = saved
            if agent != HOME_AGENT:
                self.context.send(agent, m.FileTaken(file))
        self._complete_if_all(now)

    def _refuse(self, current: _Current, name: str, error: str) -> None:
        """What was saved is not what it should be: without a worker's file it can be done."""
        if name.startswith("server"):
            self._fail(name, error)
        else:
            self.context.note("warning", f"the checkpoint does without {name}: {error}")
            current.without.add(name)

    def _fail(self, name: str, error: str) -> None:
        """The first error counts; the others are awaited before the checkpoint ends with it."""
        assert self._current is not None
        self._current.error = self._current.error or f"{name}: {error}"

    def on_gone(self, name: str, now: float) -> None:
        """A daemon has died. Without a worker's residual a checkpoint is whole, without a shard
        not.
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
        """These workers have not drained in time: they are not waited for so long again."""
        self._given_up |= set(names)

    def on_host_gone(self, names: list[str], now: float) -> None:
        """The host of these is away: what a worker has saved there will not come, either."""
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
            # What they have not pushed is in no portion that counts as done: it is done again.
            self.context.note("warning", f"the checkpoint does without {self.waiting()}")
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


# ---------------------------------------------------------------- what a checkpoint says of its run

FAILURE_CHARS = 500


def leaves_residuals(job: JobFile) -> bool:
    """Whether a push leaves anything to the next one."""
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
    """What a checkpoint that begins now says of its run.

    `data`: how far it is (`LeaseScheduler.to_json`). `failure`: why the run has failed, or "".
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
    """What is said of one file."""
    part: Json = {"name": saved.name, "file": saved.file, "sha256": saved.sha256}
    part |= {"nbytes": saved.nbytes, "state": saved.state}
    lo_hi = {key: saved.state[key] for key in ("lo", "hi") if key in saved.state}
    return part | lo_hi
