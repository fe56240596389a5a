"""A problem of a run as a value. The coordinator finds problems and records them with the status;
`dlctl.ops.problems` adds those that no living coordinator can report; `dlctl.ops.problem_texts` has
their texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from dlctl.util import values
from dlctl.util.text import BLAMED, ENDED_BY_ITSELF, NOT_FINITE, REFUSED

Code = Literal[
    "coordinator-silent",
    "coordinator-gone",
    "coordinator-restarting",
    "coordinator-restarted",
    "coordinator-unwritable",
    "host-unreachable",
    "daemon-unreachable",
    "heartbeat-late",
    "worker-stuck",
    "batch-late",
    "worker-crash-loop",
    "daemon-quarantined",
    "daemon-failed",
    "daemon-restarting",
    "daemon-restarted",
    "process-gone",
    "daemon-starting",
    "daemon-leaving",
    "daemon-waiting",
    "daemon-slow",
    "rate-limit",
    "interval-at-limit",
    "update-slow",
    "rounds-few",
    "checkpoint-late",
    "checkpoint-failed",
    "mirror-refused",
    "mirror-behind",
    "target-unreachable",
    "tracker-failed",
    "loss-noisy",
    "disk-full",
    "disk-stalled",
    "run-waiting",
    "run-failed",
]
CODES: tuple[str, ...] = get_args(Code)
Fact = str | int | float
RUN = "run"
"""The `daemon` of a problem of the run as a whole."""
NAMED_MAX = 8
"""Largest number of daemons named in a fact of one that waits, or is restarted with others."""
_NAME = re.compile(r"\b(?:worker|server|agent)-\d+\b|\bcoordinator\b")
_PLACE = re.compile(r"\(([^()\s][^()]*\.py:\d+)\)")
_NUMBER = re.compile(r"\d+")


class Problem(NamedTuple):
    code: Code
    daemon: str
    since: float | None = None
    """When it began, in seconds; None if unknown."""
    facts: Mapping[str, Fact] = MappingProxyType({})
    """Plain values. Unknown facts are missing. Keys that end in _at are times, _s seconds.

    exit            how the process exited, as in "killed by SIGKILL"
    in_row          how often in a row it has exited in this way
    incarnation     the process whose log has details
    tracker         "wandb" or "mlflow"
    cause           the cause: "task", "left" (the loop), "not finite", "full" (the disk) ...
    place           the line of the task, as in "/home/me/train.py:45"
    phase           what the daemon is doing
    waiting_for     names of daemons, as in "server-0, worker-2"
    workers         names of the workers that it delays, or that share the problem
    restart         the workers that the task terminates, as arguments of `dlctl restart`
    """

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "facts": dict(self.facts)}


def read(rows: Any) -> list[Problem]:
    """Problems from JSON; unknown ones of another version are left out."""
    found = []
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, Mapping) or row.get("code") not in CODES:
            continue
        facts, since = row.get("facts"), values.number(row.get("since"))
        items = facts.items() if isinstance(facts, Mapping) else ()
        plain = {str(key): value for key, value in items if isinstance(value, str | int | float)}
        found.append(Problem(row["code"], str(row.get("daemon")), since, plain))
    return found


def names_in(text: Any, most: int | None = None) -> list[str]:
    """The daemons that a text names, as in "server-0, worker-2 (building the model)"; at most the
    first `most`.
    """
    found = _NAME.finditer(text) if isinstance(text, str) else iter(())
    return [name.group() for name in islice(found, most)]


def known(**facts: Fact | None) -> dict[str, Fact]:
    """The facts without unknown and empty ones."""
    return {key: value for key, value in facts.items() if value is not None and value != ""}


def restart(chosen: Sequence[str], of: int) -> str:
    """These of so many workers, as arguments of `dlctl restart`: a pattern for many, or all."""
    is_all = len(chosen) == of > 1
    return "'worker-*'" if is_all or len(chosen) > NAMED_MAX else " ".join(chosen)


def cause_in(error: str) -> str:
    """The cause of an error, if its text contains one that is known."""
    if NOT_FINITE in error or REFUSED in error:
        return "not finite"
    return "task" if ENDED_BY_ITSELF in error or BLAMED in error else ""


def are_alike(one: str, other: str) -> bool:
    """Whether two errors have one cause: they name the same line of the task, or they have the same
    text apart from numbers, such as those of samples and workers. Hosts may have the task's file in
    different directories.
    """
    lines = [str(of_reason(error).get("place", "")).rpartition("/")[2] for error in (one, other)]
    if all(lines):
        return lines[0] == lines[1]
    return _NUMBER.sub("", one) == _NUMBER.sub("", other)


def of_reason(reason: str) -> dict[str, Fact]:
    """The facts in the reason of a failed run: the line of the task, and the cause."""
    places = _PLACE.findall(reason)
    return known(place=places[-1] if places else "", cause=cause_in(reason))
