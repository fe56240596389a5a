"""Which checkpoints a run descends from: where it went back to an older one, newer ones count for
nothing any more.

Every time a run resumes from a checkpoint, that goes into its events (`lineage.py`), with
all that is needed to tell later which checkpoints, and which epochs of its workers, were of before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlctl.runs.database import RunDb

KIND = "resumed"
RESUMED, COST = "resumed from the ", ": "
"""How the text of such an event begins; before what it costs to resume, if that is anything."""


@dataclass(frozen=True, slots=True)
class Resume:
    """One time that a run went on from a checkpoint."""

    checkpoint: int
    """Its number."""
    highest: int
    """Number of the newest checkpoint that there was then, good or not."""
    terms: Mapping[str, int]
    """Worker -> the newest epoch that it had been given by then."""
    told: str = ""
    """As in "checkpoint at step 30: 60 steps are done again, because ..."; "" if none were."""

    def is_after(self, worker: str, epoch: int) -> bool:
        """Whether this epoch of a worker had begun by then; so it has also ended then."""
        newest = self.terms.get(worker)
        return newest is not None and epoch <= newest


def resumes(db: RunDb) -> list[Resume]:
    """Every time that the run went on from a checkpoint, the newest one last."""
    data = ((event["data"], str(event["text"])) for event in db.events(kind=KIND))
    found = [_resume(*event) for event in data if isinstance(event[0], Mapping)]
    return [resume for resume in found if resume is not None]


def _resume(data: Mapping[str, Any], text: str) -> Resume | None:
    """None for what another version may have written."""
    number, highest, terms = (data.get(key) for key in ("checkpoint", "highest", "terms"))
    if type(number) is not int or type(highest) is not int or not isinstance(terms, Mapping):
        return None
    told = text.removeprefix(RESUMED) if COST in text else ""
    return Resume(number, highest, {k: v for k, v in terms.items() if type(v) is int}, told)


def chain(found: Sequence[Resume]) -> list[Resume]:
    """Those of the present branch, the newest one first.

    Between two of them the run may have gone another way, and come back from it.
    """
    branch: list[Resume] = []
    for resume in reversed(found):
        if not branch or branch[-1].checkpoint > resume.highest:
            branch.append(resume)
    return branch


def is_of_branch(number: int, branch: Sequence[Resume]) -> bool:
    """Whether the checkpoint with this number is one that the present run descends from."""
    newest = math.inf
    for resume in branch:
        if number > resume.highest:
            break
        newest = resume.checkpoint
    return number <= newest
