"""The pieces of the coordinator's state that are persisted, by their keys: typed here, JSON in the
database. Only this file knows in which order their fields are stored.

    keys                the fingerprint of the run key that the daemons were started with
    run                 `RunMemory`
    clock               `Clock`
    checkpoints         number of the newest checkpoint
    work                `Work`
    stream, names       of a dataset that is a stream: the number of its shards, their names
    clients, files      of another dataset: the samples of each client, the digest of its files
    order               the digest of the task's order, once the workers have been released
    metrics             what else the task's loss returns
    batch_size          the batch size that was found; 0: none was
    lead                `LeadState`
    scale               the rate's factor for the number of workers, and since when it applies
    norm                `Norm`: the newest norm by which all shards clip an update
    quorum              `Quorum`: the newest decision for all shards
    group               the members that are left out: slot and term
    evaluation          `EvaluationMemory`
    finish              `Finish`
    layout              the model's tensors
    bounds              those of the servers' shards
    cut                 `Cut`: the newest one of the run under way
    frozen              the file of the model's frozen parameters
    end                 `End`, once the run ends
    closed              whether the servers have been asked for the last checkpoint
    daemon/<name>       its incarnation, term, address and progress
    portion/<e>/<p>     the slot that has it, or RETURNED or DONE; p = -1: all of epoch e; of a
                        stream also p < -1: the state of a shard
    answer/<slot>       the newest lease of a slot, in case it has to be resent
    numbers             the newest number that was issued (`History.next_number`)
    log/<daemon>.<i>    of a process on another host: its agent, how much of its log is copied
    invitation/<name>   its slot, its serial, when it expires, why it has ended

A piece with one value has no type: it is stored as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

Json = dict[str, Any]
DAEMON = "daemon/"
"""Prefix of the keys of daemons; likewise the next ones."""
PORTION, ANSWER, LOG, INVITATION = "portion/", "answer/", "log/", "invitation/"
CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece with several fields; they are stored as a list, in their order here."""

    KEY: ClassVar[str]

    def to_json(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class RunMemory(Piece):
    KEY: ClassVar[str] = "run"
    state: str = "pending"
    reason: str = ""
    released: Any = None
    """None: the workers have not been released. Else True; in old databases it was a time."""


@dataclass(frozen=True, slots=True)
class Clock(Piece):
    """The clock of a run, which starts when the workers are released."""

    KEY: ClassVar[str] = "clock"
    worked_s: float = 0.0
    """Whole seconds since the workers were released."""
    checkpoint_s: float = 0.0
    """Seconds since the newest attempt to save a checkpoint, when this was recorded."""


@dataclass(frozen=True, slots=True)
class Work(Piece):
    KEY: ClassVar[str] = "work"
    steps: int = 0
    samples: int = 0
    loss: float | None = None
    dataset_samples: int = 0
    next: tuple[int, int] = (0, 0)
    """The next portion: data epoch and number."""
    evaluation: Json | None = None
    """The newest one (`Result`)."""


@dataclass(frozen=True, slots=True)
class EvaluationMemory(Piece):
    KEY: ClassVar[str] = "evaluation"
    since: float = 0.0
    """Steps or epochs at the start of the newest one."""
    asked: Any = None
    """The fields of the one in progress (`Asked`), in their order; None: there is none."""


@dataclass(frozen=True, slots=True)
class Finish(Piece):
    """The progress of the task's `finish`, which runs once after the training."""

    KEY: ClassVar[str] = "finish"
    started: int = 0
    """How often `finish` was started."""
    result: Json | None = None


@dataclass(frozen=True, slots=True)
class End(Piece):
    KEY: ClassVar[str] = "end"
    state: str
    reason: str
    grace_s: float
    is_shutting_down: bool


@dataclass(frozen=True, slots=True)
class Quorum(Piece):
    KEY: ClassVar[str] = "quorum"
    clock: int
    processes: tuple[tuple[int, int], ...]
    """Whose pushes count: slot and term."""


@dataclass(frozen=True, slots=True)
class Cut(Piece):
    """The model was cut anew while the run was under way."""

    KEY: ClassVar[str] = "cut"
    number: int
    """0: it was not."""
    clock: int
    """The step that all shards were at."""
    directory: str
    """The checkpoint that has their values."""
    terms: tuple[int, ...]
    """Of the servers that had the parts of the cut before."""

    def ends(self, shard: int, term: int) -> bool:
        """Whether this process of a server had a part of the cut before."""
        return self.number > 0 and term == self.terms[shard]


@dataclass(frozen=True, slots=True)
class Norm(Piece):
    KEY: ClassVar[str] = "norm"
    clock: int
    squared: float
    """The sum of the squares."""


@dataclass(frozen=True, slots=True)
class LeadState(Piece):
    KEY: ClassVar[str] = "lead"
    clock: int
    state: Json
    journal: Json
    """The recorded results of a lead that drives the method, for a replay; see `Lead.drive`."""


Kind = TypeVar("Kind", bound=Piece)


class Entry(NamedTuple):
    """A piece as it is written."""

    key: str
    value: Any
    """A typed piece, or JSON; None: forget the key."""


class Fields(NamedTuple):
    """What one of its owners knows of a piece that several parts of the coordinator own."""

    kind: type[Work] | type[EvaluationMemory]
    values: Mapping[str, Any]


class Memory:
    """What an earlier coordinator has persisted; {}: nothing."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.stored = stored

    def piece(self, kind: type[Kind]) -> Kind | None:
        """A typed piece; None if there is none."""
        row = self.stored.get(kind.KEY)
        return None if row is None else kind(*row)

    @property
    def work(self) -> Work:
        return self.piece(Work) or Work()

    def value(self, key: str, default: Any = None) -> Any:
        """A piece that is stored as it is."""
        return self.stored.get(key, default)

    def under(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """What follows on the prefix, and the value, of all such keys."""
        for key, value in self.stored.items():
            if key.startswith(prefix):
                yield key.removeprefix(prefix), value

    @property
    def has_released(self) -> bool:
        """Whether the workers of this execution were released: from then on the checkpoint that it
        resumed from is not needed.
        """
        run = self.piece(RunMemory)
        return run is not None and run.released is not None

    @property
    def only_exits(self) -> bool:
        """Whether only the exit of the processes was left of a run that ends in order: its last
        checkpoint is on record, and its servers may have removed their shards.
        """
        run, end = self.piece(RunMemory), self.piece(End)
        if run is None or end is None or run.state != "stopping":
            return False
        return end.is_shutting_down and end.state != "failed"


_UNSEEN = object()
"""Differs from all values."""


class MemoryRecord:
    """What the database has of the coordinator's state, or will have."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """keys: those that a predecessor has left. All pieces are written once more."""
        self.known: dict[str, Any] = dict.fromkeys(keys, _UNSEEN)
        self._shared: dict[str, Work | EvaluationMemory] = {}

    def changes(self, pieces: Iterable[Entry | Fields]) -> dict[str, Any]:
        """Key -> JSON, of those pieces that differ from what is known; None: forget the key."""
        changed: dict[str, Any] = {}
        for piece in pieces:
            if isinstance(piece, Entry):
                self._take(piece.key, piece.value, changed)
            else:
                key = piece.kind.KEY
                self._shared[key] = replace(self._shared.get(key, piece.kind()), **piece.values)
                self._take(key, self._shared[key], changed)
        return changed

    def _take(self, key: str, value: Any, changed: dict[str, Any]) -> None:
        piece = value.to_json() if isinstance(value, Piece) else value
        piece = list(piece) if isinstance(piece, tuple) else piece
        if self.known.get(key) == piece:
            return
        changed[key] = piece
        if piece is None:
            del self.known[key]
        else:
            self.known[key] = piece
