"""A project's directory that was moved or copied: nothing begins anew unnoticed."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from next_step_lines import commands_of
from stand_in_jobs import the_run


def test_a_moved_project_goes_on_by_the_command_that_its_start_names(
    job, own_place, play, dlctl_command, monkeypatch
):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    assert dlctl_command("stop").code == 0
    old = the_run(own_place)["run_id"]
    place = own_place.with_name("elsewhere")
    own_place.rename(place)
    monkeypatch.chdir(place)
    for command in ("start", "plan"):
        code, _, err = dlctl_command(command, "job.toml")
        assert (code, f"{old} was created for {job}," in err) == (
            1,
            True,
        )
    (on,) = commands_of(err)
    assert on.startswith("dlctl start --from ")
    assert dlctl_command(*shlex.split(on)[1:]).code == 0
    assert dlctl_command("stop").code == 0
    assert len(list(Path("runs").iterdir())) == 2
    assert dlctl_command("plan", "job.toml").code == 0, "it has a run of its own now"


def test_a_copied_project_begins_a_run_of_its_own(
    job, own_place, play, dlctl_command, tmp_path, monkeypatch
):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    assert dlctl_command("stop").code == 0
    shutil.copytree(own_place, tmp_path / "copied")
    monkeypatch.chdir(tmp_path / "copied")
    code, out, err = dlctl_command("plan", "job.toml")
    assert (code, out != "") == (0, True), err
