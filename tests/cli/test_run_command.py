"""`run`: a job in the foreground, its end, its signals and its progress."""

from __future__ import annotations

import errno
import io
import json
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from next_step_lines import commands_of
from process_identity import ME
from stand_in_jobs import attached, the_run, until

from dlctl.cli.commands import run
from dlctl.ops import control
from dlctl.runs import checkpoints
from dlctl.runs.logs import Line
from dlctl.runs.snapshot import load


def test_a_run_that_finishes_shows_what_came_of_it(job, play, dlctl_command):
    play("start", "ready", "warn", "finish")
    code, out, err = dlctl_command("run", "job.toml")
    assert (code, "checkpoint  step 100" in out) == (0, True)
    assert err.count("worker-1") == 1, "its warning, and nothing else of it"
    assert "dlctl checkpoint export -j quick-" in err


def test_a_run_that_fails_ends_with_7_and_the_last_words(job, play, dlctl_command):
    play("start", "ready", "fail")
    code, out, err = dlctl_command("run", "job.toml")
    assert (code, "ImportError: " in err) == (7, True)
    assert out.split()[1] == "failed", "the error says why"
    play("start", "fail")  # before it was ready
    code, _, err = dlctl_command("run", "job.toml")
    assert (code, "worker-0: ImportError" in err) == (7, True)


@pytest.mark.long
def test_progress_can_be_json_or_nothing(job, play, dlctl_command):
    play("start", "ready", "finish")
    _, _, err = dlctl_command("run", "--progress", "json", "job.toml")
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert {line["schema"] for line in lines} == {"dlctl.progress/1"}
    assert any(line.get("step") == 100 for line in lines)
    play("start", "ready", "warn", "finish")
    plain, quiet = (
        dlctl_command("run", "--fresh", "--progress", style, "job.toml").err.splitlines()
        for style in ("plain", "quiet")
    )
    assert any(line.startswith("step 100") for line in plain)
    assert [line for line in quiet if not line.startswith("  dlctl ")] == plain[:1], (
        "what is run, and what can be done next"
    )


def test_ctrl_c_saves_stops_and_ends_with_130(job, own_place, play):
    play("start", "ready", "forever")
    with attached("run", "job.toml") as process:
        shown = until(process.stderr, "step 0")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, shown + err
    assert [text in err for text in ("Ctrl-C again", "draining: ")] == [True, True]
    assert "dlctl start job.toml" in out
    run_row = the_run(own_place)
    assert (run_row["state"], run_row["step"]) == ("stopped", 50)
    assert len(checkpoints.complete(Path(run_row["directory"]))) == 1
    assert not psutil.pid_exists(run_row["pid"])


@pytest.mark.long
def test_a_second_ctrl_c_kills(job, own_place, play, monkeypatch):
    monkeypatch.setenv("STAND_IN_SLOW", "1")
    play("start", "ready", "forever")
    with attached("run", "job.toml") as process:
        until(process.stderr, "step 0")
        process.send_signal(signal.SIGINT)
        until(process.stderr, "draining: worker-0")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert "killing" in err
    run_row = the_run(own_place)
    assert not psutil.pid_exists(run_row["pid"])
    assert "checkpoint" not in run_row


@pytest.mark.long
def test_two_ctrl_c_within_a_moment_are_two(job, own_place, play, monkeypatch):
    """The second one comes before the first is answered: while the stop is being prepared."""
    monkeypatch.setenv("STAND_IN_SLOW", "1")
    play("start", "ready", "forever")
    with attached("run", "job.toml") as process:
        until(process.stderr, "step 0")
        process.send_signal(signal.SIGINT)
        threading.Event().wait(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130, err
    assert "killing" in err
    assert not psutil.pid_exists(the_run(own_place)["pid"])


def test_what_ends_a_run_is_told_once_and_whole(job, play, dlctl_command):
    play("start", "ready", "warn", "fail_at_work")
    code, out, err = dlctl_command("run", "job.toml")
    assert code == 7
    assert " 6 steps" in err, "what is no part of the end is shown as ever"
    assert (out + err).count("KeyError: 'labels'") == 1
    assert [f"{name} ended" in err for name in ("worker-0", "worker-1")] == [False, True]
    assert "train.py:30" in commands_of(err)[0]


@pytest.mark.parametrize(
    ("state", "text", "is_cause"),
    [
        ("failed", "worker-0: task.loss raised KeyError", True),
        ("failed", "task.loss raised KeyError", True),
        ("failed", "worker-1 ended: exit 1", True),
        ("failed", "worker-2 ended: exit 1", False),
        ("failed", "worker-0: the disk is slow", False),
        ("failed", "", False),
        ("degraded", "worker-1 ended: killed by SIGKILL", False),
    ],
)
def test_what_the_last_error_of_a_failed_run_says_as_well(run_directory, state, text, is_cause):
    reason = "worker-0, worker-1: task.loss raised KeyError" if state == "failed" else "worker-1"
    path = run_directory().run(state=state, reason=reason, updated_at=time.time(), **ME).path
    line = Line("coordinator", 1, 0.0, "warning", text, {}, "")
    assert run._is_cause(line, load(path)) is is_cause


def test_a_last_checkpoint_that_failed_is_not_hidden_by_an_older_one(job, play, dlctl_command):
    play("start", "ready", "finish_unsaved")
    code, out, err = dlctl_command("run", "job.toml")
    assert code == 0
    assert [text in out for text in (" 20 steps ", "server-0: disk")] == [True, True]
    assert "dlctl checkpoint export" in err


@pytest.mark.long
def test_sigterm_stops_as_ctrl_c_does(job, own_place, play):
    play("start", "ready", "forever")
    with attached("run", "job.toml") as process:
        until(process.stderr, "step 0")
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert the_run(own_place)["state"] == "stopped"


def test_a_run_that_is_not_ready_in_time_is_stopped(
    job, own_place, play, dlctl_command, monkeypatch
):
    monkeypatch.setattr(control, "start_limit_s", lambda directory: 0.1)
    play("start", "forever")
    code, out, err = dlctl_command("run", "job.toml")
    assert (code, "--timeout" in out) == (6, True), err
    assert the_run(own_place)["state"] == "stopped"


def test_a_run_that_somebody_else_stops_ends_with_3(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    with attached("run", "job.toml") as process:
        until(process.stderr, "step 0")
        assert dlctl_command("stop").code == 0
        _, err = process.communicate()
    assert process.returncode == 3, err


def test_the_bar_on_a_terminal_shows_the_fields_and_goes_away(job, play, monkeypatch, capfd):
    from dlctl.cli.ui import console, live

    monkeypatch.setattr(live, "COLUMNS", 200)
    bar = live.Bar()
    bar.phase("starting", "worker-0 [bold]", 1.0)
    bar.line("\x1b[33ma [/bold] line\x1b[0m")
    console.put_live("")
    console.put_live("")
    shown = capfd.readouterr().err
    assert "worker-0 [bold]" in shown
    assert "a [/bold] line" in shown
    assert shown.endswith("1.0s" + console.ERASE)


class Gone(io.StringIO):
    """A terminal whose window is closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        self.write("")


def test_the_bar_outlives_its_terminal(monkeypatch):
    from dlctl.cli.ui import console, live

    monkeypatch.setattr(sys, "stderr", Gone())
    bar = live.Bar()
    bar.phase("running", "worker-0", 1.0)
    bar.line("a line")
    console.put_live("")
