"""What the coordinator knows of its daemons, kept up to date at every change of one of them.

A run may have a thousand workers, and each of them reports every second. So no event may look at
all daemons: a part of the coordinator that needs those in some state has a `Selection` of them, and
one that needs to know what has changed has `ChangedDaemons`. `Membership` updates both.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Generic, Protocol, Self, TypeVar

from dlctl.util.deadlines import Deadlines

D = TypeVar("D", bound="Observed")


class Observed:
    """A daemon that notifies its observers which of its attributes has changed."""

    __slots__ = ("_observers",)
    _observers: Mapping[str, Sequence[MembershipObserver]]
    name: str
    role: str
    place: int
    """The position of the daemon in the order in which the daemons of a run were added."""
    heard_at: float

    def __new__(cls, *_: Any, **__: Any) -> Self:
        self = object.__new__(cls)
        object.__setattr__(self, "_observers", {})
        return self

    def observed_by(self, observers: Mapping[str, Sequence[MembershipObserver]]) -> None:
        """observers: attribute -> those that are notified; more of them may come."""
        object.__setattr__(self, "_observers", observers)

    def __setattr__(self, name: str, value: Any) -> None:
        observers = self._observers.get(name)
        if observers is None:
            object.__setattr__(self, name, value)
            return
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        if value != before:
            for observer in observers:
                observer.update(self)


class MembershipObserver(Protocol):
    """An observer that `Membership` notifies of changed daemons."""

    @property
    def fields(self) -> Collection[str]:
        """The attributes of a daemon that matter."""

    def update(self, daemon: Any) -> None:
        """A daemon is new, or one of these attributes has changed."""

    def drop(self, daemon: Any) -> None:
        """A daemon has been removed."""


class Selection(Generic[D]):
    """The daemons that meet a condition; by default in the order in which they were added."""

    def __init__(
        self,
        fields: Collection[str],
        condition: Callable[[D], bool],
        order: Callable[[D], int] = lambda daemon: daemon.place,
    ) -> None:
        """fields: those that the condition depends on. order: a constant of the daemon."""
        self.fields = fields
        self._condition = condition
        self._order = order
        self._names: set[str] = set()
        self._found: list[D] = []
        self.version = 0
        """A number that increases with every change."""

    def update(self, daemon: D) -> None:
        if self._condition(daemon) == (daemon.name in self._names):
            return
        if daemon.name in self._names:
            self.drop(daemon)
            return
        self.version += 1
        self._names.add(daemon.name)
        insort(self._found, daemon, key=self._order)

    def drop(self, daemon: D) -> None:
        if daemon.name in self._names:
            self.version += 1
            self._names.remove(daemon.name)
            del self._found[bisect_left(self._found, self._order(daemon), key=self._order)]

    def __iter__(self) -> Iterator[D]:
        """Over a copy: daemons may be changed meanwhile."""
        return iter(self._found.copy())

    def __len__(self) -> int:
        return len(self._found)

    def first(self, count: int) -> list[D]:
        return self._found[:count]


class ChangedDaemons(Generic[D]):
    """The daemons with changes since they were last taken."""

    def __init__(self, fields: Collection[str], role: str = "") -> None:
        """role: the role of the observed daemons; "": any."""
        self.fields = fields
        self._role = role
        self._changed: dict[str, D] = {}

    def update(self, daemon: D) -> None:
        if self._role in ("", daemon.role):
            self._changed[daemon.name] = daemon

    drop = update

    def take(self) -> Iterable[D]:
        """Take the daemons that are new, changed or removed since the last call."""
        if not self._changed:
            return ()
        changed, self._changed = self._changed, {}
        return changed.values()


class ByContact(Generic[D]):
    """All daemons by their newest message, the oldest first."""

    fields = ("heard_at",)

    def __init__(self) -> None:
        self._order: OrderedDict[str, D] = OrderedDict()

    def update(self, daemon: D) -> None:
        newest = next(self.newest(), daemon)
        self._order[daemon.name] = daemon
        self._order.move_to_end(daemon.name)
        if daemon.heard_at < newest.heard_at:  # It is new, and has sent nothing yet.
            rows = sorted(self._order.items(), key=lambda row: row[1].heard_at)
            self._order = OrderedDict(rows)

    def drop(self, daemon: D) -> None:
        self._order.pop(daemon.name, None)

    def silent_for(self, limit_s: float, now: float) -> list[D]:
        """The daemons whose newest message is older than this."""
        every = self._order.values()
        return list(takewhile(lambda daemon: now - daemon.heard_at > limit_s, every))

    def newest(self) -> Iterator[D]:
        """All daemons by their newest message, the newest first."""
        return reversed(self._order.values())


class Due(Generic[D]):
    """When daemons are due, by one of their attributes; None: a daemon is not due."""

    def __init__(self, field: str) -> None:
        self.fields = (field,)
        self._field = field
        self._deadlines = Deadlines()
        self._daemons: dict[str, D] = {}

    def update(self, daemon: D) -> None:
        due = getattr(daemon, self._field)
        self._deadlines.set(daemon.name, due)
        if due is not None:
            self._daemons[daemon.name] = daemon
        else:
            self._daemons.pop(daemon.name, None)

    def drop(self, daemon: D) -> None:
        self._deadlines.set(daemon.name, None)
        self._daemons.pop(daemon.name, None)

    def first(self) -> float | None:
        """The earliest time at which a daemon is due; None: no daemon is."""
        return self._deadlines.first()

    def __iter__(self) -> Iterator[D]:
        """The daemons that are due at some time, in any order."""
        return iter(list(self._daemons.values()))

    def by(self, now: float) -> list[D]:
        """The daemons that are due by now, in the order in which they were added."""
        due = [self._daemons[str(name)] for name in self._deadlines.by(now)]
        return sorted(due, key=lambda daemon: daemon.place)
