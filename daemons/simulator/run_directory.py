"""A simulated run as a run directory, which `status`, `events`, `report`, `plot` and `verify` read.

Its times are shifted, as if the run had ended when the simulation did.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from daemons.coordinator.records import to_wall_clock
from dlctl.records.manifest import SCHEMA
from dlctl.records.series import Series
from dlctl.runs import checkpoints, paths
from dlctl.runs.database import ENDED, RunDb
from dlctl.runs.terms import OnDisk
from dlctl.sim.process import Process
from dlctl.sim.simulation import Outcome
from dlctl.wire.messages import Json


def write(directory: Path, outcome: Outcome, ended_at: float, mark: Json) -> None:
    """Fill the directory, whose database has its first row. ended_at: seconds since 1970. mark: how
    it was simulated.
    """
    # Whole seconds: so times are rounded alike in all runs of one seed.
    begun_at = math.floor(ended_at - outcome.seconds)
    renamed = _write_checkpoints(directory, outcome, ended_at)
    with closing(RunDb(directory)) as db:
        _write_rows(db, outcome, begun_at, renamed)
        db.put_run(simulated=mark)
        _write_series(db, outcome, begun_at)
        for seconds, kind, daemon, text in outcome.store.events:
            db.add_event(begun_at + seconds, kind, daemon, text, {})
        db.commit()
    with closing(OnDisk(directory)) as file:
        file.write(0, outcome.store.terms_file.data)
        file.sync()
    for process in outcome.world.processes:
        _write_log(directory, process, begun_at)


def _write_rows(db: RunDb, outcome: Outcome, begun_at: float, renamed: Mapping[str, Json]) -> None:
    store = outcome.store
    # The rows have the times of the last coordinator's clock.
    offset_s = begun_at - (outcome.world.coordinator.clock() - outcome.world.timeline.now)
    run = to_wall_clock(store.run, offset_s)
    if run.get("state") not in ENDED:
        run |= {"state": "stopped", "reason": "the simulated time is over", "waiting": ""}
    run |= {"pid": None, "pid_start": None, "ended_at": begun_at + outcome.seconds}
    run["started_at"] = begun_at
    if isinstance(newest := run.get("checkpoint"), Mapping):
        run["checkpoint"] = {**newest, **renamed.get(str(newest.get("path")), {})}
    db.put_run(**run)
    for name, row in store.daemons.items():
        db.put_daemon(name, to_wall_clock(row, offset_s) | {"pid": None, "pid_start": None})
    for number, row in store.checkpoints.items():
        row = to_wall_clock(row, offset_s)
        db.put_checkpoint(number, {**row, **renamed.get(str(row.get("path")), {})})


def _write_series(db: RunDb, outcome: Outcome, begun_at: float) -> None:
    series = Series({}, {})
    newest: Counter[str] = Counter(daemon for _, daemon, _, _ in outcome.store.metrics)
    for seconds, daemon, step, values in outcome.store.metrics:
        newest[daemon] -= 1
        if not series.take(daemon, seconds, always=not newest[daemon]):
            continue
        db.add_metric(begun_at + seconds, daemon, step, dict(values))
        if series.thin(daemon):
            db.thin_metrics(daemon)


def _write_checkpoints(directory: Path, outcome: Outcome, ended_at: float) -> dict[str, Json]:
    """The complete ones. Returns what changes in the row of each: simulated path -> values."""
    changed: dict[str, Json] = {}
    for simulated, manifest in outcome.store.manifests.items():
        here = directory / simulated
        here.mkdir(parents=True)
        for part in (*manifest["shards"], *manifest["workers"]):
            arrays = outcome.store.files[simulated].get(part["file"])
            if arrays is not None:
                digest, nbytes = checkpoints.write_arrays(here / part["file"], arrays)
                part |= {"sha256": digest, "nbytes": nbytes}
        checkpoints.write_manifest(
            here, {**manifest, "run_id": directory.name, "schema": SCHEMA, "at": ended_at}
        )
        changed[simulated] = {"path": str(here)}
    return changed


def _write_log(directory: Path, process: Process, begun_at: float) -> None:
    path = paths.log_path(directory, process.name, process.incarnation)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(_lines(process, begun_at)))


def _lines(process: Process, begun_at: float) -> Iterator[str]:
    for seconds, line in process.dated_log():
        level, _, text = line.partition(" ")
        stamp = datetime.fromtimestamp(begun_at + seconds, UTC)
        row = {
            "ts": stamp.strftime("%Y-%m-%dT%H:%M:%S.") + f"{stamp.microsecond // 1000:03d}Z",
            "level": level.lower(), "name": process.name, "inc": process.incarnation, "msg": text,
        }  # fmt: skip
        yield json.dumps(row) + "\n"
