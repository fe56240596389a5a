"""Which checkpoint is gone on from first."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from manifests import whole

from dlctl.errors import DlctlError
from dlctl.records import manifest
from dlctl.runs import checkpoints, lineage
from dlctl.runs.database import RunDb
from dlctl.util.text import DISCARDED, NO_WORKER, REFUSED

RUINED = f"{NO_WORKER}: worker-1: {DISCARDED} for 20 steps in a row"
LAYOUT = [["w", "trained", [2], "float32", []]]


def save(run: Path, number: int, **changes: str) -> Path:
    directory = checkpoints.create(run, number * 10, number)
    sha256, nbytes = checkpoints.write_arrays(directory / "s", {"w": np.ones(2, np.float32)})
    shard = {"name": "server-0", "file": "s", "sha256": sha256, "nbytes": nbytes, "state": {}}
    shards = [{**shard, "lo": 0, "hi": 2}]
    made = whole(number=number, step=number * 10, layout=LAYOUT, shards=shards, **changes)
    checkpoints.write_manifest(directory, made)
    return directory


def order(run: Path) -> list[int]:
    return [checkpoints.number(path)[0] for path in lineage.order(run)]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RUINED, [2, 1, 3]),
        (RUINED.replace(" or too large", ""), [2, 1, 3]),  # As it was said once.
        (f"{NO_WORKER}: worker-0: 3 {REFUSED}: its norm is 1e+30", [2, 1, 3]),
        (f"{NO_WORKER}: worker-0: it ended by itself with exit 3", [3, 2, 1]),
        ("worker-0: task.loss raised KeyError: 'labels' (train.py:45)", [3, 2, 1]),
    ],
)
def test_what_is_of_a_ruined_model_comes_behind_what_was_saved_before(
    tmp_path: Path, failure: str, expected: list[int]
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    save(tmp_path, 3, failure=failure)
    assert order(tmp_path) == expected
    save(tmp_path, 4)
    assert order(tmp_path)[0] == 4, "it has gone on in spite of that"


def test_what_a_run_has_left_for_an_older_one_comes_last(tmp_path: Path) -> None:
    first, *_ = (save(tmp_path, number) for number in (1, 2, 3))
    RunDb(tmp_path, create=True).close()
    with closing(RunDb(tmp_path)) as db:
        lineage.record(db, tmp_path, first, "")
        db.commit()
    assert order(tmp_path) == [1, 3, 2]
    save(tmp_path, 4, failure=RUINED)
    assert order(tmp_path) == [1, 4, 3, 2]


def test_why_it_failed_is_text() -> None:
    with pytest.raises(DlctlError, match=" 7"):
        manifest.serialise(whole(shards=[], failure=7), "here")
