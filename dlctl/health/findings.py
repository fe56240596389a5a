"""The results of `dlctl doctor`: a fact, its severity, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

OK, WARNING, FAULT = "ok", "warning", "fault"
"""Good; a job works, but slower or not indefinitely; a job will not work."""
LINKS = "links"
"""The place of findings between hosts."""
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    place: str
    """A host as in the job file, "this machine", or `LINKS`."""
    subject: str
    """What was checked, in a word or two."""
    mark: str
    """OK, WARNING or FAULT."""
    found: str
    fix: str = ""
    """What to do; "" if OK."""
    facts: Facts = field(default_factory=dict)
    """Numbers for programs, with their units in their names."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "subject": self.subject,
            "mark": self.mark,
            "found": self.found,
            "fix": self.fix,
            "facts": dict(self.facts),
        }


def by_place(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Grouped, in the order of the first finding of each place."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.place, []).append(finding)
    return groups


def duration_text(seconds: float) -> str:
    """A duration for people: "0.021 ms", "41 s", "3600.1 s"."""
    return f"{seconds * 1e3:.2g} ms" if abs(seconds) < 1 else f"{seconds:.6g} s"
