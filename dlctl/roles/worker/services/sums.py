"""A group member's record of its sums, and the state that all members derive from those records.

A sum has three phases. First, all members announce their contributions (`Row`). Second, the vectors
are summed, and every member stores the result. Third, once all members have stored it, it is
delivered. A member that was delivered a result therefore knows that all live members have it, and a
group that re-forms can tell a committed sum from one that must be repeated (`SumRecords.agree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import Reduce, Reduced


class ModelLost(DlctlError):
    """No member of the group has its current model."""

    def __init__(self) -> None:
        super().__init__("all replicas that had the model have ended")


NEW = -1
"""Instead of a number of sums: this member has been in no group yet."""


class Row(NamedTuple):
    """A member's contribution to a sum."""

    slot: int
    size: int
    """Elements."""
    weight: float
    step: int
    joins: bool
    """The member has taken part in no sum yet."""
    is_behind: bool
    """The member has joined, but has not received the others' current model."""
    beside: float = 0.0
    dtype: str = "float32"
    begun: int = 0
    """Elements of a sum that it began while it computed; 0: none."""
    is_void: bool = False
    """The sum it began is of another vector than the one it brings."""


def row_of(effect: Reduce) -> Row:
    return Row(
        effect.slot, effect.vector.size, effect.weight, effect.step, effect.joins,
        effect.is_behind, effect.beside, effect.dtype,
    )  # fmt: skip


class SumPlan(NamedTuple):
    """How a sum is computed; equal on all members, since it is derived from the same rows."""

    size: int
    step: int
    weights: tuple[float, ...]
    """Weights by rank; 0 for members at another step, and for those that join."""
    joined: int
    current: tuple[int, ...]
    """The slots of the members that have the group's current model, ascending."""
    beside: float
    """The mean, by weight; 0 if no member has a weight."""
    dtype: str
    begun: int
    """Elements of a sum that some members have begun, which all have to complete; 0: none."""
    is_void: bool
    """The sum that was begun is not this one."""


def plan_of(rows: Sequence[Row]) -> SumPlan:
    """Members that are joining, or have just joined, do not determine step and size. A member at an
    older step than others is treated as joining: replicas save at different steps, and resume from
    there. The size of a vector without weight does not matter.

    Raises ModelLost if there is no other member; DlctlError if members at one step bring vectors
    of different kinds.
    """
    current = [row for row in rows if not row.joins and not row.is_behind]
    if not current:
        raise ModelLost
    step = max(row.step for row in current)
    newest = [row for row in current if row.step == step]
    kinds = {(row.size, row.dtype) for row in newest if row.weight} or {(0, "float32")}
    if len(kinds) > 1:
        of = " and ".join(f"{size} {dtype}" for size, dtype in sorted(kinds))
        raise DlctlError(f"at step {step} members of the group sum vectors of {of}")
    size, dtype = kinds.pop()
    weights = tuple(row.weight if row.step == step and not row.joins else 0.0 for row in rows)
    joined = sum(row.joins or (row in current and row.step != step) for row in rows)
    slots = tuple(sorted(row.slot for row in newest))
    beside = sum(weight * row.beside for weight, row in zip(weights, rows, strict=True) if weight)
    begun = max(row.begun for row in rows)
    is_void = any(
        row.begun and (row.is_void or row.begun != size or row.weight != weight)
        for row, weight in zip(rows, weights, strict=True)
    )
    return SumPlan(
        size, step, weights, joined, slots, beside / (sum(weights) or 1.0), dtype, begun, is_void
    )


class Claim(NamedTuple):
    """A member's statement about its sums when a group re-forms."""

    finished: int
    """The number of sums delivered to the member, or `NEW`."""
    finished_in: int
    """The generation that computed the newest of them."""
    kept_in: int
    """The generation that computed the next sum, stored here but not delivered yet; 0: none."""

    def has(self, number: int, generation: int) -> bool:
        """Whether the member has the result of this sum, as that generation has computed it."""
        if self.finished == number:
            return self.finished_in == generation
        return self.finished == number - 1 and 0 < self.kept_in == generation


class Agreed(NamedTuple):
    number: int
    """The number of the newest committed sum."""
    result: Reduced | None
    """The result of the newest committed sum, if it was not delivered to this member yet."""


@dataclass(slots=True)
class SumRecords:
    """Which sums one member of a group has, over all generations of the group."""

    finished: int = NEW
    finished_in: int = 0
    kept: Reduced | None = None
    """The next sum, which this member has and others may not have."""

    def claim(self) -> Claim:
        return Claim(self.finished, self.finished_in, self.kept.generation if self.kept else 0)

    def keep(self, result: Reduced) -> None:
        """Store the result of the next sum. To be called before any member is notified of it."""
        self.kept = replace(result, number=self.finished + 1)

    def deliver(self) -> Reduced:
        """Deliver the stored result: all members have it."""
        assert self.kept is not None
        result, self.kept = self.kept, None
        self.finished, self.finished_in = result.number, result.generation
        return result

    def agree(self, claims: Sequence[Claim]) -> Agreed:
        """The newest committed sum, by the claims of all members, this one included.

        A sum delivered to one member is stored by all members of that generation, so the newest
        delivered sum is committed. The sum after it is committed if all members have it. Raises
        DlctlError if this member was left behind: it has missed a committed sum, or has another
        result of it.
        """
        known = [claim for claim in claims if claim.finished != NEW]
        newest, made_in = max(((c.finished, c.finished_in) for c in known), default=(0, 0))
        members = [claim for claim in known if claim.has(newest, made_in)]
        after = {c.kept_in if c.finished == newest else 0 for c in members}
        counts_after = len(after) == 1 and after != {0}
        if self.finished == NEW or (self.finished == 0 and self.kept is None):
            # It has no sum yet, so nothing of it can conflict.
            self.finished, self.finished_in = newest, made_in
            if counts_after:
                self.finished, self.finished_in = newest + 1, after.pop()
            return Agreed(self.finished, None)
        if not self.claim().has(newest, made_in):
            raise DlctlError(
                f"the group has continued without this replica: it is at sum {newest}, and "
                f"this replica at {self.finished}"
            )
        is_due = self.finished < newest or counts_after
        result = self.deliver() if is_due else None
        self.kept = None
        return Agreed(self.finished, result)
