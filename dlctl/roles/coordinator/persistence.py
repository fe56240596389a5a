"""The coordinator's persisted state, and how the next coordinator of the run recovers from it.

Every part owns pieces of the state, and notices itself which of them may have changed
(`Remembers`); `dlctl/records/memory.py` lists the pieces.

After every event the changed pieces become `Remember` effects, ahead of the messages of that event.
So no other process learns of a decision that a crash could undo; on a full disk, of no decision
whose loss would cost pushes (`Lasting`).

`Lasting` holds messages back until what they depend on is on the disk. Their receivers retry.

- Issued terms: two processes with one term would lose acknowledged pushes.
- Servers that have served: so would a shard that starts over because its start is not on record.
- The results of a method that the coordinator drives: an operation would be repeated on vectors
  that have changed since. For these a write to the database is enough, as for all else.
- The release of the workers: the next coordinator would release them again, with the residuals of
  the checkpoint, which the shards already contain.
- The source of the run's frozen parameters: workers could use two different ones.
- Decisions for all shards: the next coordinator could decide differently for the shards that have
  not received them. On a full disk, a method with such decisions pauses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from dlctl.records.memory import (
    CLOSED,
    DAEMON,
    Clock,
    Cut,
    End,
    Entry,
    Memory,
    MemoryRecord,
    RunMemory,
)
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.records import Remember, Remembers
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.supervision.registration import Past, Registration
from dlctl.roles.coordinator.supervision.scaling import Scaling
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.util.names import HOME_AGENT
from dlctl.wire.machine import Effect
from dlctl.wire.messages import (
    Decided,
    Json,
    Lease,
    Message,
    NewBounds,
    NormTotal,
    Recut,
    Topology,
    VectorOp,
    Welcome,
)

UNWRITTEN_S_MIN = 3.0
"""A healthy coordinator writes more often than this."""


@dataclass(eq=False)
class Persistence(CoordinatorPart):
    past: Past
    parts: Sequence[Remembers]
    """The parts with persisted state, in the order in which they are restored."""
    registration: Registration
    lead: MethodLead
    settings: SettingChanges
    evaluations: Evaluations
    checkpointing: Checkpointing
    scaling: Scaling
    rotation: Rotation
    _record: MemoryRecord = field(default_factory=MemoryRecord, init=False)

    # ------------------------------------------------------------ writing

    def changes(self, now: float) -> list[Effect]:
        """Effects that persist what an event has changed."""
        end = self.run.shutdown
        owners: Sequence[Remembers] = self.parts if end is None else (*self.parts, end)
        pieces = chain.from_iterable(owner.changes() for owner in owners)
        changed = self._record.changes(chain(pieces, [Entry(Clock.KEY, self._clock(now))]))
        return [Remember(key, value) for key, value in changed.items()]

    def _clock(self, now: float) -> Clock | None:
        """The run's clock, which changes once a second, and when a checkpoint has been tried."""
        if self.run.released_at is None:
            return None
        worked_s = int(now - self.run.released_at)
        since_s = self.checkpointing.since_s(self.run.released_at + worked_s)
        return Clock(worked_s, since_s)

    # ------------------------------------------------------------ reading

    def resume(self, now: float) -> None:
        """Recover from the state that a dead coordinator has persisted."""
        memory = Memory(self.past.memory)
        was = memory.piece(RunMemory) or RunMemory()
        self._restore(memory, now)
        if memory.has_released:
            clock = memory.piece(Clock) or Clock()
            self.run.released_at = now - clock.worked_s
            self.registration.restore, self.registration.under_way = "", True
            # A failed run was saved when it failed. Another checkpoint at once, before it fails
            # again, would let a possibly ruined model count among the retained checkpoints.
            since_s = 0.0 if was.state == "failed" else clock.checkpoint_s + self.past.gone_s
            self.checkpointing.schedule(now, since_s)
        gone = f" after {self.past.gone_s:.0f} s" if self.past.gone_s else ""
        forgotten, unwritten_s = "", self.past.unwritten_s
        if unwritten_s >= UNWRITTEN_S_MIN:
            since = f"the {unwritten_s:.0f} s before it died are not on record"
            forgotten = f"{since}: what was trained in them is trained again"
        text = f"the coordinator is back{gone}: {forgotten or 'it goes on where it was'}"
        self.run.context.event(
            "recover", "coordinator", text, forgotten=forgotten, code="coordinator-restarted"
        )
        self.control.change_state("running" if memory.has_released else "starting", "", now)
        end = memory.piece(End) if was.state in ("stopping", "stopped", "finished") else None
        ours = self.run.keyring.fingerprint
        daemons = list(self.run.members.daemons.values())
        if memory.value("keys", ours) != ours:
            daemons = [daemon for daemon in daemons if not daemon.alive]
            self.rotation.restart_all(now)
        for daemon in daemons:
            self._recover(daemon, end is not None, now)
        self.registration.assign(now)
        if (asked := self.evaluations.interrupted(memory)) and (end or not asked.finishes):
            is_last = asked.is_last and end is not None
            self.evaluations.resume(replace(asked, is_last=is_last), now)
        if memory.has_released:
            self.lead.begin()
        if end is not None:
            self.control.end(
                end.state, end.reason, now, grace_s=end.grace_s, at_once=end.is_shutting_down,
                was_closed=memory.value(CLOSED, False),
            )  # fmt: skip
        else:
            self.scaling.resume(now)

    def _restore(self, memory: Memory, now: float) -> None:
        # All is written once more: `Lasting` learns from the first records what is on record.
        self._record = MemoryRecord(memory.stored)
        for part in self.parts:
            part.recall(memory, now)
        for name, daemon in self.run.members.daemons.items():
            daemon.last_exit = self.past.daemons.get(name, {}).get("last_exit")
        # The agent on this machine may be a newer process than the one on record, if its start
        # could not be written. It keeps running, and registers as if it had just been started.
        agent = self.run.members.daemons[HOME_AGENT]
        newest = self.past.agents.get(agent.name, 0)
        if newest > agent.incarnation:
            agent.incarnation = newest - 1
            agent.begin(now)

    def _recover(self, daemon: Daemon, is_ending: bool, now: float) -> None:
        """Repeat requests that may have been lost; agents report the state of the rest."""
        daemon.forgive()  # It may have died because of the coordinator.
        if daemon.role == "agent":
            # Only the agent on this machine can be checked; the others send heartbeats or not. An
            # agent that never registered may never have been started.
            is_here = self.past.agents.get(daemon.name) == daemon.incarnation
            is_there = is_here if daemon.name == HOME_AGENT else daemon.registered
            if daemon.alive and not is_there and daemon.name == HOME_AGENT:
                self.control.presume_dead(daemon, now)
            elif not daemon.alive or not is_there:
                self.control.start_daemon(daemon, now)
        elif daemon.role == "guest":
            return  # It registers again, or is silent.
        elif daemon.state in ("stopped", "failed") and not is_ending:
            daemon.change_state(daemon_states.BACKOFF)
            daemon.retry_at = now
        elif daemon.alive and daemon.pid is None:
            self.registration.request_spawn(daemon, now)
        elif daemon.alive:
            # Its agent may have reported its exit, and the acknowledgement was not on record.
            daemon.agent_incarnation = 0
        if daemon.role == "worker":
            self.registration.tell_bounds(now, daemon)
        if daemon.alive and daemon.role == "server" and daemon.address:
            self.registration.notify_moved(daemon, now)
        if daemon.alive and daemon.settings:
            self.settings.begin({daemon.name: daemon.settings}, now, lambda rows: None)


