"""Reads where the time of a run's daemons went (`records/work_times.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from dlctl.records.work_times import FOLDER, SCHEMA, Json, LoopTimes, WorkTimes
from dlctl.util import regular


@dataclass(slots=True)
class DaemonTimes:
    """Of all incarnations of a daemon."""

    work: dict[str, WorkTimes] = field(default_factory=dict)
    """Kind of a worker's work -> its times."""
    loop: LoopTimes = field(default_factory=LoopTimes)
    waited_s: float = 0.0
    """How long its threads were ready and had no core."""
    cores: int = 0


def read(directory: Path) -> dict[str, DaemonTimes]:
    """Daemon -> its times, as far as they are recorded here: those of daemons on other machines are
    not. A damaged file counts as missing.
    """
    found: dict[str, DaemonTimes] = {}
    for path in sorted((directory / FOLDER).glob("*.json")):
        try:
            values = json.loads(regular.read_bytes(path))
            if values["schema"] != SCHEMA:
                continue
            work = {str(kind): WorkTimes.of_json(row) for kind, row in values["work"].items()}
            loop = LoopTimes.of_json(values["loop"])
            waited_s, cores = float(values["waited_s"]), int(values["cores"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        times = found.setdefault(path.name.partition(".")[0], DaemonTimes())
        for kind, row in work.items():
            times.work[kind] = WorkTimes.together([times.work.get(kind, WorkTimes()), row])
        times.loop = LoopTimes.together([times.loop, loop])
        times.waited_s += waited_s
        times.cores = cores
    return found


def as_data(directory: Path) -> Json:
    """Daemon -> where its time went, in milliseconds, as far as it is recorded on this machine:
    "work" and "handled" by their kinds, and how long its threads waited for a core.
    """
    return {
        name: {
            "waited_s": round(times.waited_s, 3),
            "work": {
                kind: {
                    "count": row.count,
                    "mean_ms": round(1000 * row.mean_s, 3),
                    "p90_ms": round(1000 * row.quantile(0.9), 3),
                    "cpu_ms": round(1000 * row.cpu_s / row.count, 3) if row.count else 0.0,
                }
                for kind, row in times.work.items()
            },
            "handled": {
                kind: {
                    "count": row.count,
                    "cpu_ms": round(1000 * row.cpu_s / row.count, 3) if row.count else 0.0,
                }
                for kind, row in times.loop.handled.items()
            },
            "around_event_ms": round(1000 * times.loop.around_s, 3),
        }
        for name, times in read(directory).items()
    }
