"""The group of all replicas, for methods with collectives: its members, by generation.

The group re-forms, as a new generation, when a worker joins or leaves, or when a member reports
that a sum has failed. Its first member opens the rendezvous, and then all members receive its
address. A member that does not answer in time hangs, or its host is unreachable: the next
generation leaves it out until it answers again. A member that is late for a sum has not failed: it
may compute for as long as it is alive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from dlctl.errors import RemoteProtocolError
from dlctl.records.memory import Entry, Memory
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import Control, RunState
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

Member = tuple[int, int]
"""Slot and term."""
_STORE = re.compile(r"[A-Za-z0-9._:%-]{1,253}:[0-9]{1,5}")
"""The address of a rendezvous, as members can read it."""
SETTLE_S = 0.5
"""Time from a failed sum to the next generation: by then deaths are mostly known."""
UNMADE_LIMITS = 4
"""How long the members try to connect to each other, in units of `silent_s`."""
LOST = (
    "all replicas that had the model have ended before another one received it; "
    '"dlctl recover" resumes from the newest checkpoint'
)
UNREACHABLE = (
    "a group needs connections from every host to every other one, at ports that the system "
    "chooses: check the firewalls, and whether `data` in [[hosts]] is of the right interface; "
    '"dlctl doctor" measures what reaches what'
)


class Groups(Owner):
    PERSISTED = frozenset({"left_out"})

    def __init__(self, run: RunState, control: Control, steps_done: Callable[[], int]) -> None:
        """steps_done: steps of the run that count."""
        self.run = run
        self.control = control
        self.steps_done = steps_done
        self.limit_s = run.job.timeouts.silent_s
        self.is_wanted = "group" in run.algorithm.shape.links
        workers = run.members.follow(("_state", "term", "asked_for_data", "drained"), "worker")
        self._changes = workers
        self._alive: frozenset[Member] = frozenset()
        self._at_work: tuple[Member, ...] = ()
        self._out_of_touch = run.members.select(
            ("out_of_touch",), lambda d: d.role == "worker" and d.out_of_touch
        )
        self.generation = 0
        """The number of the group, unique in a run."""
        self.members: tuple[Member, ...] = ()
        self.left_out: frozenset[Member] = frozenset()
        """Members that have not answered. Their drivers compare what they still have (`sums.py`).
        Persisted: else the others would wait for them again after a coordinator's restart.
        """
        self._store = ""
        self._is_new = True
        self._noted: set[Member] = set()
        self._note_by: float | None = None
        """When those that have not answered are left out."""
        self._again_at: float | None = None
        """When the next generation begins, because this one has failed."""
        self._begun_at = 0.0
        self._lost: set[Member] = set()
        """Members that report that nobody in the current group has the model."""
        self._unmade: dict[Member, str] = {}
        """Member -> its error, since the last group in which all members connected."""
        self._unmade_since = 0.0

    def memory(self) -> Iterator[Entry]:
        yield Entry("group", [list(member) for member in sorted(self.left_out)])

    def recall(self, memory: Memory, now: float) -> None:
        self.left_out = frozenset((slot, term) for slot, term in memory.value("group", []))

    def advance(self, now: float) -> None:
        """Begin a new generation if one is needed."""
        if not self.is_wanted or self.run.state in ("pending", "starting"):
            return
        if self._changes.take():
            self._look()
        if gone := self.left_out - self._alive:
            for name in set(self._names(gone)) - set(self._names(self.members)):
                self.run.context.retries.drop(("group", name))
            self.left_out -= gone
        if self._unmade and (self._is_made() or not self._unmade.keys() & self._alive):
            self._unmade.clear()
        self._leave_out_unreachable(now)
        if self._note_by is not None and now >= self._note_by:
            self._leave_out(now)
        wanted = self._wanted()
        if not wanted:
            self.members, self._again_at, self._note_by = (), None, None
            return
        is_due = self._again_at is not None and now >= self._again_at
        if (wanted is not self.members and wanted != self.members) or is_due:
            self._begin(wanted, now)

    def _look(self) -> None:
        workers, slots = self.run.members.of_role("worker"), set(self.run.members.live_slots())
        self._alive = frozenset((d.index, d.term) for d in workers if d.alive)
        self._at_work = tuple((d.index, d.term) for d in workers if d.index in slots)

    def _is_made(self) -> bool:
        """Whether all members report that they are connected."""
        said = [self.run.members.get(name) for name in self._names(self.members)]
        made = [self.generation, len(self.members), True]
        return all(d is not None and d.metrics.get("group") == made for d in said)

    def _leave_out(self, now: float) -> None:
        """Leave out all silent members, unless all are silent: then this generation may not have
        reached any of them yet.
        """
        self._note_by = None
        silent = set(self.members) - self._noted
        if not self._store:  # The first member has not opened it; the others wait for that.
            silent = set(self.members[:1])
        if silent and silent < set(self.members):
            self._continue_without(silent)
        elif silent:
            self._note_by = now + self.limit_s

    def _leave_out_unreachable(self, now: float) -> None:
        """Leave out members on unreachable hosts: sums would wait until the host is given up."""
        away = {
            (worker.index, worker.term)
            for worker in self._out_of_touch
            if now - worker.heard_at > self.limit_s
        }.intersection(self.members)
        if away and away < set(self.members):
            self._continue_without(away)

    def _continue_without(self, silent: set[Member]) -> None:
        self.left_out |= silent
        names = ", ".join(self._names(sorted(silent)))
        text = f"{names}: no answer in {self.limit_s:.0f} s, the group continues without"
        self.run.context.event("group", "", text)

    def _wanted(self) -> tuple[Member, ...]:
        if not self.left_out:
            return self._at_work
        return tuple(member for member in self._at_work if member not in self.left_out)

    def _begin(self, members: tuple[Member, ...], now: float) -> None:
        for name in self._names((*self.members, *sorted(self.left_out))):
            self.run.context.retries.drop(("group", name))
        self.generation = self.run.context.next_number()
        self.members, self._store = members, ""
        self._noted, self._lost, self._again_at = set(), set(), None
        self._begun_at, self._note_by = now, now + self.limit_s
        self._is_new = self.steps_done() == 0
        text = f"generation {self.generation}: {', '.join(self._names(members))}"
        self.run.context.event("group", "", text)
        self._send_group(self._names(members)[:1], now)
        # They may be waiting in a group that all others have left.
        self._send_group(self._names(sorted(self.left_out)), now)

    def _names(self, members: Iterable[Member]) -> list[str]:
        return [f"worker-{slot}" for slot, _ in members]

    def _send_group(self, names: list[str], now: float) -> None:
        slots = tuple(slot for slot, _ in self.members)
        message = m.Group(self.generation, slots, self._store, self._is_new)
        for name in names:
            self.run.context.ask(("group", name), name, message, now)

    def on_noted(self, peer: Peer, message: m.GroupNoted, now: float) -> None:
        """A member has received the newest group. Raises RemoteProtocolError for a rendezvous that
        no first member opens.
        """
        by_name = dict(zip(self._names(self.members), self.members, strict=True))
        if message.generation != self.generation or message.name not in by_name:
            self._readmit(message.name, now)
            return
        asked = self.run.context.retries.message(("group", message.name))
        if message.store and not self._store:
            if by_name[message.name] != self.members[0] or not _STORE.fullmatch(message.store):
                raise RemoteProtocolError("members cannot be asked to meet there")
            self._store = message.store
            self._note_by = now + self.limit_s
            self._send_group(list(by_name), now)
        elif isinstance(asked, m.Group) and asked.store and not message.store:
            self.run.context.retries.done(("group", message.name), now)
            self._noted.add(by_name[message.name])
            if len(self._noted) == len(self.members):
                self._note_by = None

    def _readmit(self, name: str, now: float) -> None:
        """A member that was left out answers after all."""
        if name not in self._names(self.members):
            self.run.context.retries.done(("group", name), now)
        worker = self.run.members.get(name)
        if worker is not None and (worker.index, worker.term) in self.left_out:
            worker.heard_at = now  # Its heartbeat may be later: do not leave it out again.
            self.left_out -= {(worker.index, worker.term)}
            self.advance(now)

    def on_broken(self, peer: Peer, message: m.GroupBroken, now: float) -> None:
        member = (message.slot, message.term)
        if self.run.members.worker(*member) is None:
            return
        if member in self.left_out:
            self.left_out -= {member}
        if message.generation != self.generation or member not in self.members:
            self.advance(now)
            return
        if self._again_at is None:
            self._again_at = now + SETTLE_S
            text = f"worker-{message.slot}: {message.reason}"
            self.run.context.event("group", f"worker-{message.slot}", text)
        if message.why == m.MODEL_LOST:
            self._lost.add(member)
            if self._lost == set(self.members):
                self._lose_model(now)
        elif message.why == m.UNMADE:
            self._fail_to_connect(member, message.reason, now)
        else:
            self._unmade.clear()  # They have begun a sum.
        self.advance(now)

    def _lose_model(self, now: float) -> None:
        """All members report that they do not have the model. It is lost, unless a member that was
        left out comes back with it.
        """
        if self.left_out:
            self._again_at = now + self.limit_s
        elif self.run.shutdown is None:
            self.control.end("failed", LOST, now, at_once=True)

    def _fail_to_connect(self, member: Member, reason: str, now: float) -> None:
        if not self._unmade:
            self._unmade_since = self._begun_at
        self._unmade[member] = reason
        tried_s = now - self._unmade_since
        if tried_s < UNMADE_LIMITS * self.limit_s or self.run.shutdown is not None:
            return
        said = []
        for (slot, _), text in sorted(self._unmade.items()):
            worker = self.run.members.get(f"worker-{slot}")
            said.append(f"worker-{slot} on {worker.host if worker else 'no host'}: {text}")
        words = (
            f"the workers could not connect to each other for {tried_s:.0f} s: {'; '.join(said)}"
        )
        self.control.end("failed", f"{words}; {UNREACHABLE}", now, at_once=True)

    def deadline(self) -> float | None:
        """When `advance` has to run next if no event occurs; never in the past for long."""
        times = [t for t in (self._again_at, self._note_by) if t is not None]
        is_at_work = self.is_wanted and self.run.state not in ("pending", "starting")
        return min(times) if times and is_at_work else None