# ---------------------------------------------------------------- what must be on the disk first


class Lasting:
    def __init__(self) -> None:
        self.is_on_disk = False
        """All of it. Of what the predecessor wrote this is not known."""
        self._served: set[str] = set()
        self._is_before_release = False
        """The release of the workers is not on record yet; in a recovered run it is."""
        self._held: set[type[Message]] = set()
        """Leases until the release is on the disk; operations of a method that the coordinator
        drives, until its journal is.
        """
        self._is_awaited = False

    def issues_term(self) -> None:
        self.is_on_disk = False

    def await_all(self) -> None:
        """Request a notification when everything so far is on the disk."""
        self._is_awaited, self.is_on_disk = True, False

    def remembers(self, key: str, value: Any) -> None:
        """A piece of the coordinator's state is to be written."""
        if isinstance(value, dict) and value.get("has_served") and key not in self._served:
            self._served.add(key)
            self.is_on_disk = False
        elif isinstance(value, dict) and value.get("has_served") is False:
            self._served.discard(key)  # It has another part of the model.
        if key in ("quorum", "norm", "frozen", Cut.KEY):
            self.is_on_disk = False
        if key == "lead":
            self._held.add(VectorOp)
        if key == "run":
            is_released = Memory({key: value}).has_released
            if is_released and self._is_before_release:
                self._held.add(Lease)
                self.is_on_disk = False
            self._is_before_release = not is_released

    def written(self) -> bool:
        """Everything so far is on the disk; returns whether `await_all` was called."""
        was_awaited, self._is_awaited = self._is_awaited, False
        self.is_on_disk = True
        self._held.clear()
        return was_awaited

    def may_leave(self, message: Message) -> bool:
        """Leases leave even while other messages wait for disk space: training continues."""
        if isinstance(message, Lease | VectorOp):
            return type(message) not in self._held
        waits = isinstance(message, Topology | NewBounds | Recut | Decided | NormTotal) or (
            isinstance(message, Welcome) and message.term
        )
        return self.is_on_disk or not waits


def corrected(memory: Mapping[str, Any], recovery: Mapping[str, list[str]]) -> dict[str, Json]:
    """The rows of daemons that `dlctl recover` corrects in the persisted state. recovery: what the
    command found: `served`, servers that left a shard, and `gone`, agents that no longer run on the
    hosts it asked.

    - A power loss may lose the record that a shard had a server, and keep the shard's journal. What
      was left of the part before the newest cut does not count: the checkpoint of that has it.
    - The coordinator must not wait for a heartbeat of an agent that is gone.
    - Quarantined workers are restarted if there are no others, as no worker would be left to train;
      and if the run has failed: all others are restarted as well, and the cause may be fixed.
    """
    before = Memory(memory)
    cut = before.piece(Cut)
    rows = {DAEMON + name: row for name, row in before.under(DAEMON)}
    changed: dict[str, Json] = {}
    for key, row in rows.items():
        name = key.removeprefix(DAEMON)
        if name in recovery.get("served", ()) and not (cut and cut.ends(row["index"], row["term"])):
            changed[key] = {**row, "has_served": True}
        elif name in recovery.get("gone", ()):
            changed[key] = {**row, "registered": False}
    workers = {key: row for key, row in rows.items() if row.get("role") == "worker"}
    lost = {key: row for key, row in workers.items() if row.get("state") == "quarantined"}
    if lost == workers or (before.piece(RunMemory) or RunMemory()).state == "failed":
        changed |= {key: {**row, "state": "stopped"} for key, row in lost.items()}
    return changed
