"""What a coordinator must not forget, and how the next one of its run goes on with it.

The state that decides what the coordinator does next lies in small pieces under keys:

    keys                the fingerprint of the run key that the daemons were started with
    run                 state, reason, whether the workers have been let loose
    clock               how long they have been at work; the newest attempt at a checkpoint is ago
    checkpoints         its number
    work                steps, samples and loss; the size of the dataset; the newest evaluation
    stream              the shards of a dataset that is a stream
    metrics             what else the task's loss returns
    lead                the clock and the state of the method's lead, and the journal of one that
                        drives
    scale               what the rate is multiplied by for the number of workers, and since when
    norm                the newest one by which all shards clip an update: its clock, its square
    quorum              its newest decision for all shards: the clock, whose pushes count
    group               the members that are left out: slot and epoch
    evaluation          epochs or steps that were done when one was begun last; what is under way
                        (`Asked`)
    finish              how often the task's `finish` was begun, and what has come of it
    layout              the model's tensors
    frozen              the file of its frozen parameters
    end                 how the run ends, once it does
    daemon/<name>       its incarnation, term, address, and how far it has come
    portion/<e>/<p>     the slot that has it, or RETURNED or DONE; p = -1: all of epoch e; of a
                        stream also p < -1: what there is to know of a shard
    answer/<slot>       the newest lease of a slot, in case it has to be repeated
    numbers             the newest one that was given out (`History.next_number`)
    log/<daemon>.<i>    of a process on another host: its agent, the part of its log that is copied

After every event the pieces that have changed become `Remember` effects, ahead of the messages of
that event. So nobody outside knows of a decision that a crash could undo; on a full disk, of none
that would cost pushes (`Lasting`).

What the next coordinator must not be without, and which messages wait until it is on the disk.

Whoever waits for one of these messages asks again.

- Terms that were issued: two processes with one term would cost pushes that were acknowledged.
- Servers that have served: so would a shard that is begun anew because nobody remembers that it
  had begun.
- What a method that the coordinator drives has come to: an operation that follows from what is
  forgotten would be made again on vectors that have changed since. Here it is enough that the
  database has it, as for all else.
- That all workers are at work: the next coordinator would have them begin once more, with the
  residuals of the checkpoint, which are in the shards by then.
- Whose frozen parameters the run has: workers would be told of two kinds.
- What was decided for all shards: the next one would decide otherwise for those that have not heard
  of it. Without room for it, a method that has such decisions stands still.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from dlctl.machine import Effect
from dlctl.messages import Decided, Json, Lease, Message, NormTotal, Topology, VectorOp, Welcome
from dlctl.roles.coordinator import daemon_states
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.evaluation import Asked, Evaluations
from dlctl.roles.coordinator.lease_scheduler import LeaseScheduler
from dlctl.roles.coordinator.membership import LASTING, Daemon
from dlctl.roles.coordinator.records import Remember, Remembers
from dlctl.roles.coordinator.registration import Past, Registration
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.run_state import Part
from dlctl.roles.coordinator.scaling import Scaling
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.protocol.effects import ProcessEnded
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.util.names import HOME_AGENT

UNWRITTEN_S_MIN = 3.0
"""A coordinator that works writes more often than that."""
CLOCK_S_MAX = 5.0
"""The time at work is remembered as often as this, and with whatever else is."""
CLOCK_PART = 4
"""A coordinator that has lived shortly may die as soon again: of its life one part of so many may
be forgotten.
"""


def has_released(memory: Json) -> bool:
    """Whether all workers of this execution have been at work: what the checkpoint that it went on
    from was needed for has been done.
    """
    return "run" in memory and memory["run"][2] is not None


def newest_checkpoint(memory: Json) -> int:
    """Number of the newest checkpoint that anybody has been asked to save; 0 if it knows of none.

    Servers may still answer to it when neither its directory nor a row is there.
    """
    return int(memory.get("checkpoints", 0))


@dataclass(eq=False)
class Persistence(Part):
    past: Past
    parts: Sequence[Remembers]
    """What is to be recalled, in this order."""
    registration: Registration
    scheduler: LeaseScheduler
    settings: SettingChanges
    evaluations: Evaluations
    checkpointing: Checkpointing
    scaling: Scaling
    rotation: Rotation
    _known: dict[str, Any] = field(default_factory=dict, init=False)
    _begun: float | None = field(default=None, init=False)
    _clock_at: float = field(default=-math.inf, init=False)

    def is_there(self) -> bool:
        """Whether there was another coordinator, and its run is to go on."""
        return bool(self.past.memory)

    # ------------------------------------------------------------ writing

    def changes(self, now: float) -> list[Effect]:
        """What has to be remembered after an event."""
        memory = dict(self._memory())
        for part in self.parts:
            memory.update(part.memory())
        changed = [
            Remember(key, _jsonable(key, value))
            for key, value in memory.items()
            if self._known.get(key) != value
        ]
        changed += [Remember(key, None) for key in sorted(self._known.keys() - memory.keys())]
        self._known = memory
        portions = [*self._changed_portions()]
        return [*changed, *portions, *self._clock(bool(changed or portions), now)]

    def _clock(self, is_beside: bool, now: float) -> Iterator[Effect]:
        """is_beside: something else is written at this moment."""
        released_at = self.scheduler.released_at
        if self._begun is None:
            self._begun = now
        pause_s = min(CLOCK_S_MAX, (now - self._begun) / CLOCK_PART)
        if released_at is None or not (is_beside or now >= self._clock_at + pause_s):
            return
        self._clock_at = now
        yield Remember("clock", [now - released_at, self.checkpointing.since_s(now)])

    def _memory(self) -> Iterator[tuple[str, Any]]:
        """What is of no part alone."""
        is_released = None if self.scheduler.released_at is None else True
        yield "keys", self.run.keyring.fingerprint
        yield "run", (self.run.state, self.run.reason, is_released)
        yield "checkpoints", self.checkpointing.number
        newest, asked = self.evaluations.newest, self.evaluations.asked
        yield "work", (*self.scheduler.work(), newest)
        evaluated_at = self.scheduler.evaluated_at
        yield "evaluation", (evaluated_at, None if asked is None else astuple(asked))
        if self.evaluations.has_finish:
            yield "finish", (self.evaluations.finishes, self.evaluations.finished)
        if self.run.shutdown is not None:
            end = self.run.shutdown
            yield "end", (end.state, end.reason, end.grace_s, end.is_shutting_down())
        yield from self.run.members.memory()

    def _changed_portions(self) -> Iterator[Effect]:
        for key, value in self.scheduler.changed_portions():
            yield Remember(key, value)

    # ------------------------------------------------------------ reading

    def go_on(self, now: float) -> None:
        """Take the place of a coordinator that has remembered all this, and then died."""
        values = self.past.memory
        state = values["run"][0]
        was_released = has_released(values)
        self._restore(values, now)
        if was_released:
            worked_s, checkpoint_s = values.get("clock", (0.0, 0.0))
            self.scheduler.released_at = now - worked_s
            self.registration.restore, self.registration.under_way = "", True
            # One that failed was saved then. To save it again at once, before it fails again, would
            # have what may be ruined count among those that are kept.
            since_s = 0.0 if state == "failed" else checkpoint_s + self.past.gone_s
            self.checkpointing.schedule(now, since_s)
        gone = f", {self.past.gone_s:.0f} s after its last word" if self.past.gone_s else ""
        forgotten = self._forgotten()
        text = f"the coordinator is back{gone}: {forgotten or 'it goes on where it was'}"
        self.run.context.event(
            "recover", "coordinator", text, forgotten=forgotten, code="coordinator-restarted"
        )
        self.control.change_state("running" if was_released else "starting", "", now)
        is_ending = "end" in values and state in ("stopping", "stopped", "finished")
        ours = self.run.keyring.fingerprint
        if values.get("keys", ours) != ours:
            self.rotation.begin_all_anew(now)
        else:
            for daemon in self.run.members.daemons.values():
                self._look_after(daemon, is_ending, now)
        self.registration.assign(now)
        if asked := values.get("evaluation", [0.0, None])[1]:
            was = Asked(*asked)
            if is_ending or not was.finishes:
                self.evaluations.go_on(replace(was, is_last=was.is_last and is_ending), now)
        if was_released:
            self.scheduler.begin_driving(now)
        if is_ending:
            end_state, end_reason, grace_s, is_shutting_down = values["end"]
            self.control.end(end_state, end_reason, now, grace_s=grace_s, at_once=is_shutting_down)
        else:
            self.scaling.go_on(now)

    def _forgotten(self) -> str:
        """What the one before has done and could not write, as a sentence; "" if it could."""
        if self.past.unwritten_s < UNWRITTEN_S_MIN:
            return ""
        since = f"the {self.past.unwritten_s:.0f} s before it died are not on record"
        return f"{since}: what was trained in them is trained again"

    def _restore(self, values: Json, now: float) -> None:
        self.run.members.daemons.clear()
        for key, value in values.items():
            kind, _, name = key.partition("/")
            if kind == "daemon":
                daemon = self.run.members.restore(name, value, now)
                daemon.last_exit = self.past.exits.get(name)
                self.registration.keep_term(daemon)
            if kind != "portion":  # Else nobody would forget what is done at once.
                self._known[key] = value
        self._find_agent(now)
        for part in self.parts:
            part.recall(values, now)
        self.evaluations.newest = values["work"][5]
        if "finish" in values:
            self.evaluations.has_finish = True
            self.evaluations.finishes, self.evaluations.finished = values["finish"]

    def _find_agent(self, now: float) -> None:
        """The agent on this machine may be a newer process than the one on record: it was begun
        when that could not be written. It goes on, and registers as if it had just been started.
        """
        agent = self.run.members.daemons[HOME_AGENT]
        newest = self.past.agents.get(agent.name, 0)
        if newest > agent.incarnation:
            agent.incarnation = newest - 1
            agent.begin(now)

    def _look_after(self, daemon: Daemon, is_ending: bool, now: float) -> None:
        """Do again what may have been lost on its way; agents tell what has become of the rest."""
        daemon.forgive()  # What has died with the coordinator, or before.
        if daemon.role == "agent":
            # Only of the agent on this machine we can know; the others are heard, or silent. One
            # that has not been heard may never have been placed.
            is_here = self.past.agents.get(daemon.name) == daemon.incarnation
            is_there = is_here if daemon.name == HOME_AGENT else daemon.registered
            if daemon.alive and not is_there and daemon.name == HOME_AGENT:
                unseen = ProcessEnded(daemon.name, daemon.incarnation, STATUS_UNKNOWN, ())
                self.control.process_ended(unseen, now)
            elif not daemon.alive or not is_there:
                self.control.start_daemon(daemon, now)
        elif daemon.state in ("stopped", "failed") and not is_ending:
            daemon.change_state(daemon_states.BACK_OFF)
            daemon.retry_at = now
        elif daemon.alive and daemon.pid is None:
            self.registration.ask_spawn(daemon, now)
        elif daemon.alive:
            # Its agent may have told of its end, and been answered, when that could not be written.
            daemon.agent_incarnation = 0
        if daemon.alive and daemon.role == "server" and daemon.address:
            self.registration.tell_moved(daemon, now)
        if daemon.alive and daemon.settings:
            self.settings.begin({daemon.name: daemon.settings}, now, lambda rows: None)


def _jsonable(key: str, value: Any) -> Any:
    if key.startswith("daemon/"):
        return dict(zip(LASTING, value, strict=True))
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- what has to be on the disk first


class Lasting:
    def __init__(self) -> None:
        self.is_on_disk = False
        """All of it. Of what the coordinator before this one wrote, nobody knows."""
        self._served: set[str] = set()
        self._is_before_release = False
        """Known to be: of a run that is gone on with, the release is on record already."""
        self._release_waits = False
        self._is_awaited = False
        self._journal_waits = False
        """Of a method that the coordinator drives."""

    def issues_term(self) -> None:
        self.is_on_disk = False

    def await_all(self) -> None:
        """Somebody asks to be told when everything so far is on the disk."""
        self._is_awaited, self.is_on_disk = True, False

    def remembers(self, key: str, value: Any) -> None:
        """A piece of the coordinator's memory is to be written."""
        if isinstance(value, dict) and value.get("has_served") and key not in self._served:
            self._served.add(key)
            self.is_on_disk = False
        if key in ("quorum", "norm", "frozen"):
            self.is_on_disk = False
        if key == "lead":
            self._journal_waits = True
        if key != "run":
            return
        is_released = has_released({key: value})
        if is_released and self._is_before_release:
            self._release_waits, self.is_on_disk = True, False
        self._is_before_release = not is_released

    def written(self) -> bool:
        """Everything so far is on the disk; whether somebody has asked to be told."""
        was_awaited, self._is_awaited = self._is_awaited, False
        self.is_on_disk, self._release_waits, self._journal_waits = True, False, False
        return was_awaited

    def may_leave(self, message: Message) -> bool:
        """Portions are leased while other things wait for room: training goes on."""
        if isinstance(message, Lease):
            return not self._release_waits
        if isinstance(message, VectorOp):
            return not self._journal_waits
        waits = isinstance(message, Topology | Decided | NormTotal) or (
            isinstance(message, Welcome) and message.term
        )
        return self.is_on_disk or not waits


def corrected(memory: Mapping[str, Json], recovery: Mapping[str, list[str]]) -> dict[str, Json]:
    """The rows of daemons that a coordinator of `dlctl recover` changes in what was left. recovery:
    what the command has seen: `served`, servers that have left a shard, and `gone`, agents of hosts
    that were asked and are not there any more.

    - A power loss may have taken the note that a shard has had a server, and left its journal.
    - Nobody has to wait for a word of an agent that is not there.
    - Quarantined workers are started again if there are no others: the run would stand still.
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
    if all(row.get("state") == "quarantined" for row in workers.values()):
        changed |= {key: {**row, "state": "stopped"} for key, row in workers.items()}
    return changed
