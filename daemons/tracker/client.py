"""What a tracker's client does, and what both of them tell about the job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from dlctl.job import config
from dlctl.job.config import JobFile
from dlctl.util.redact import redacted, redacted_arguments

LEFT_OUT = ("hosts", "launcher", "log", "network", "timeouts")
"""Sections that are about machines, not about the training."""


class TrackerClient(Protocol):
    """Goes on with the tracker's run of this run, or begins it. Methods raise what the package
    raises.
    """

    holds_s: float
    """The longest that the package keeps a row in memory before it is written or sent."""

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with "at" (seconds since 1970), "step" and "values" (tag -> number)."""

    def end(self, outcome: str) -> None:
        """The run has "finished", "failed" or "stopped"."""

    def leave(self) -> None:
        """Deliver what is left, and leave the tracker's run as it is."""


def settings(job: JobFile) -> dict[str, Any]:
    """The settings of a job by their dotted keys, without those that are not set, and without
    credentials.
    """
    whole = config.to_dict(job)
    whole["job"]["args"] = " ".join(redacted_arguments(job.job.args))
    sections = {key: value for key, value in whole.items() if key not in LEFT_OUT}
    return dict(_flat("", sections))


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = prefix if key == "options" else f"{prefix}{key}."
            yield from _flat(inner, value)
        elif isinstance(value, list | tuple):
            if value:
                yield prefix + key, redacted(json.dumps(value, default=str))
        elif value is not None and value != "":
            yield prefix + key, redacted(value) if isinstance(value, str) else value
