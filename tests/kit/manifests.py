"""A manifest of a checkpoint, for all tests that write one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlctl.model import frozen
from dlctl.model.flat import Layout
from dlctl.records.manifest import SCHEMA
from dlctl.runs import checkpoints

LAYOUT = [
    ["weight", "trained", [10, 10], "float32", ["tied"]],
    ["bias", "trained", [3], "bfloat16", []],
    ["mean", "averaged", [4], "float32", []],
    ["frozen", "constant", [2], "float32", []],
]


def whole(**changes: Any) -> dict[str, Any]:
    """Every field of a manifest; those that no test says anything of have some good value.

    `size` follows from `layout`. Without `shards` it is not valid yet.
    """
    layout = changes.get("layout", LAYOUT)
    return {
        "schema": SCHEMA,
        "run_id": "digits-7f3a",
        "job": "digits",
        "number": 1,
        "step": 12,
        "samples": 384,
        "at": 1.75e9,
        "layout": layout,
        "size": Layout.from_rows(layout).size(),
        "algorithm": {"name": "downpour", "options": {}},
        "optimizer": "adagrad",
        "shards": [],
        "workers": [],
        "data": {"portions": [[0, 0], [0, 3]]},
        "evaluation": None,
        **changes,
    }


def frozen_part(directory: Path, layout: list[list[Any]] = LAYOUT) -> dict[str, Any]:
    """Write the file of a layout's frozen parameters, all bytes 1; what a manifest says of it."""
    rows = Layout.from_rows(layout)
    plan = frozen.plan(rows)
    digests = b"".join(frozen.digest(b"\1" * (hi - lo)) for lo, hi in plan.places)
    file = frozen.file_name(rows, digests)
    content = plan.head + b"\1" * (plan.nbytes - len(plan.head))
    sha256, nbytes = checkpoints.write_chunks(directory / file, [content])
    return {"file": file, "sha256": sha256, "nbytes": nbytes, "digests": digests.hex()}
