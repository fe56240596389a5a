"""A host of a job with parties gets the files of its own parties, and finds their tasks there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.job.config import of_stored, to_dict
from dlctl.launch import partyfiles

JOB = """
[job]
name = "s"
[algorithm]
name = "split"
[[hosts]]
ssh = "gpu1"
[[hosts]]
[[parties]]
name = "clinic"
role = "client"
task = "clinic/train.py:task"
host = "local"
[[parties]]
name = "lab"
role = "head"
task = "lab/deep/train.py:task"
host = "gpu1"
"""
FILES = {
    "clinic/train.py": b"1", "clinic/more.py": b"2", "lab/train.py": b"3",
    "lab/deep/train.py": b"4", "lab/deep/net.py": b"5", "shared.py": b"6",
}  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path) -> dict:
    for name in ("clinic", "lab/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "train.py").touch()
    (tmp_path / "job.toml").write_text(JOB)
    job = jobfile.load(tmp_path / "job.toml")
    return partyfiles.relative(json.loads(json.dumps(to_dict(job))), tmp_path)


def test_a_host_gets_the_files_below_the_tasks_of_its_parties(stored):
    assert set(partyfiles.of_host(FILES, stored, "agent-1")) == {
        "lab/deep/train.py", "lab/deep/net.py",
    }  # fmt: skip
    assert set(partyfiles.of_host(FILES, stored, "agent-0")) == {
        "clinic/train.py", "clinic/more.py",
    }  # fmt: skip


def test_without_parties_it_gets_all(stored):
    assert partyfiles.of_host(FILES, {**stored, "parties": []}, "agent-1") == FILES


def test_the_tasks_are_where_the_files_are_written(stored):
    moved = partyfiles.with_tasks(stored, lambda file: f"/there/{file}")
    tasks = [party.task for party in of_stored(moved).parties]
    assert tasks == ["/there/clinic/train.py:task", "/there/lab/deep/train.py:task"]
