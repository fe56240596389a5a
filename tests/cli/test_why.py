"""`why`: rows of databases made by hand, and the sentences that come of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from identity import ME, identity


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=3)
    made.run(state="running", updated_at=time.time() + 60, waiting="", **ME)
    return made


def worker(run, index: int, **values):
    now = time.time()
    made = {"phase": "computing", "updated_at": now, "waiting_since": None, **values}
    since = made.pop("waits_s", None)
    if since is not None:
        made["waiting_since"] = now - since
    run.daemon(f"worker-{index}", **made)


def test_in_a_healthy_run_nobody_waits(run, dlctl_command):
    run.daemon("server-0", phase="serving")
    worker(run, 0, metrics={"samples_per_s": 80.0})
    worker(run, 1, waiting_for="server-0", waits_s=0.3)
    steps = {"samples_per_s": 80.0}
    worker(run, 2, phase="fetching", waiting_for="server-0", waits_s=40, metrics=steps)
    code, out, err = dlctl_command("why")
    assert (code, out, err) == (0, "nobody waits: digits-7f3a is running\n", "")
    one = dlctl_command("why", "worker-0").out
    assert one == "worker-0 waits for nobody: digits-7f3a is running\n  worker-0: computing\n"


def test_the_slowest_worker_of_a_barrier_is_the_root(run, dlctl_command):
    run.daemon(
        "server-0", phase="serving", waiting_for="worker-2", waiting_since=time.time() - 12.2,
        updated_at=time.time(),
    )  # fmt: skip
    for index in (0, 1):
        worker(run, index, phase="pushing", waiting_for="server-0", waits_s=11.1)
    worker(run, 2, state="slow", phase="in one batch for 13 s")
    out = dlctl_command("why").out.splitlines()
    assert out[0].startswith("worker-2: slow: in one batch for 13 s, for ")
    assert out[1] == "   next: dlctl restart worker-2 -j digits-7f3a"
    assert out[2] == "└─ server-0 waits for it, for 12s: serving"
    assert out[3] == "   └─ worker-0 waits for it, for 11s: pushing"
    assert out[4] == "   └─ worker-1 waits for it, for 11s: pushing"
    assert len(out) == 5


def test_a_server_that_is_started_again_is_the_root_of_all_who_wait_for_it(run, dlctl_command):
    last = {"code": -9, "text": "killed by SIGKILL", "at": time.time() - 3, "last_lines": []}
    run.daemon("server-0", state="backoff", retry_at=time.time() + 3600, last_exit=last)
    worker(run, 0, phase="fetching", waiting_for="server-0", waits_s=3)
    data = json.loads(dlctl_command("why", "--json").out)
    assert data["schema"] == "dlctl.why/1"
    (root,) = data["causes"]
    assert root["name"] == "server-0"
    assert root["what"] == "it is started again in 59m59s: killed by SIGKILL"
    assert root["since"].endswith("Z")
    assert [child["name"] for child in root["waiting"]] == ["worker-0"]
    assert dlctl_command("why", "worker-1").out.startswith("worker-1 waits for nobody")
    assert "server-0" in dlctl_command("why", "worker-0").out


def test_a_quarantined_worker_is_a_cause_even_if_nobody_waits_for_it(run, dlctl_command):
    worker(run, 1, state="quarantined", error="20 steps in a row with a NaN")
    out = dlctl_command("why").out
    assert out.startswith("worker-1: quarantined: 20 steps in a row with a NaN\n")
    assert "next: dlctl restart worker-1" in out


def test_a_limit_that_is_reached_is_a_cause_with_the_command_that_lifts_it(run, dlctl_command):
    for index, rate in enumerate((4.9e6, 5.0e6, 1.0e6)):
        metrics = {"push_bytes_per_s": rate, "settings": {"push": 5e6, "fetch": None}}
        worker(run, index, metrics=metrics)
    out = dlctl_command("why").out.splitlines()
    assert out[0] == "push limit: the limit push=5 MB/s is reached"
    assert out[1] == "   next: dlctl set worker-0 worker-1 push=off -j digits-7f3a"
    assert [line.split()[1] for line in out[2:]] == ["worker-0", "worker-1"]


def test_while_it_starts_the_one_that_holds_up_the_others_is_named(run, dlctl_command):
    run.run(state="starting", waiting="worker-0 (building the model)")
    began = time.time() - 20
    run.daemon("worker-0", state="starting", phase="building the model", started_at=began)
    run.daemon(
        "server-0", state="starting", phase="waiting for the size of the model",
        waiting_for="worker-0", waiting_since=began,
    )  # fmt: skip
    out = dlctl_command("why").out.splitlines()
    assert out[0].startswith("worker-0: it starts: building the model, for 20")
    assert out[2].startswith("└─ server-0 waits for it, for 20")
    assert len(out) == 3, "what the coordinator says is told already"


def test_what_only_the_coordinator_knows_is_passed_on(run, dlctl_command):
    run.run(waiting="the warm start of worker-0")
    worker(run, 0)
    assert "the run: it waits for the warm start of worker-0" in dlctl_command("why").out


def test_old_rows_and_a_mute_coordinator_are_said_to_be_so(run, dlctl_command):
    run.run(updated_at=time.time() - 41.5)
    worker(run, 0, state="slow", phase="computing", updated_at=time.time() - 40.2)
    out = dlctl_command("why").out
    assert out.startswith("what is known of digits-7f3a is 41s old\n")
    assert "coordinator: its process is there and says nothing" in out
    assert "worker-0: silent; it was last computing, for 40s (last heard 40s ago)" in out


def test_a_dead_coordinator_is_the_root(run, dlctl_command):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pid = identity(dead.pid)
    run.run(updated_at=time.time(), **pid).daemon("agent-0", **ME)
    out = dlctl_command("why").out
    assert "coordinator: it has died, and its agent starts it again" in out


def test_daemons_that_wait_for_each_other_are_found_too(run, dlctl_command):
    worker(run, 0, waiting_for="worker-1", waits_s=9)
    worker(run, 1, waiting_for="worker-0", waits_s=9)
    out = dlctl_command("why").out.splitlines()
    assert out[0].startswith("worker-0: computing")
    assert out[2].startswith("└─ worker-1 waits for it")
    assert len(out) == 3


def test_an_ended_run_has_nobody_who_waits_and_says_how_it_goes_on(run, dlctl_command):
    run.run(state="failed", reason="server-0: boom")
    code, out, _ = dlctl_command("why")
    assert (code, out) == (
        0,
        "nobody waits: digits-7f3a is failed: server-0: boom\n"
        "  next: dlctl recover --dry-run -j digits-7f3a\n",
    )
    assert dlctl_command("why", "worker-9").code == 4


def test_rows_of_another_version_do_no_harm(run, dlctl_command):
    run.daemon("worker-0", waiting_for=7, waiting_since="soon", metrics=3, last_exit="gone")
    run.daemon("gardener-0", state="failed", role="gardener", waiting_for="\x1b[2Jserver-0")
    code, out, _ = dlctl_command("why")
    assert (code, "\x1b" in out) == (0, False)
