"""What commands say of a run's launcher: of one of an earlier version, and of one that is gone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import pytest

from dlctl.launch import launcher, slurmcalls
from dlctl.runs import lock
from dlctl.runs.snapshot import load


def written(run, **sections) -> None:
    """Change the stored job; None removes a section."""
    content = json.loads((run.path / "job.json").read_text()) | sections
    content = {key: value for key, value in content.items() if value is not None}
    (run.path / "job.json").write_text(json.dumps(content))


@pytest.fixture
def failed(run_directory):
    run = run_directory(servers=1, workers=2)
    place = lock.place(run.path)
    run.run(state="failed", pid=None, ended_at=time.time(), place=place, job_file="/x/job.toml")
    return run


def test_a_run_of_an_earlier_version_shows_its_job_and_all_of_its_agents(failed, dlctl_command):
    asked = asdict(launcher.made("slurm", {"nodes": 2}).options)
    written(failed, launcher=None, slurm=asked)
    handle = slurmcalls.new_handle(failed.path.name, failed.path / "orders")
    handle._replace(job_id="17").write(failed.path)
    found = json.loads(dlctl_command("status", "--json").out)
    assert found["allocation"] == "job 17"
    assert {f"agent-{n}" for n in range(3)} <= load(failed.path).roles().keys()
    assert "slurm       job 17" in dlctl_command("status").out


def test_a_run_whose_launcher_is_gone_is_shown_and_says_so_before_it_is_touched(
    failed, dlctl_command
):
    host = {"ssh": "", "name": "box-1", "dir": "/boxes/box-1"}
    written(failed, launcher={"name": "theirs", "options": {}, "places": [host]})
    before = (failed.path / "job.json").read_bytes()
    assert dlctl_command("status").code == 0
    for command in (["recover"], ["stop", "--kill"]):
        ended = dlctl_command(*command)
        assert ended.code != 0
        assert 'launcher "theirs"' in ended.err
    assert (failed.path / "job.json").read_bytes() == before


def test_every_launcher_is_listed_with_its_section_and_its_keys(dlctl_command):
    listed = json.loads(dlctl_command("algorithms", "toy-boxes", "--json").out)["entries"]
    (entry,) = listed
    assert (entry["kind"], entry["section"]) == ("launchers", "launcher")
    assert [key["name"] for key in entry["keys"]] == ["boxes", "directory", "wrapper"]
    assert "dlctl-toys 1.0" in entry["summary"]
