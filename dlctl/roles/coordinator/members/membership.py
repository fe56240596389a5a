"""The coordinator's records of the daemons of a run, one for each name.

A name lasts as long as the run. An incarnation is one process under that name; messages of older
incarnations are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from types import MappingProxyType

from dlctl.records.memory import DAEMON, Entry, Memory
from dlctl.roles.coordinator.members import crash_loops, daemon_states
from dlctl.roles.coordinator.members.selections import (
    ChangedDaemons,
    MembershipObserver,
    Observed,
    Selection,
)
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import HAS_LEFT, NO_WORKER
from dlctl.util.values import exit_in_words
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json, ProcessExited

BACKOFF_S = {"agent": (0.5, 2.0), "server": (0.1, 2.0), "worker": (0.5, 30.0)}
"""Initial and maximum backoff before a restart. Short for servers: all workers wait for them."""
DOUBLINGS_MAX = 10
"""More than lead from any initial backoff to its maximum."""
ROLES = (*BACKOFF_S, "guest")
LIFE_S = {"agent": 3.0, "server": 1.0, "worker": 10.0, "guest": 0.0}
"""A process that was ready and lived longer did not die of its start: its death does not count
with earlier ones, unless it exited on its own in the same way (`crash_loops`)."""
LEFT = "left"
"""Why a worker drains that nobody has asked to: its script has left the training loop."""

LEAVES_EARLY_S = 60.0
"""A script that leaves its training loop sooner after its start costs more to start than it trains:
the next start waits, longer each time in a row."""

_SHOWN = (
    "name", "role", "host", "agent", "pid", "state", "phase", "waiting_for", "waiting_since",
    "incarnation", "restarts", "started_at", "retry_at", "given_up_at", "kill_at", "last_exit",
    "error", "settings",
    "metrics",
)  # fmt: skip
LASTING = (
    "state", "role", "index", "agent", "incarnation", "agent_incarnation", "term", "address", "pid",
    "host", "registered", "model_ready", "has_worked", "has_served", "asked_for_data", "drained",
    "leaving", "restarts", "deaths_in_row", "settings", "error", "key",
)  # fmt: skip
"""The fields of a daemon that are persisted (see `Persistence`)."""
_lasting = attrgetter(*LASTING)
_EXISTS = ""
"""Stands for an attribute whose observers are notified of new and of removed daemons."""


@dataclass(slots=True)
class Daemon(Observed):
    name: str
    role: str
    index: int
    agent: str = HOME_AGENT
    """The agent, or guest, that starts it; for an agent or a guest its own name."""
    incarnation: int = 0
    place: int = 0
    _state: str = field(default=daemon_states.PENDING, init=False)
    key: str = ""
    """What its keys are derived from, if it has come with an invitation; "": from its name. It is
    not restarted, and that it leaves is no problem."""
    phase: str = ""
    waiting_for: str = ""
    waiting_since: float | None = None
    host: str = ""
    pid: int | None = None
    peer: Peer | None = None
    """The connection of the daemon's last message."""
    heard_at: float = 0.0
    reported_at: float = 0.0
    """The time of the daemon's last report."""
    started_at: float | None = None
    held_up_at: float = 0.0
    """When it was last blocked because the run's database, or a shard, could not be written, or by
    a script that had not attached."""
    restarts: int = 0
    retry_at: float | None = None
    last_exit: Json | None = None
    error: str = ""
    """The user's error, if the daemon has sent one."""
    term: int = 0
    """The fencing token of a worker's slot or a server's shard."""
    settings: Json = field(default_factory=dict)
    """Live settings that differ from the job file."""
    metrics: Json = field(default_factory=dict)
    address: str = ""
    registered: bool = False
    model_ready: bool = False
    has_worked: bool = False
    """An incarnation of this agent has registered: its host may become reachable again."""
    waits_for_host: bool = False
    """The launcher of this agent has no host for it yet, or is about to lose it."""
    has_served: bool = False
    """A process of this shard has served: the next one resumes from its state."""
    asked_for_data: bool = False
    drained: bool = False
    leaving: str = ""
    """Why a worker drains while the run continues: "restart", "removal" or `LEFT`."""
    has_settled: bool = False
    """Something that this process has trained is settled."""
    agent_incarnation: int = 0
    """Incarnation of the agent that was asked to start this process."""
    killed_for: str = ""
    """Why we have its process killed; the process itself cannot log that."""
    out_of_touch: bool = False
    """The daemon is stale and its host unreachable: what can continue without it does not wait."""
    given_up_at: float | None = None
    """When the host of an unreachable agent is, or was, given up."""
    kill_at: float | None = None
    """Deadline of a worker that leaves or has failed, after which it is killed."""
    deaths_in_row: int = 0
    """Consecutive deaths of processes that lived only briefly, or exited on their own in the same
    way, or whose script left its training loop without having trained; the newest included."""
    left_in_row: int = 0
    """Consecutive processes whose script left its training loop soon after its start, whether it
    had trained or not."""

    @property
    def state(self) -> str:
        """One of `daemon_states`; only `change_state` changes it."""
        return self._state

    def change_state(self, state: str) -> None:
        """Change the daemon's state. Raises AssertionError for one that cannot follow on the
        current one, a bug of the coordinator: no message or exit of a daemon can cause it.
        """
        assert self._state in daemon_states.SOURCES[state], f"{self._state} -> {state}"
        self._state = state

    def restore_state(self, state: str) -> None:
        """Take over the state that an earlier coordinator has recorded."""
        assert state in daemon_states.STATES, state
        self._state = state

    @property
    def keys_of(self) -> str:
        """What its keys are derived from."""
        return self.key or self.name

    @property
    def alive(self) -> bool:
        """A process exists, if our records are current."""
        return self.state in daemon_states.ALIVE

    @property
    def stuck(self) -> bool:
        """Whether the daemon reports that it has been in one batch, or evaluation, for too long."""
        return self.alive and "stuck_s" in self.metrics

    @property
    def hangs(self) -> bool:
        """Whether the daemon is stuck, and not in an evaluation that may still end."""
        return self.stuck and self.metrics.get("hangs") is True

    @property
    def evaluates(self) -> bool:
        """Whether the daemon reports that it evaluates, and the evaluation may still end."""
        return self.alive and (self.phase == "evaluating" or self.metrics.get("hangs") is False)

    def saves(self, checkpoint: int) -> bool:
        """Whether the daemon reports that it has begun to save; it can do that while it hangs."""
        return self.metrics.get("checkpoint") == checkpoint

    def begin(self, now: float) -> None:
        """Reset the fields for a new incarnation, which is being started."""
        self.incarnation += 1
        self.change_state(daemon_states.STARTING)
        self.phase, self.waiting_for = "starting", ""
        self.peer = self.pid = self.retry_at = self.waiting_since = self.kill_at = None
        self.heard_at = self.started_at = now
        self.metrics, self.error = {}, ""
        self.address = ""
        self.registered = self.model_ready = self.asked_for_data = self.drained = False
        self.has_settled = False
        self.leaving = self.killed_for = ""

    def heard(self, peer: Peer, now: float) -> None:
        self.peer, self.heard_at = peer, now

    def report(self, phase: str, waiting_for: str, now: float) -> None:
        if waiting_for != self.waiting_for:
            self.waiting_since = now if waiting_for else None
        self.phase, self.waiting_for = phase, waiting_for
        self.reported_at = now

    def ended(
        self, end: ProcessExited, now: float, error: str = "", *, is_planned: bool = False
    ) -> None:
        """`error`: the one that it logged before its exit. is_planned: it was asked to exit."""
        status, cause, lived_s = end.status, end.cause, now - (self.started_at or now)
        has_lived = lived_s > LIFE_S[self.role] and self.state != "starting"
        has_left = self.leaving == LEFT and status == 0
        if has_left:  # A script that leaves at once may take long to get there.
            has_lived = self.has_settled
        leaves_early = has_left and lived_s < LEAVES_EARLY_S
        self.left_in_row = self.left_in_row + 1 if leaves_early else 0
        is_worker = self.role == "worker"  # Only workers run the user's code.
        alike = crash_loops.in_row(self.last_exit, status, cause, lived_s) if is_worker else 0
        counts = not has_lived or alike > 1
        self.deaths_in_row = self.deaths_in_row + 1 if counts else 1
        is_in_order = status == 0 or is_planned
        self.change_state(daemon_states.STOPPED if is_in_order else daemon_states.FAILED)
        self.phase, self.waiting_for, self.waiting_since = "", "", None
        self.pid = self.peer = self.kill_at = None
        is_ours = self.killed_for and status in (-9, STATUS_UNKNOWN)
        text = self.killed_for if is_ours else describe_exit(status, cause)
        text = HAS_LEFT if has_left else text
        self.last_exit = {"code": status, "text": text, "at": now, "last_lines": [*end.last_lines]}
        if alike:
            self.last_exit |= {"in_row": alike, "had_lived": has_lived}
            # Never claimed of a crash: its cause may be in the last lines of the log.
            if status >= 0 and not error:
                self.last_exit["cause"] = "task"
        elif self.left_in_row > 1:
            self.last_exit |= {"in_row": self.left_in_row, "cause": "left"}

    def forgive(self) -> None:
        """Reset the count of deaths: the cause may have been fixed."""
        self.deaths_in_row = self.left_in_row = 0
        if self.last_exit is not None and "in_row" in self.last_exit:
            self.last_exit = self.last_exit | {"in_row": 0}

    def back_off(self, now: float) -> None:
        """Wait before the next incarnation: not at all the first time, then exponentially."""
        self.restarts += 1
        first_s, longest_s = BACKOFF_S[self.role]
        again = max(self.deaths_in_row, self.left_in_row) - 2
        # Bounded: a script that leaves its loop each time is never given up.
        delay_s = min(first_s * 2 ** min(again, DOUBLINGS_MAX), longest_s) if again >= 0 else 0.0
        self.change_state(daemon_states.BACKOFF)
        self.retry_at = now + delay_s

    def to_json(self) -> Json:
        """The row that `status` reads."""
        return {key: getattr(self, key) for key in _SHOWN} | {"updated_at": self.heard_at}


