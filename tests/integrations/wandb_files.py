"""Reads what wandb has written offline: a log in LevelDB's format, of records of wandb's own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto.wandb_internal_pb2 import Record

BLOCK_BYTES = 32768
IDENT = b":W&B"
HEADER_BYTES, HEAD_BYTES = 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class OfflineRun(NamedTuple):
    """What one process has written."""

    run_id: str
    project: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    exit_code: int | None
    is_preempted: bool


def read_all(directory: Path) -> list[OfflineRun]:
    """Those of a run directory, the oldest first."""
    return [_read(path) for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))]


def _read(path: Path) -> OfflineRun:
    run_id, project, exit_code, is_preempted = "", "", None, False
    config: dict[str, Any] = {}
    rows = []
    for record in map(Record.FromString, _pieces(path.read_bytes())):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, project = record.run.run_id, record.run.project
            config |= _items(record.run.config.update)
        elif kind == "config":
            config |= _items(record.config.update)
        elif kind == "history":
            rows.append(_items(record.history.item))
        elif kind == "preempting":
            is_preempted = True
        elif kind == "exit":
            exit_code = record.exit.exit_code
    return OfflineRun(run_id, project, config, rows, exit_code, is_preempted)


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _pieces(data: bytes) -> Iterator[bytes]:
    assert data.startswith(IDENT)
    at, whole = HEADER_BYTES, b""
    while at + HEAD_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEAD_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEAD_BYTES])
        at += HEAD_BYTES
        piece = data[at : at + size]
        at += size
        whole = piece if kind in (FULL, FIRST) else whole + piece
        if kind in (FULL, LAST):
            yield whole
