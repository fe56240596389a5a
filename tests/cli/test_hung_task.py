"""A task that hangs, or ends its process: who reads `status` and `why` knows what to do."""

from __future__ import annotations

import json
import time

import pytest
from next_step_lines import flat
from process_identity import ME

pytestmark = pytest.mark.usefixtures("clock_stands")

BLAME = "something in the task ends the process (x)"
JOB = "-j digits-7f3a"


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=3)
    made.run(state="degraded", updated_at=time.time() + 60, waiting="", **ME)
    made.daemon("server-0", phase="serving", updated_at=time.time())
    return made


def test_when_all_hang_in_one_line_one_command_is_enough(run, dlctl_command, own_place):
    for index in range(3):
        run.daemon(f"worker-{index}", state="slow").problem(
            "worker-stuck", f"worker-{index}", phase="in one batch for 23 s",
            place=f"{own_place}/train.py:51", cause="task", restart="'worker-*'",
        )  # fmt: skip
    sentence = "slow: stuck in one batch for 23 s, at train.py:51"
    step = [
        "   next: find out why train.py:51 does not return and fix it, then",
        f"         dlctl restart 'worker-*' {JOB}",
    ]
    out = dlctl_command("why").out.splitlines()
    assert out == [*(f"worker-{n}: {sentence}" for n in range(3)), *step]
    status = dlctl_command("status").out
    assert status.count(f"! worker-1: {sentence}\n") == 1
    assert status.count(f"dlctl restart 'worker-*' {JOB}") == 1
    causes = json.loads(dlctl_command("why", "--json").out)["causes"]
    assert all("'worker-*'" in cause["next"] for cause in causes)


def test_other_hosts_get_the_task_when_the_run_is_started(run, dlctl_command):
    job = json.loads((run.path / "job.json").read_text())
    job["hosts"] = [{"ssh": "h2", "workers": 1, "servers": 0}]
    job["launcher"]["name"] = "ssh"
    (run.path / "job.json").write_text(json.dumps(job))
    run.run(job_file="/x/job.toml")
    run.problem("worker-crash-loop", "worker-1", 1.0, exit="exit 3", in_row=4, cause="task")
    then = f"fix it, then dlctl stop {JOB} dlctl start /x/job.toml"
    assert then in flat(dlctl_command("why").out)


def test_a_run_that_has_failed_of_it_goes_on_when_the_task_is_corrected(run, dlctl_command, golden):
    reason = f"no worker is left: worker-0: it ended by itself (exit 3), for the 4th: {BLAME}"
    run.run(state="failed", reason=reason, pid=None, ended_at=time.time(), job_file="/x/job.toml")
    for command in ("status", "why"):
        out = dlctl_command(command).out
        golden(f"{command}-task-ends-process", out)


def test_a_worker_whose_process_is_gone_is_not_said_to_be_killed_soon(run):
    from dlctl.ops import control

    row = {
        "name": "worker-0", "state": "gone", "phase": "its process is gone", "kill_at": 90.0,
        "metrics": {"stuck_s": 57.0},
    }  # fmt: skip
    assert control.describe(row, 100.0) == "worker-0 (gone)"