def _place(daemon: Daemon) -> int:
    return daemon.place


def _index(daemon: Daemon) -> int:
    return daemon.index


def _has_role(role: str, daemon: Daemon) -> bool:
    return daemon.role == role


def _is_live(daemon: Daemon) -> bool:
    is_worker = daemon.role == "worker"
    return is_worker and daemon.alive and daemon.asked_for_data and not daemon.drained


def describe_exit(status: int, cause: str = "") -> str:
    """An exit status in words, with the cause of a signal if known (never guessed)."""
    if status == STATUS_UNKNOWN:
        return "gone, exit unknown"
    if cause == crash_loops.NO_ROOM:
        return f"not started: {cause}"
    text = exit_in_words(status)
    return f"{text} ({cause})" if status < 0 and cause else text


class Membership:
    def __init__(
        self,
        agents: Iterable[str],
        placed: Json,
        before: dict[str, int],
        takes_workers: Mapping[str, bool] = MappingProxyType({HOME_AGENT: True}),
    ) -> None:
        """`agents`: names of all. `placed`: server or worker -> the agent that starts it.
        `before`: incarnations that earlier executions of this run have used. `takes_workers`: the
        agents that may get more workers -> whether the job places workers there.
        """
        self._before = before
        self.daemons: dict[str, Daemon] = {}
        """All daemons by name. Only the methods of this class change it."""
        self._takes_workers = takes_workers
        self.part_of: Callable[[int], int] = lambda slot: 0
        """Slot -> the part of the model that it holds."""
        self.reserved: set[int] = set()
        """Slots of workers that may join."""
        self._places = count()
        self._observers: dict[str, list[MembershipObserver]] = {}
        """Attribute of a daemon -> the observers of its changes."""
        self._roles = {role: self.select((), partial(_has_role, role), _index) for role in ROLES}
        self._live = self.select(("_state", "asked_for_data", "drained"), _is_live, _index)
        self._live_slots: tuple[int, tuple[int, ...]] = (0, ())
        """(version of `_live`, the slots)"""
        self._hosts = self.follow(("agent",))
        self._hosted: dict[str, list[Daemon]] = {}
        self._changed = self.follow([f"_{key}" if key == "state" else key for key in LASTING])
        for name, agent in [*((name, name) for name in agents), *placed.items()]:
            self._add(name, agent)

    # ------------------------------------------------------------ observers

    def select(
        self,
        fields: Collection[str],
        condition: Callable[[Daemon], bool],
        order: Callable[[Daemon], int] = _place,
    ) -> Selection[Daemon]:
        """A live view of the daemons that meet a condition on these attributes."""
        selection = Selection[Daemon](fields, condition, order)
        self.observe(selection)
        return selection

    def follow(self, fields: Collection[str], role: str = "") -> ChangedDaemons[Daemon]:
        """A queue of the daemons of a role whose attributes have changed; at first all of them."""
        changes = ChangedDaemons[Daemon](fields, role)
        self.observe(changes)
        return changes

    def observe(self, observer: MembershipObserver) -> None:
        for name in (*observer.fields, _EXISTS):
            self._observers.setdefault(name, []).append(observer)
        for daemon in self.daemons.values():
            observer.update(daemon)

    # ------------------------------------------------------------ the daemons of a run

    def _add(self, name: str, agent: str, key: str = "") -> Daemon:
        role, _, index = name.partition("-")
        daemon = Daemon(name, role, int(index), agent, self._before.get(name, 0), key=key)
        self._take_in(daemon)
        return daemon

    def _take_in(self, daemon: Daemon) -> None:
        daemon.place = next(self._places)
        self.daemons[daemon.name] = daemon
        daemon.observed_by(self._observers)
        for observer in self._observers.get(_EXISTS, ()):
            observer.update(daemon)

    def _let_go(self, daemon: Daemon) -> None:
        del self.daemons[daemon.name]
        daemon.observed_by({})
        for observer in self._observers.get(_EXISTS, ()):
            observer.drop(daemon)

    def remove(self, name: str) -> None:
        self._before[name] = self.daemons[name].incarnation
        self._let_go(self.daemons[name])

    def add_worker(self) -> Daemon:
        """Add the next slot. If the slot existed before, its incarnation numbers continue."""
        own = (worker.index for worker in self.of_role("worker") if not worker.key)
        index = 1 + max(own, default=-1)
        while index in self.reserved:
            index += 1
        return self._add(f"worker-{index}", self.least_busy())

    def add_invited(self, name: str, guest: str, key: str) -> Daemon:
        """Add a guest, or its worker."""
        return self._add(name, guest, key)

    def key_sources(self) -> dict[str, str]:
        """What the keys of the daemons that came with an invitation are derived from."""
        return {name: daemon.key for name, daemon in self.daemons.items() if daemon.key}

    def newest(self, name: str) -> int:
        """The newest incarnation under this name; 0: none is known."""
        daemon = self.daemons.get(name)
        return self._before.get(name, 0) if daemon is None else daemon.incarnation

    def least_busy(self) -> str:
        """The agent for one more worker: the reachable agent with the fewest; else one that may
        come back; else one where the job places no workers.
        """
        workers = Counter(worker.agent for worker in self.of_role("worker"))

        def rank(agent: Daemon) -> tuple[bool, bool, bool, int]:
            is_given_up, is_away = agent.state == "failed", agent.given_up_at is not None
            is_unwanted = not self._takes_workers[agent.name]
            return is_given_up, is_unwanted, is_away, workers[agent.name]

        places = [agent for agent in self.of_role("agent") if agent.name in self._takes_workers]
        return min(places, key=rank).name

    def agent_of(self, daemon: Daemon) -> Daemon:
        """The agent that has started this daemon, or will."""
        return self.daemons[daemon.agent]

    def hosted_by(self, agent: Daemon) -> list[Daemon]:
        """The servers and workers that this agent starts."""
        if self._hosts.take():
            self._hosted = {}
            for daemon in self.daemons.values():
                if daemon.role != "agent":
                    self._hosted.setdefault(daemon.agent, []).append(daemon)
        return [*self._hosted.get(agent.name, ())]

    def changes(self) -> Iterator[Entry]:
        for daemon in self._changed.take():
            is_there = self.daemons.get(daemon.name) is daemon
            row = dict(zip(LASTING, _lasting(daemon), strict=True)) if is_there else None
            yield Entry(DAEMON + daemon.name, row)

    def recall(self, memory: Memory, now: float) -> None:
        """Take over exactly the daemons that an earlier coordinator has recorded."""
        for daemon in list(self.daemons.values()):
            self._let_go(daemon)
        for name, lasting in memory.under(DAEMON):
            self._restore(name, lasting, now)

    def _restore(self, name: str, lasting: Json, now: float) -> None:
        """Recreate a daemon from its persisted fields; its timeouts start over."""
        daemon = Daemon(name, lasting["role"], lasting["index"], lasting["agent"])
        daemon.restore_state(lasting["state"])
        for key in LASTING[1:]:  # An older dlctl may not have known all of them.
            setattr(daemon, key, lasting.get(key, getattr(daemon, key)))
        if daemon.state != "quarantined":
            daemon.error = ""  # The cause may be fixed; the error would end the run again.
        daemon.heard_at = now
        daemon.started_at = now if daemon.alive else None
        daemon.retry_at = now if daemon.state == "backoff" else None
        self._take_in(daemon)

    def get(self, name: str, incarnation: int | None = None) -> Daemon | None:
        """A daemon by name; None if unknown, or if this incarnation has been replaced."""
        daemon = self.daemons.get(name)
        if daemon is None or (incarnation is not None and daemon.incarnation != incarnation):
            return None
        return daemon

    def of_role(self, role: str) -> list[Daemon]:
        """The daemons of a role in the order of their indices, which records do not have."""
        return list(self._roles[role])

    def worker(self, slot: int, term: int) -> Daemon | None:
        """The live worker that has this slot in this term, or None.

        A dead worker's last messages may still be in flight when its exit is known.
        """
        daemon = self.daemons.get(f"worker-{slot}")
        if daemon is None or not daemon.alive or not daemon.registered:
            return None
        return daemon if daemon.term == term else None

    def live_slots(self) -> tuple[int, ...]:
        """Slots that take part: their process is alive, has asked for data, and is not drained. The
        same object, unless they have changed."""
        version, slots = self._live_slots
        if version != self._live.version:
            slots = tuple(daemon.index for daemon in self._live)
            self._live_slots = self._live.version, slots
        return slots

    def no_worker_left(self) -> str:
        """Why the run cannot continue after a loss or a removal: all remaining workers, or all of a
        part, are quarantined; "" if not.
        """
        by_part: dict[int, list[Daemon]] = {}
        for worker in self.of_role("worker"):
            by_part.setdefault(self.part_of(worker.index), []).append(worker)
        # The parts cannot do without each other.
        workers = next(filter(_are_quarantined, by_part.values()), None)
        if workers is None:
            return ""
        newest = max(workers, key=lambda worker: (worker.last_exit or {}).get("at", 0.0))
        return f"{NO_WORKER}: {newest.name}: {newest.error or 'it is quarantined'}"


def _are_quarantined(workers: list[Daemon]) -> bool:
    return bool(workers) and all(worker.state == "quarantined" for worker in workers)
