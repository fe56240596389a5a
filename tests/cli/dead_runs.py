"""What a run that died leaves: states of its servers, checkpoints, its coordinator's memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from daemons.server.statefile import StateFile
from daemons.worker.ack_record import Acks
from dlctl.compress.base import Delta
from dlctl.job import config
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.effects import Settled
from dlctl.runs import checkpoints, database, kept_shards, terms
from dlctl.runs.terms import OnDisk, TermLog
from dlctl.shards.base import Shard, Spec, no_point

SIZE = 8


def keep(run, shard: int, version: int, deliveries: list[list[int]]) -> Path:
    """The state of a server that was killed after `version` updates; its path."""
    optimizer = SGD(SGD.Options(lr=0.1))
    spec = Spec(run.path.name, shard, 0, SIZE, optimizer.slots, workers=4)
    (place, *_) = kept_shards.places(run.path, config.Servers())
    files = StateFile([place], no_point)
    made = Shard(optimizer, files.create(spec))
    for _ in range(version):
        made.apply(Delta(np.ones(SIZE, np.float32)))
    meta = {"initialised": True, "deliveries": deliveries, "refused": [], "side": {}}
    made.commit(meta)
    files._close()
    return place / f"shard-{shard}.state"


def save(
    run, step: int, number: int, version: int = 0, deliveries: tuple = (), **changes: Any
) -> Path:
    """A complete checkpoint of one shard. `changes`: of its manifest."""
    directory = checkpoints.create(run.path, step, number)
    arrays = {
        "w": np.full(3, step, np.float32),
        "averaged": np.zeros(0),
    }
    sha256, nbytes = checkpoints.write_arrays(directory / "shard-0.safetensors", arrays)
    state = {"version": version, "deliveries": [list(row) for row in deliveries]}
    shard = {"name": "server-0", "file": "shard-0.safetensors", "sha256": sha256}
    shard |= {"nbytes": nbytes, "state": state, "lo": 0, "hi": 3}
    manifest = {
        "schema": "dlctl.checkpoint/1", "run_id": run.path.name, "job": "digits", "number": number,
        "step": step, "samples": 0, "at": time.time(), "workers": [], "shards": [shard],
        "layout": [["w", "trained", [3], "float32", []]], "size": 3, "algorithm": "downpour",
        "optimizer": "sgd", "data": {"portions": []}, "evaluation": None,
        **changes,
    }  # fmt: skip
    checkpoints.write_manifest(directory, manifest)
    return directory


def remember(run, *served: str, state: str = "running", step: int = 90, **daemons: str) -> None:
    """What the coordinator knew: `served` are servers that had a shard, `daemons` other states."""
    memory = {
        "run": [state, "", 3.0],
        "work": [step, 100, 0.5, 64, [0, 0], None],
        **{f"daemon/{name}": {"role": "server", "has_served": True} for name in served},
    }
    for name, text in daemons.items():
        key = name.replace("_", "-")
        memory[f"daemon/{key}"] = {"role": "worker", "state": text}
    run.db.put_memory(memory)
    run.db.commit()


def acknowledge(run, slot: int, incarnation: int, term: int, *counts: int) -> None:
    """What a worker was told: pushes that are settled, per shard."""
    record = Acks(run.path, f"worker-{slot}", incarnation, len(counts))
    for shard, count in enumerate(counts):
        record.write(Settled(term, shard, count))


def issue(directory: Path, issued: Mapping[str, int]) -> None:
    """Terms that daemons of this run have had."""
    with closing(OnDisk(directory)) as file:
        TermLog(file, issued).append()


def damaged_terms(directory: Path) -> Path:
    """A bit of the run's terms has flipped, and others were issued after it."""
    for term in (1, 2, 3):
        issue(directory, {"worker-0": term})
    path = directory / terms.FILE
    path.write_bytes(path.read_bytes().replace(b"worker-0=2", b"worker-0=0"))
    return path


def damaged_page(directory: Path, table: str) -> None:
    """A run that can be read, but for one table."""
    with closing(database.RunDb(directory)) as db:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = db._db.execute(query, (table,)).fetchone()
        db._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = directory / database.FILE
    data = bytearray(path.read_bytes())
    data[4096 * (page - 1) : 4096 * page] = b"\xff" * 4096
    path.write_bytes(data)
