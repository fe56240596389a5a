"""`advised` compares runs on hosts that have the data of the task."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import advised
from tests.hosts.cluster import missing

ROOT = Path(__file__).parents[2]
TELL = "import train; print(train.STEP_S, len(train.task.dataset()))"


def test_the_task_is_complete_where_only_its_python_files_and_the_shared_data_are(
    tmp_path: Path,
) -> None:
    home, host = tmp_path / "home", tmp_path / "host"
    home.mkdir()
    host.mkdir()
    cluster = advised._cluster(home)
    advised._job(home, 3.0, advised.TARGET)
    for file in home.glob("*.py"):
        shutil.move(file, host)
    (shared,) = cluster._shared
    assert f'Path("{shared}") / "digits.npz"' in (host / "digits_task.py").read_text()
    told = subprocess.run(
        [sys.executable, "-c", TELL], cwd=host, check=True, capture_output=True, text=True
    )
    assert told.stdout == "0.0 1437\n"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_quick_run_has_real_runs_that_reach_the_target(tmp_path: Path) -> None:
    result = tmp_path / "figures.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "advised", "--quick", "--json", str(result)],
        cwd=ROOT, text=True, capture_output=True, env=os.environ,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    (figure,) = json.loads(result.read_text())["figures"]
    assert figure["median"] >= 1
