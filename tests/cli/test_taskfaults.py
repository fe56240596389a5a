"""A task that hangs, or ends its process: who reads `status` and `why` knows what to do."""

from __future__ import annotations

import json
import time

import pytest
from identity import ME

pytestmark = pytest.mark.usefixtures("clock_stands")

BLAME = "no worker of dlctl ends with that code, so something in the task ends the process (x)"
JOB = "-j digits-7f3a"


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=3)
    made.run(state="degraded", updated_at=time.time() + 60, waiting="", **ME)
    made.daemon("server-0", phase="serving", updated_at=time.time())
    return made


def hangs(run, index: int, at: object = "/home/me/train.py:51", state: str = "slow") -> None:
    run.daemon(
        f"worker-{index}", state=state, phase="in one batch for 23 s", updated_at=time.time(),
        metrics={"stuck_s": 23.0, "hangs": True, "stuck_at": at},
    )  # fmt: skip


def ended(run, index: int, state: str, times: int = 4, ago_s: float = 3.0, **values) -> None:
    first = ", for the 4th time in a row" if times > 1 else ""
    last = {
        "code": 3, "text": "exit 3", "at": time.time() - ago_s, "last_lines": [],
        "in_row": times, "blame": f"{first}: {BLAME}",
    }  # fmt: skip
    row = {"incarnation": times + 1, "phase": "computing", "updated_at": time.time()}
    run.daemon(f"worker-{index}", state=state, last_exit=last, **row, **values)


# ---------------------------------------------------------------- one that hangs


def test_when_all_hang_in_one_line_that_line_is_to_be_corrected_and_one_command_is_enough(
    run, dlctl_command
):
    for index in range(3):
        hangs(run, index)
    sentence = "is slow: in one batch for 23 s, at /home/me/train.py:51"
    step = [
        "   next: see why /home/me/train.py:51 does not come back, and correct it, then",
        f"         dlctl restart 'worker-*' {JOB}",
    ]
    out = dlctl_command("why").out.splitlines()
    assert out == [*(f"worker-{n} {sentence}" for n in range(3)), *step]
    status = dlctl_command("status").out
    assert status.count(f"! worker-1 {sentence}\n") == 1
    assert status.count("next: ") == 1
    assert status.count(f"dlctl restart 'worker-*' {JOB}") == 1
    causes = json.loads(dlctl_command("why", "--json").out)["causes"]
    assert all("'worker-*'" in cause["next"] for cause in causes)
    assert f"dlctl restart 'worker-*' {JOB}" in dlctl_command("why", "worker-1").out
    assert f"worker-2 {sentence}" in dlctl_command("logs", "--failed").out


def test_two_of_three_are_restarted_together_and_one_alone_on_its_own(run, dlctl_command):
    hangs(run, 0)
    hangs(run, 2, "/home/me/data.py:7")
    run.daemon("worker-1", phase="computing", updated_at=time.time())
    assert f"next: dlctl restart worker-0 {JOB}\n" in dlctl_command("why").out
    hangs(run, 2)
    out = dlctl_command("why").out
    assert f"then\n         dlctl restart worker-0 worker-2 {JOB}\n" in out
    assert out.count("next: ") == 1


def test_the_place_is_foreign_text_of_any_length_and_kind(run, dlctl_command):
    hangs(run, 0, "/\x1b[31m\u202e" + "y" * 100_000 + "/train.py:51")
    hangs(run, 1, ["train.py:51"])
    hangs(run, 2, "")
    for command in ("status", "why"):
        out = dlctl_command(command).out
        assert "\x1b[31m" not in out
        assert "\u202e" not in out
        assert "/train.py:51" in out
        assert len(out) < 3000
        assert f"dlctl restart worker-1 {JOB}" in out


def test_a_file_beside_us_is_named_as_one_types_it(run, dlctl_command, own_place):
    hangs(run, 0, f"{own_place}/train.py:51")
    assert "in one batch for 23 s, at train.py:51\n" in dlctl_command("why").out


def test_a_batch_that_takes_longer_than_usual_is_no_rest(run, dlctl_command):
    run.run(state="running")
    for index, metrics in enumerate(({"in_batch_s": 12.0}, {"in_batch_s": 7.2}, {})):
        row = {"phase": "computing", "updated_at": time.time(), "metrics": metrics}
        run.daemon(f"worker-{index}", **row)
    assert dlctl_command("why").out.splitlines() == [
        "batches take longer than usual: digits-7f3a is running",
        "  worker-0: computing, in one batch for 12s",
        "  worker-1: computing, in one batch for 7.2s",
    ]
    assert "worker-2 waits for nobody" in dlctl_command("why", "worker-2").out


# ---------------------------------------------------------------- one that ends its process


@pytest.mark.parametrize("state", ["backoff", "starting", "running"])
def test_what_ends_the_process_is_looked_for_in_the_task(run, dlctl_command, state):
    for index in range(3):
        ended(run, index, state)
    for command in ("status", "why"):
        out = dlctl_command(command).out
        assert out.count(f"ended with exit 3 3.0s ago, for the 4th time in a row: {BLAME}; ") == 3
        assert out.count("next: find what ends the process in ") == 1
        assert out.count(f"dlctl restart 'worker-*' {JOB}") == 1
        assert "--previous" not in out
        assert "nobody waits" not in out


def test_a_single_end_of_long_ago_is_not_told_of_and_one_that_comes_again_is(run, dlctl_command):
    ended(run, 0, "running", times=1, ago_s=90.0)
    assert "exit 3" not in dlctl_command("status").out
    ended(run, 0, "running", times=2, ago_s=90.0)
    assert "! worker-0 ended with exit 3 1m30s ago, for the 4th" in dlctl_command("status").out
    ended(run, 0, "running", times=2, ago_s=700.0)
    assert "exit 3" not in dlctl_command("status").out


def test_after_its_quarantine_the_task_is_to_be_corrected_first(run, dlctl_command):
    error = f"it ended by itself (exit 3), for the 4th time in a row: {BLAME}"
    ended(run, 0, "quarantined", error=error)
    out = dlctl_command("why").out
    assert out.startswith(f"worker-0 is quarantined: {error} (3.0s ago)\n   next: find what ends")
    assert f"then\n         dlctl restart worker-0 {JOB}\n" in out


def test_a_run_that_has_failed_of_it_goes_on_when_the_task_is_corrected(run, dlctl_command):
    reason = f"no worker is left: worker-0: it ended by itself (exit 3), for the 4th: {BLAME}"
    run.run(state="failed", reason=reason, pid=None, ended_at=time.time(), job_file="/x/job.toml")
    for command in ("status", "why"):
        out = dlctl_command(command).out
        assert "find what ends the process in " in out
        assert ", and correct it first, then\n" in out


def test_a_worker_whose_process_is_gone_is_not_said_to_be_killed_soon(run):
    from dlctl.ops import control

    row = {
        "name": "worker-0", "state": "gone", "phase": "its process is gone", "kill_at": 90.0,
        "metrics": {"stuck_s": 57.0},
    }  # fmt: skip
    assert control.told(row, 100.0) == "worker-0 (gone)"
