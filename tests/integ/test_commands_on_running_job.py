"""Commands on a job that is at work: what they print, and what they change.

All tests share one run, with two workers that would never come to an end; the last one stops it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from workplace import COMMAND, SLOW_S, Workplace


@pytest.fixture(scope="module")
def at_work(shared_place: Workplace) -> Iterator[Workplace]:
    place = shared_place
    place.task(pause_s=SLOW_S)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = f"[log]\ntensorboard = true\nprometheus_port = {port}"
    place.job(stop="{ steps = 100000000 }", workers=2, more=log)
    place.start()
    place.until("an evaluation", lambda: place.run().get("evaluation"))
    yield place
    ended = place.dlctl("stop")
    assert ended.code == 0, ended.err
    place.nothing_left()
    assert all(row["pid"] is None for row in place.run()["daemons"])


# ---------------------------------------------------------------- reading


def test_status_shows_every_daemon_at_work(at_work: Workplace) -> None:
    ended = at_work.dlctl("status")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert "running" in lines[0]
    names = [line.split()[0] for line in lines if line.startswith(("agent", "server", "worker"))]
    assert names == ["agent-0", "server-0", "worker-0", "worker-1"]


def test_status_as_json_has_states_steps_and_settings(at_work: Workplace) -> None:
    at_work.until_step(10)
    ended = at_work.dlctl("status", "--json")
    status = json.loads(ended.out)
    assert (status["schema"], status["state"]) == ("dlctl.status/1", "running")
    assert status["step"] >= 10
    workers = [row for row in status["daemons"] if row["role"] == "worker"]
    assert all(row["metrics"]["settings"]["push_every_steps"] == 2 for row in workers)
    assert all(row["state"] == "running" for row in status["daemons"])
    assert at_work.dlctl("status", "--check").code == 0


def test_its_figures_are_in_the_report_in_tensorboard_and_in_prometheus(at_work: Workplace) -> None:
    at_work.until_step(20)
    port = json.loads((at_work.directory / "job.json").read_text())["log"]["prometheus_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    assert families["dlctl_steps"].samples[0].value >= 20
    assert families["dlctl_push_bytes"].samples[0].value > 0
    wanted = {"train/loss", "eval/accuracy", "rate/lr"}
    found = EventAccumulator(str(at_work.directory / "tensorboard"))
    at_work.until(f"{wanted} are written", lambda: wanted <= {*found.Reload().Tags()["scalars"]})
    ended = at_work.dlctl("report", "-o", str(at_work.path / "report.html"))
    assert ended.code == 0, ended.err
    assert "Evaluation: accuracy" in (at_work.path / "report.html").read_text()


def test_nobody_else_can_enter_what_the_run_has(at_work: Workplace) -> None:
    run_id = at_work.directory.name
    sockets = at_work.path / "x" / "dlctl" / run_id
    states = Path(f"/dev/shm/dlctl-{os.getuid()}") / run_id
    for directory in (at_work.directory, sockets, sockets.parent, states):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory


def test_ps_lists_the_job(at_work: Workplace) -> None:
    ended = at_work.dlctl("ps")
    assert ended.code == 0
    assert at_work.directory.name in ended.out
    assert [json.loads(line) for line in at_work.dlctl("ps", "--json").out.splitlines()]


def test_events_tell_the_run_from_its_beginning(at_work: Workplace) -> None:
    ended = at_work.dlctl("events")
    assert re.search(r"worker-1 .*incarnation 1\b", ended.out)
    events = [json.loads(line) for line in at_work.dlctl("events", "--json").out.splitlines()]
    assert [e["text"] for e in events if e["kind"] == "state"][:2] == ["starting", "running"]


def test_logs_come_from_all_daemons_and_as_json(at_work: Workplace) -> None:
    ended = at_work.dlctl("logs")
    assert ended.code == 0
    assert {line.split()[0] for line in ended.out.splitlines() if " | " in line} == {
        "coordinator", "agent-0", "server-0", "worker-0", "worker-1",
    }  # fmt: skip
    lines = at_work.dlctl("logs", "worker-0", "--json").out.splitlines()
    assert all(json.loads(line)["name"] == "worker-0" for line in lines)


def test_get_prints_what_set_takes(at_work: Workplace) -> None:
    ended = at_work.dlctl("get", "server-0", "lr", "-q")
    assert (ended.code, ended.out) == (0, "0.1\n")
    settings = json.loads(at_work.dlctl("get", "--json").out)["settings"]
    assert settings["worker-1"]["fetch_every_steps"] == 2


def test_wait_returns_when_it_is_so_far_and_gives_up_in_time(at_work: Workplace) -> None:
    step = at_work.run()["step"] + 20
    assert at_work.dlctl("wait", "--for", f"step={step}").code == 0
    assert at_work.run()["step"] >= step
    ended = at_work.dlctl("wait", "--timeout", "300ms")
    assert ended.code == 6


def test_a_second_start_finds_it_running(at_work: Workplace) -> None:
    pid = at_work.pid("coordinator")
    ended = at_work.dlctl("start", "job.toml")
    assert ended.code == 0
    assert at_work.pid("coordinator") == pid


def test_two_starts_of_another_content_are_refused_with_the_difference(at_work: Workplace) -> None:
    before = (at_work.path / "job.toml").read_text()
    at_work.job(stop="{ steps = 100000000 }", workers=3)
    try:
        ended = at_work.dlctl("start", "job.toml")
    finally:
        (at_work.path / "job.toml").write_text(before)
    assert ended.code == 2
    assert "workers.count: 2 -> 3" in ended.err


def test_a_daemon_that_is_not_there_is_named_with_the_closest_one(at_work: Workplace) -> None:
    for command in (["status", "worker-7"], ["set", "worker-7", "push=off"], ["logs", "worker-7"]):
        ended = at_work.dlctl(*command)
        assert ended.code == 4, command
        assert '"worker-' in ended.err


def test_a_reader_that_leaves_early_is_no_error(at_work: Workplace) -> None:
    with subprocess.Popen(
        [*COMMAND, "logs", "-f"],
        cwd=at_work.path, env=at_work.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as logs:  # fmt: skip
        assert logs.stdout is not None
        assert logs.stderr is not None
        logs.stdout.readline()
        logs.stdout.close()
        # The workers write nothing by themselves: a change of a setting makes a line.
        at_work.dlctl("set", "agent-0", "log_level=info")
        at_work.until("logs -f ends", lambda: logs.poll() is not None)
        assert logs.stderr.read() == b""
    assert logs.returncode == 141


def test_a_terminal_gets_colours_unless_it_wants_none(at_work: Workplace) -> None:
    colored, plain = at_work.terminal("status"), at_work.terminal("status", NO_COLOR="1")
    assert (colored.end(), plain.end()) == (0, 0)
    assert "\x1b[" in colored.shown
    assert "running" in plain.shown
    assert "\x1b[" not in plain.shown
    assert "\x1b[" not in at_work.dlctl("status").out


# ---------------------------------------------------------------- saving


def test_checkpoint_returns_when_it_is_complete(at_work: Workplace) -> None:
    ended = at_work.dlctl("checkpoint")
    assert ended.code == 0, ended.err
    step, path = ended.out.split()[1], ended.out.split()[-1]
    assert (at_work.path / path / "manifest.json").exists()
    listed = json.loads(at_work.dlctl("checkpoint", "ls", "--json").out)["checkpoints"]
    assert f"{listed[-1]['step']:,}" == step
    assert at_work.dlctl("checkpoint", "verify", "latest").out.startswith("ok")


def test_the_model_can_be_exported_while_training_goes_on(at_work: Workplace) -> None:
    at_work.dlctl("checkpoint")
    ended = at_work.dlctl("checkpoint", "export", "-o", "now.safetensors")
    assert ended.code == 0, ended.err
    assert (at_work.path / "now.safetensors").stat().st_size > 0


# ---------------------------------------------------------------- changing


def test_set_returns_when_it_is_in_force_everywhere(at_work: Workplace) -> None:
    ended = at_work.dlctl("set", "worker-*", "fetch_every_steps=10")
    assert ended.code == 0, ended.err
    rows = [line.split("  ") for line in ended.out.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [("worker-0", "2 -> 10"), ("worker-1", "2 -> 10")]
    again = at_work.dlctl("set", "worker-*", "fetch_every_steps=2")
    assert "10 -> 2" in again.out


@pytest.mark.long
def test_what_plan_advises_is_in_force_afterwards(at_work: Workplace) -> None:
    job = at_work.path / "job.toml"
    before = job.read_text()
    job.write_text(before.replace("lr = 0.1", "lr = 0.2") + '[limits]\nfetch = "50MB/s"\n')
    plan = at_work.dlctl("plan", "job.toml", "--json", "--detailed-exitcode")
    lives = [change["live"] for change in json.loads(plan.out)["changes"]]
    assert (plan.code, lives) == (10, ["dlctl set lr=0.2", "dlctl set fetch=50MB/s"])
    assert at_work.dlctl("set", *(live.split()[-1] for live in lives)).code == 0
    at_work.until(
        "nothing is left to do",
        lambda: at_work.dlctl("plan", "job.toml", "--detailed-exitcode").code == 0,
    )
    job.write_text(before)
    assert at_work.dlctl("set", "lr=0.1", "fetch=off").code == 0


@pytest.mark.long
def test_a_limit_slows_the_pushes_down(at_work: Workplace) -> None:
    ended = at_work.dlctl("set", "worker-1", "push=500B/s")
    assert "off -> 500 B/s" in ended.out, ended.err
    at_work.until(
        "worker-1 reports the limit and keeps it",
        lambda: (
            at_work.daemon("worker-1")["metrics"]["settings"]["push"] == 500
            and at_work.daemon("worker-1")["metrics"].get("push_bytes_per_s", 1e9) < 1000
        ),
    )
    assert "/ 500 B/s" in at_work.dlctl("status").out
    at_work.dlctl("set", "worker-1", "push=off")


@pytest.mark.long
def test_an_interval_becomes_automatic_and_is_shown_with_what_it_has_come_to(
    at_work: Workplace,
) -> None:
    ended = at_work.dlctl("set", "worker-1", "push=500B/s", "push_every_steps=auto")
    assert "2 -> auto" in ended.out, ended.err
    at_work.until(
        "worker-1 pushes less often than every second step",
        lambda: at_work.daemon("worker-1")["metrics"]["intervals"]["push_every_steps"] > 2,
    )
    assert "auto (" in at_work.dlctl("status").out
    assert at_work.dlctl("get", "worker-1", "push_every_steps", "-q").out == "auto\n"
    back = at_work.dlctl("set", "worker-1", "push=off", "push_every_steps=2")
    assert "auto -> 2" in back.out, back.err


def test_a_worker_that_is_killed_comes_back_with_its_settings_while_the_log_is_followed(
    at_work: Workplace,
) -> None:
    assert at_work.dlctl("set", "worker-1", "push_every_steps=10").code == 0
    logs = at_work.begin("logs", "-f", "worker-1")
    at_work.until("the log is followed", lambda: "starts, pid" in logs.out)
    before = at_work.daemon("worker-1")["incarnation"]
    os.kill(at_work.pid("worker-1"), signal.SIGKILL)
    at_work.until(
        "worker-1 is back at work",
        lambda: (
            at_work.daemon("worker-1")["incarnation"] == before + 1
            and at_work.daemon("worker-1")["metrics"].get("step", 0) > 10
        ),
    )
    ended = at_work.dlctl("get", "worker-1", "push_every_steps", "-q")
    assert ended.out == "10\n"
    assert at_work.daemon("worker-1")["metrics"]["settings"]["push_every_steps"] == 10
    assert at_work.daemon("worker-0")["metrics"]["settings"]["push_every_steps"] == 2
    at_work.until("the separator", lambda: f"incarnation {before + 1} starts" in logs.out)
    logs.process.send_signal(signal.SIGINT)
    ended = logs.end()
    assert ended.code == 0


@pytest.mark.long
def test_a_worker_that_gets_sigterm_is_replaced_too(at_work: Workplace) -> None:
    before = at_work.daemon("worker-0")["restarts"]
    os.kill(at_work.pid("worker-0"), signal.SIGTERM)
    at_work.until("it is replaced", lambda: at_work.daemon("worker-0")["restarts"] == before + 1)
    at_work.until_state("running")
    assert any(text.startswith("worker-0 ended") for text in at_work.events("exit"))
