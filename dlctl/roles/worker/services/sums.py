"""What a member of a group knows of its sums, and what all members conclude from that.

A sum is made in three steps: all members are there and tell what they bring (`Row`); the vectors
are summed, and every member keeps the result; when all of them have it, it is handed out. So
whoever was handed a result knows that all who live have it, too, and a group that is made anew can
tell a sum that counts from one that has to be begun again (`Records.agree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import Reduce, Reduced


class ModelLost(DlctlError):
    """No member of the group has what it has come to."""

    def __init__(self) -> None:
        super().__init__("all replicas that had the model have ended")


NEW = -1
"""In place of a number of sums: this member has been in no group yet."""


class Row(NamedTuple):
    """What a member brings to a sum."""

    slot: int
    size: int
    """Elements."""
    weight: float
    step: int
    joins: bool
    """It has taken part in no sum yet."""
    is_behind: bool
    """It has joined, and was not handed what the others have come to."""
    beside: float = 0.0
    dtype: str = "float32"
    begun: int = 0
    """Elements of a sum that it has begun while it computed; 0: it has not."""
    is_void: bool = False
    """That is of another vector than the one it brings."""


def row_of(effect: Reduce) -> Row:
    return Row(
        effect.slot, effect.vector.size, effect.weight, effect.step, effect.joins,
        effect.is_behind, effect.beside, effect.dtype,
    )  # fmt: skip


class Plan(NamedTuple):
    """How a sum is made; the same for all members, as it follows from the same rows."""

    size: int
    step: int
    weights: tuple[float, ...]
    """By rank; 0 for members at another step, and for those that join."""
    joined: int
    first: int
    """The lowest slot of those that have what the group has come to."""
    beside: float
    """The mean, by weight; 0 if nobody has a weight."""
    dtype: str
    begun: int
    """Elements of a sum that some have begun: all have to end it; 0: nobody has."""
    is_void: bool
    """It is not this one."""


def plan_of(rows: Sequence[Row]) -> Plan:
    """Those that join, or have just done so, have nothing to say about step and size. Who is at an
    older step than others joins, too: replicas save at different steps, and go on from there. Of
    what has no weight the size does not matter.

    Raises ModelLost if there is nobody else; DlctlError if members at one step bring vectors of
    different kinds.
    """
    told = [row for row in rows if not row.joins and not row.is_behind]
    if not told:
        raise ModelLost
    step = max(row.step for row in told)
    newest = [row for row in told if row.step == step]
    kinds = {(row.size, row.dtype) for row in newest if row.weight} or {(0, "float32")}
    if len(kinds) > 1:
        of = " and ".join(f"{size} {dtype}" for size, dtype in sorted(kinds))
        raise DlctlError(f"at step {step} members of the group sum vectors of {of}")
    size, dtype = kinds.pop()
    weights = tuple(row.weight if row.step == step and not row.joins else 0.0 for row in rows)
    joined = sum(row.joins or (row in told and row.step != step) for row in rows)
    first = min(row.slot for row in newest)
    beside = sum(weight * row.beside for weight, row in zip(weights, rows, strict=True) if weight)
    begun = max(row.begun for row in rows)
    is_void = any(
        row.begun and (row.is_void or row.begun != size or row.weight != weight)
        for row, weight in zip(rows, weights, strict=True)
    )
    return Plan(
        size, step, weights, joined, first, beside / (sum(weights) or 1.0), dtype, begun, is_void
    )


class Claim(NamedTuple):
    """What a member says of itself when a group is made anew."""

    finished: int
    """Sums that it was handed; `NEW`."""
    finished_in: int
    """The generation that has made the newest of them."""
    kept_in: int
    """The generation that has made the next sum, which it has and was not handed; 0: it has none.
    """

    def has(self, number: int, generation: int) -> bool:
        """Whether it has the result of this sum, as that generation has made it."""
        if self.finished == number:
            return self.finished_in == generation
        return self.finished == number - 1 and 0 < self.kept_in == generation


class Agreed(NamedTuple):
    number: int
    """Of the newest sum that counts."""
    result: Reduced | None
    """Of that one, if this member was not handed it yet."""


@dataclass(slots=True)
class Records:
    """Of one member, over all generations of its group."""

    finished: int = NEW
    finished_in: int = 0
    kept: Reduced | None = None
    """The sum after those, which this member has and others may not have."""

    def claim(self) -> Claim:
        return Claim(self.finished, self.finished_in, self.kept.generation if self.kept else 0)

    def keep(self, result: Reduced) -> None:
        """The next sum is here. To be called before anybody is told so."""
        self.kept = replace(result, number=self.finished + 1)

    def hand_out(self) -> Reduced:
        """All members have what was kept."""
        assert self.kept is not None
        result, self.kept = self.kept, None
        self.finished, self.finished_in = result.number, result.generation
        return result

    def agree(self, claims: Sequence[Claim]) -> Agreed:
        """What counts, by the claims of all members, this one included.

        What one was handed, all who were members then have; so the newest such sum counts. The one
        after it counts if all have it. Raises DlctlError if this member has been left behind: it
        has missed a sum that counts, or has another result of it.
        """
        known = [claim for claim in claims if claim.finished != NEW]
        newest, made_in = max(((c.finished, c.finished_in) for c in known), default=(0, 0))
        members = [claim for claim in known if claim.has(newest, made_in)]
        after = {c.kept_in if c.finished == newest else 0 for c in members}
        counts_after = len(after) == 1 and after != {0}
        if self.finished == NEW or (self.finished == 0 and self.kept is None):
            # It has made no sum, so it has nothing that could be another one's.
            self.finished, self.finished_in = newest, made_in
            if counts_after:
                self.finished, self.finished_in = newest + 1, after.pop()
            return Agreed(self.finished, None)
        if not self.claim().has(newest, made_in):
            raise DlctlError(
                f"the group has gone on without this replica: it is at sum {newest}, and "
                f"{self.finished} are known here"
            )
        is_due = self.finished < newest or counts_after
        result = self.hand_out() if is_due else None
        self.kept = None
        return Agreed(self.finished, result)
