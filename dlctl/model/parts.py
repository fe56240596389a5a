"""The parts of a run: what the workers of one kind hold, compute and may do.

A method declares its parts (`Shape.parts`). Nearly all have one, `WHOLE`, which every worker has. A
method that divides the model among parties has one for each role of [[parties]], and a server for
each. `Division` answers for a job whatever depends on a part: nothing else asks for roles.

The layout of a divided run is that of the first part, behind it that of the second one, and so on.
It has names and shapes, no values, and every server knows it. A shard is exactly one part: so it
never has parameters of two, and a worker knows the server of its own part only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job import parties
from dlctl.job.config import JobFile
from dlctl.model.cut import Bounds
from dlctl.model.flat import AVERAGED, CONSTANT, TRAINED, Layout

NOBODY = -1
TOLD_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    role: str = ""
    """The role in [[parties]] of those whose workers have it; "": the job has no parties."""
    tensors: tuple[str, ...] = ("",)
    """How the names of its tensors begin, and those of no other part."""
    task: str = ""
    """"module:Class", which makes the task of its workers of that of their party: Class(user,
    options, party's name). "": the user's task is one already."""
    engine: str = ""
    """"module:Class", the engine of its workers alone, made as `Shape.engine` is."""
    twin: str = ""
    """That engine in numpy, for the simulator."""
    has_data: bool = True
    """Its workers lease data and train on it, evaluate, and run the task's `finish`. Else they
    answer the others' questions (`ReplicaSide.serve`), and drain once all others have."""
    asks: str = ""
    """The role of the part whose only worker its computations ask."""


WHOLE = Part()


def of_job(job: JobFile) -> Division:
    return Division(registry.load("algorithms", job.algorithm.name).shape.parts, job)


class Division:
    """Which part each worker of a job has, and what follows from that."""

    def __init__(self, parts: Sequence[Part], job: JobFile) -> None:
        # A job that does not fit its method is refused by its check, not here.
        self.parts = tuple(parts) if job.parties else (WHOLE,)
        numbers = {part.role: number for number, part in enumerate(self.parts)}
        self._of_slots = [numbers.get(role, 0) for role in parties.roles(job)]

    @property
    def is_divided(self) -> bool:
        return len(self.parts) > 1

    # ------------------------------------------------------------ slots

    def number(self, slot: int) -> int:
        """The part of a worker, which may have joined later; of a divided run also its server."""
        return self._of_slots[slot] if 0 <= slot < len(self._of_slots) else 0

    def of(self, slot: int) -> Part:
        return self.parts[self.number(slot)]

    def slots_of(self, shard: int, slots: Collection[int]) -> tuple[int, ...]:
        """Those of the slots that may know this server."""
        if not self.is_divided:
            return tuple(slots)
        return tuple(slot for slot in slots if self.number(slot) == shard)

    def shards_of(self, slot: int, shards: int) -> range:
        """The servers, of so many, that a worker may know."""
        first = self.number(slot)
        return range(first, first + 1) if self.is_divided else range(shards)

    def firsts(self) -> list[int]:
        """The first slot of each part."""
        return [self._of_slots.index(number) for number in range(len(self.parts))] or [0]

    def initialises(self, slot: int) -> bool:
        """Whether the servers of its part begin with the values of this worker."""
        return slot == (self.firsts()[self.number(slot)] if self.is_divided else 0)

    @property
    def without_data(self) -> frozenset[int]:
        """The slots of the job that only answer others."""
        return frozenset(s for s, n in enumerate(self._of_slots) if not self.parts[n].has_data)

    def asked_by(self, slot: int) -> int:
        """The slot of the worker that the computations of this one ask; `NOBODY`."""
        role = self.of(slot).asks
        found = (s for s, n in enumerate(self._of_slots) if role and self.parts[n].role == role)
        return next(found, NOBODY)

    # ------------------------------------------------------------ tensors

    def joined(self, layouts: Iterable[Layout]) -> Layout:
        """The layout of the run, of the layouts of all parts."""
        return Layout(tuple(entry for layout in layouts for entry in layout.entries))

    def layout_of(self, number: int, whole: Layout) -> Layout:
        """The layout of a part, of that of the run."""
        begins = self.parts[number].tensors
        return Layout(tuple(each for each in whole.entries if each.name.startswith(begins)))

    def bounds(self, whole: Layout) -> Bounds:
        """The bounds of the shards of a divided run."""
        sizes = [self.layout_of(n, whole).size(TRAINED) for n in range(len(self.parts))]
        return (0, *accumulate(sizes))

    def check(self, worker: str, slot: int, layout: Layout) -> None:
        """Raises DlctlError for tensors that only the first part may have: its server has those."""
        for kind, what, instead in _OF_FIRST if self.number(slot) else ():
            names = [entry.name for entry in layout.entries if entry.kind == kind]
            if names:
                more = ", ..." if len(names) > TOLD_MAX else ""
                raise DlctlError(
                    f"{worker}: the model of the {self.of(slot).role} has {what}: "
                    f"{', '.join(names[:TOLD_MAX])}{more}",
                    hint=f"{instead}, and start again",
                )


_OF_FIRST = (
    (AVERAGED, "buffers", "use GroupNorm or LayerNorm in place of BatchNorm"),
    (CONSTANT, "frozen parameters", "set requires_grad = True, or keep them as plain tensors"),
)


class PartLayouts:
    """What the workers of each part have built: the layout of the run, once all parts are known."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._built: dict[int, Layout] = {}
        """Part -> its layout."""
        self._samples = 0

    def known(self, slot: int, whole: Layout | None) -> Layout | None:
        """The layout of a worker's part; whole: that of the run, if there is one."""
        number = self._division.number(slot)
        if whole is not None:
            return self._division.layout_of(number, whole)
        return self._built.get(number)

    def built(self, slot: int, layout: Layout, samples: int) -> tuple[Layout, int] | None:
        """A worker has built its part, with a dataset of so many samples; 0: it has none. The
        layout of the run and its samples; None: a part is not known so far.
        """
        if not self._division.is_divided:
            return layout, samples
        self._built[self._division.number(slot)] = layout
        self._samples = max(self._samples, samples)
        if len(self._built) < len(self._division.parts):
            return None
        every = (self._built[number] for number in range(len(self._built)))
        return self._division.joined(every), self._samples
