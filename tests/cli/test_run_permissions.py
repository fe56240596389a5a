"""Who can enter the directory of a run: its user, and whom the user has let in since."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stand_in_jobs import the_run

from dlctl.health.findings import WARNING


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_is_closed_to_others_whatever_the_umask_says(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    with umask(0):
        assert dlctl_command("start", "job.toml").code == 0
    directory = Path(the_run(own_place)["directory"])
    assert mode(directory) == 0o700
    assert mode(directory / "key") == 0o600
    assert mode(directory.parent) == 0o777, "this is not a run"


@pytest.mark.parametrize(("chosen", "is_told"), [(0o755, True), (0o750, False)])
def test_a_mode_that_is_there_stays_and_is_told_if_everybody_can_enter(
    job, own_place, play, dlctl_command, chosen, is_told
):
    play("start", "ready", "forever")
    first = dlctl_command("start", "job.toml")
    assert "chmod" not in first.err
    assert dlctl_command("stop").code == 0
    directory = Path(the_run(own_place)["directory"])
    directory.chmod(chosen)
    again = dlctl_command("start", "job.toml")
    assert (again.code, f"chmod 700 {directory}" in again.err) == (0, is_told)
    assert (f"(mode {chosen:04o})" in again.err) == is_told
    assert mode(directory) == chosen
    assert dlctl_command("stop").code == 0


@pytest.mark.long
def test_doctor_names_the_runs_that_everybody_can_enter_and_what_closes_them(
    run_directory, dlctl_command
):
    modes = {"open-0001": 0o755, "group-0002": 0o750, "own-0003": 0o700, "it's-0004": 0o711}
    made = {name: run_directory(name).run(state="stopped").path for name in modes}
    for name, path in made.items():
        path.chmod(modes[name])
    code, out, _ = dlctl_command("doctor", "--json")
    (found,) = [row for row in json.loads(out)["findings"] if row["subject"] == "runs"]
    assert (code, found["mark"], found["facts"]) == (0, WARNING, {"open": 2})
    assert "2 runs" in found["found"]
    for name in ("open-0001 (mode 0755)", "it's-0004 (mode 0711)"):
        assert name in found["found"]
    assert os.system(found["fix"]) == 0
    assert [mode(path) for path in made.values()] == [0o700, 0o750, 0o700, 0o700]
