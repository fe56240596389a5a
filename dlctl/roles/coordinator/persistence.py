"""The coordinator's persisted state, and how the next coordinator of the run recovers from it.

The state that decides what the coordinator does next is stored in small pieces under keys:

    keys                the fingerprint of the run key that the daemons were started with
    run                 state, reason, whether the workers have been released
    clock               whole seconds since the release; then those since the newest checkpoint
                        attempt
    checkpoints         number of the newest checkpoint
    work                steps, samples and loss; the size of the dataset; the newest evaluation
    stream, names       of a dataset that is a stream: the number of its shards, their names
    clients, files      of another dataset: the samples of each client, the digest of its files
    order               the digest of the task's order, once the workers have been released
    metrics             what else the task's loss returns
    lead                the clock and the state of the method's lead; the journal of a lead that
                        drives the method
    scale               the rate's factor for the number of workers, and since when it applies
    norm                the newest norm by which all shards clip an update: its clock, its square
    quorum              the newest quorum decision for all shards: the clock, whose pushes count
    group               the members that are left out: slot and epoch
    evaluation          epochs or steps at the start of the newest evaluation; the one in progress
                        (`Asked`)
    finish              how often the task's `finish` was started, and its result
    layout              the model's tensors
    frozen              the file of the model's frozen parameters
    end                 how the run ends, once it does
    daemon/<name>       its incarnation, term, address and progress
    portion/<e>/<p>     the slot that has it, or RETURNED or DONE; p = -1: all of epoch e; of a
                        stream also p < -1: the state of a shard
    answer/<slot>       the newest lease of a slot, in case it has to be resent
    numbers             the newest number that was issued (`History.next_number`)
    log/<daemon>.<i>    of a process on another host: its agent, how much of its log is copied

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from dlctl.machine import Effect
from dlctl.messages import Decided, Json, Lease, Message, NormTotal, Topology, VectorOp, Welcome
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Asked, Evaluations
from dlctl.roles.coordinator.lead import MethodLead
from dlctl.roles.coordinator.membership import LASTING, Daemon
from dlctl.roles.coordinator.records import Remember, Remembers
from dlctl.roles.coordinator.registration import Past, Registration
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.run_progress import RunProgress
from dlctl.roles.coordinator.run_state import Part
from dlctl.roles.coordinator.scaling import Scaling
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.supply import DataSupply
from dlctl.runs.evaluated import Result
from dlctl.util.names import HOME_AGENT

UNWRITTEN_S_MIN = 3.0
"""A healthy coordinator writes more often than this."""


def has_released(memory: Json) -> bool:
    """Whether the workers of this execution were released: from then on the checkpoint that it
    resumed from is not needed.
    """
    return "run" in memory and memory["run"][2] is not None


@dataclass(eq=False)
class Persistence(Part):
    past: Past
    parts: Sequence[Remembers]
    """Restored in this order."""
    registration: Registration
    data: DataSupply
    lead: MethodLead
    progress: RunProgress
    settings: SettingChanges
    evaluations: Evaluations
    checkpointing: Checkpointing
    scaling: Scaling
    rotation: Rotation
    _known: dict[str, Any] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------ writing

    def changes(self, now: float) -> list[Effect]:
        """Effects that persist what an event has changed."""
        memory = dict(self._memory(now))
        for part in self.parts:
            memory.update(part.memory())
        changed: list[Effect] = [
            Remember(key, _jsonable(key, value))
            for key, value in memory.items()
            if self._known.get(key) != value
        ]
        changed += [Remember(key, None) for key in sorted(self._known.keys() - memory.keys())]
        self._known = memory
        changed += [Remember(*portion) for portion in self.data.changed_portions()]
        return changed

    def _memory(self, now: float) -> Iterator[tuple[str, Any]]:
        """State that belongs to no single part."""
        released_at = self.run.released_at
        yield "keys", self.run.keyring.fingerprint
        yield "run", (self.run.state, self.run.reason, None if released_at is None else True)
        if released_at is not None:
            worked_s = int(now - released_at)
            yield "clock", [worked_s, self.checkpointing.since_s(released_at + worked_s)]
        yield "checkpoints", self.checkpointing.number
        newest, asked = self.evaluations.newest, self.evaluations.asked
        found = None if newest is None else newest.to_json()
        yield "work", (*self.progress.work(), *self.data.work(), found)
        yield "evaluation", (self.progress.evaluated_at, None if asked is None else astuple(asked))
        if self.evaluations.has_finish:
            yield "finish", (self.evaluations.finishes, self.evaluations.finished)
        if self.run.shutdown is not None:
            end = self.run.shutdown
            yield "end", (end.state, end.reason, end.grace_s, end.is_shutting_down())
        yield from self.run.members.memory()

    # ------------------------------------------------------------ reading

    def go_on(self, now: float) -> None:
        """Recover from the state that a dead coordinator has persisted."""
        values = self.past.memory
        state = values["run"][0]
        was_released = has_released(values)
        self._restore(values, now)
        if was_released:
            worked_s, checkpoint_s = values.get("clock", (0.0, 0.0))
            self.run.released_at = now - worked_s
            self.registration.restore, self.registration.under_way = "", True
            # A failed run was saved when it failed. Another checkpoint at once, before it fails
            # again, would let a possibly ruined model count among the retained checkpoints.
            since_s = 0.0 if state == "failed" else checkpoint_s + self.past.gone_s
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
        self.control.change_state("running" if was_released else "starting", "", now)
        is_ending = "end" in values and state in ("stopping", "stopped", "finished")
        ours = self.run.keyring.fingerprint
        daemons = list(self.run.members.daemons.values())
        if values.get("keys", ours) != ours:
            daemons = [daemon for daemon in daemons if not daemon.alive]
            self.rotation.restart_all(now)
        for daemon in daemons:
            self._recover(daemon, is_ending, now)
        self.registration.assign(now)
        if asked := values.get("evaluation", [0.0, None])[1]:
            was = Asked(*asked)
            if is_ending or not was.finishes:
                self.evaluations.go_on(replace(was, is_last=was.is_last and is_ending), now)
        if was_released:
            self.lead.begin()
        if is_ending:
            end_state, end_reason, grace_s, is_shutting_down = values["end"]
            self.control.end(end_state, end_reason, now, grace_s=grace_s, at_once=is_shutting_down)
        else:
            self.scaling.go_on(now)

    def _restore(self, values: Json, now: float) -> None:
        self.run.members.daemons.clear()
        for key, value in values.items():
            kind, _, name = key.partition("/")
            if kind == "daemon":
                daemon = self.run.members.restore(name, value, now)
                daemon.last_exit = self.past.daemons.get(name, {}).get("last_exit")
            if kind != "portion":  # `changes` would delete them: `_memory` has no portions.
                self._known[key] = value
        # The agent on this machine may be a newer process than the one on record, if its start
        # could not be written. It keeps running, and registers as if it had just been started.
        agent = self.run.members.daemons[HOME_AGENT]
        newest = self.past.agents.get(agent.name, 0)
        if newest > agent.incarnation:
            agent.incarnation = newest - 1
            agent.begin(now)
        for part in self.parts:
            part.recall(values, now)
        newest = values["work"][5]
        self.evaluations.newest = None if newest is None else Result.from_json(newest)
        if "finish" in values:
            self.evaluations.has_finish = True
            self.evaluations.finishes, self.evaluations.finished = values["finish"]

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
        elif daemon.state in ("stopped", "failed") and not is_ending:
            daemon.change_state(daemon_states.BACKOFF)
            daemon.retry_at = now
        elif daemon.alive and daemon.pid is None:
            self.registration.request_spawn(daemon, now)
        elif daemon.alive:
            # Its agent may have reported its exit, and the acknowledgement was not on record.
            daemon.agent_incarnation = 0
        if daemon.alive and daemon.role == "server" and daemon.address:
            self.registration.notify_moved(daemon, now)
        if daemon.alive and daemon.settings:
            self.settings.begin({daemon.name: daemon.settings}, now, lambda rows: None)


def _jsonable(key: str, value: Any) -> Any:
    if key.startswith("daemon/"):
        return dict(zip(LASTING, value, strict=True))
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- what must be on the disk first


class Lasting:
    def __init__(self) -> None:
        self.is_on_disk = False
        """All of it. Of what the predecessor wrote this is not known."""
        self._served: set[str] = set()
        self._is_before_release = False
        """In a recovered run the release is on record already."""
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
        if key in ("quorum", "norm", "frozen"):
            self.is_on_disk = False
        if key == "lead":
            self._held.add(VectorOp)
        if key == "run":
            is_released = has_released({key: value})
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
        waits = isinstance(message, Topology | Decided | NormTotal) or (
            isinstance(message, Welcome) and message.term
        )
        return self.is_on_disk or not waits


def corrected(memory: Mapping[str, Any], recovery: Mapping[str, list[str]]) -> dict[str, Json]:
    """The rows of daemons that `dlctl recover` corrects in the persisted state. recovery: what the
    command found: `served`, servers that left a shard, and `gone`, agents that no longer run on the
    hosts it asked.

    - A power loss may lose the record that a shard had a server, and keep the shard's journal.
    - The coordinator must not wait for a heartbeat of an agent that is gone.
    - Quarantined workers are restarted if there are no others, as no worker would be left to train;
      and if the run has failed: all others are restarted as well, and the cause may be fixed.
    """
    rows = {key: row for key, row in memory.items() if key.startswith("daemon/")}
    changed: dict[str, Json] = {}
    for key, row in rows.items():
        name = key.removeprefix("daemon/")
        if name in recovery.get("served", ()):
            changed[key] = {**row, "has_served": True}
        elif name in recovery.get("gone", ()):
            changed[key] = {**row, "registered": False}
    workers = {key: row for key, row in rows.items() if row.get("role") == "worker"}
    lost = {key: row for key, row in workers.items() if row.get("state") == "quarantined"}
    if lost == workers or memory["run"][0] == "failed":
        changed |= {key: {**row, "state": "stopped"} for key, row in lost.items()}
    return changed
