"""Reads how long the work of each worker of a run took (`records/work_times.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from dlctl.records.work_times import FOLDER, SCHEMA, WorkTimes
from dlctl.util import regular


@dataclass(slots=True)
class WorkerTimes:
    """Of all incarnations of a worker."""

    work: dict[str, WorkTimes] = field(default_factory=dict)
    """Kind -> its times."""
    waited_s: float = 0.0
    """How long its threads were ready and had no core."""
    cores: int = 0


def read(directory: Path) -> dict[str, WorkerTimes]:
    """Worker -> its times, as far as they are recorded here: those of workers on other machines are
    not. A damaged file counts as missing.
    """
    found: dict[str, WorkerTimes] = {}
    for path in sorted((directory / FOLDER).glob("*.json")):
        try:
            values = json.loads(regular.read_bytes(path))
            if values["schema"] != SCHEMA:
                continue
            work = {str(kind): WorkTimes.of_json(row) for kind, row in values["work"].items()}
            waited_s, cores = float(values["waited_s"]), int(values["cores"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        times = found.setdefault(path.name.partition(".")[0], WorkerTimes())
        for kind, row in work.items():
            times.work[kind] = WorkTimes.together([times.work.get(kind, WorkTimes()), row])
        times.waited_s += waited_s
        times.cores = cores
    return found
