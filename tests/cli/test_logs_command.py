"""`dlctl logs`: choosing, showing and following, with a run whose files are written by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from process_identity import ME, OF_ANOTHER_BOOT, identity

from dlctl.cli.commands.logs import TAIL
from dlctl.cli.ui import console, live
from dlctl.cli.ui.log_lines import Printer
from dlctl.runs import logs
from dlctl.util import values

AT = 1_750_000_000.0


def line(at: float, msg: str, level: str = "info", **extra):
    return {"ts": values.rfc3339(AT + at), "level": level, "msg": msg, **extra}


def lived(run, name: str, incarnation: int, how: str, kind: str = "exit") -> None:
    """Put the life of one process on record."""
    run.event(AT, "start", name, f"{name} starts, incarnation {incarnation}")
    run.event(AT + incarnation, kind, name, f"{name} ended: {how}")


@pytest.fixture
def run(run_directory):
    made = run_directory().run(state="running", **ME)
    made.daemon("server-0", incarnation=1)
    made.daemon("worker-0", incarnation=1)
    made.daemon(
        "worker-1", incarnation=2, last_exit={"code": -9, "text": "killed by SIGKILL", "at": AT}
    )
    lived(made, "worker-1", 1, "killed by SIGKILL")
    made.event(AT + 4, "start", "worker-1", "worker-1 starts, incarnation 2")
    made.log("server-0", 1, line(1, "serving", shard=0), line(5, "checkpoint written"))
    made.log(
        "worker-0", 1, line(2, "step 1"), "a library's own words", line(6, "loss 0.5", "debug")
    )
    made.log("worker-1", 1, line(3, "behind by 6 steps", "warning"), "Killed")
    made.log("worker-1", 2, line(4, "here again"))
    return made


def shown(text: str) -> list[tuple[str, str]]:
    """(daemon, rest of the line behind the time) of every line."""
    found = re.findall(r"^(\S+) +\| +(?:(?:[-\d]{10} )?[\d:.]{12} )? *(.*)$", text, re.MULTILINE)
    assert len(found) == len(text.splitlines())
    return found


def test_all_daemons_merged_by_time_with_a_mark_where_one_came_back(run, dlctl_command):
    code, out, err = dlctl_command("logs")
    assert (code, err) == (0, "")
    assert shown(out) == [
        ("server-0", "INFO  serving  shard=0"),
        ("worker-0", "INFO  step 1"),
        ("worker-0", "text  a library's own words"),
        ("worker-1", "WARN  behind by 6 steps"),
        ("worker-1", "text  Killed"),
        ("worker-1", "----  incarnation 2 starts"),
        ("worker-1", "INFO  here again"),
        ("server-0", "INFO  checkpoint written"),
        ("worker-0", "DEBUG loss 0.5"),
    ]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["worker-0"], ["step 1", "a library's own words", "loss 0.5"]),
        (["--role", "server"], ["serving", "checkpoint written"]),
        (["-l", "warning"], ["a library's own words", "behind by 6 steps", "Killed"]),
        (["-g", "step|loss"], ["step 1", "behind by 6 steps", "loss 0.5"]),
        (["-n", "1"], ["here again", "checkpoint written", "loss 0.5"]),
        (["-n", "0"], []),
        (["worker-1", "-p"], ["behind by 6 steps", "Killed"]),
        (["--since", "2025-06-15T15:06:44Z", "--until", "2025-06-15T15:06:45.5Z"],
         ["here again", "checkpoint written"]),
    ],
)  # fmt: skip
def test_lines_are_chosen_by_daemon_level_text_time_and_life(
    run, dlctl_command, arguments, messages
):
    out = dlctl_command("logs", "--json", *arguments).out
    assert [json.loads(x)["msg"] for x in out.splitlines()] == messages


def test_json_lines_carry_their_own_fields_and_whose_they_are(run, dlctl_command):
    out = dlctl_command("logs", "--json").out.splitlines()
    first, text = json.loads(out[0]), json.loads(out[2])
    assert first == {
        "schema": "dlctl.log/1", "shard": 0, "name": "server-0", "inc": 1,
        "ts": "2025-06-15T15:06:41.000Z", "level": "info", "msg": "serving",
    }  # fmt: skip
    words = {"stream": "text", "msg": "a library's own words"}
    assert text == {"schema": "dlctl.log/1", "name": "worker-0", "inc": 1, **words}


def test_raw_lines_are_as_they_stand_in_the_file(run, dlctl_command):
    out = dlctl_command("logs", "worker-1", "--raw", "-p").out.splitlines()
    assert json.loads(out[0])["msg"] == "behind by 6 steps"
    assert out[1] == "Killed"


def test_a_traceback_in_a_field_is_shown_below_its_line(run, dlctl_command):
    run.log("worker-0", 1, line(9, "step failed", "error", detail="Traceback:\n  boom"))
    out = dlctl_command("logs", "worker-0", "-n", "1").out
    assert [rest for _, rest in shown(out)] == ["ERROR step failed", "Traceback:", "boom"]


def test_foreign_text_cannot_steer_the_terminal(run, dlctl_command):
    run.log("worker-0", 1, line(9, "\x1b[31mred\nnext", key="\x07"), "\x1b]0;title")
    out = dlctl_command("logs", "worker-0", "-n", "2").out
    assert "\x1b" not in out
    assert r"\x1b[31mred\nnext" in out
    assert r"key=\x07" in out


def test_failed_of_a_well_run_is_nothing(run, dlctl_command):
    ended = dlctl_command("logs", "--failed")
    assert (ended.code, ended.out) == (0, "")
    assert "digits-7f3a" in ended.err


@pytest.mark.parametrize(
    ("code", "number", "words"),
    [
        ("daemon-restarting", 1, ["WARN  behind by 6 steps", "text  Killed"]),
        ("worker-stuck", 2, ["INFO  here again"]),
    ],
)
def test_failed_shows_the_life_in_question_and_what_is_wrong_with_it(
    run, dlctl_command, code, number, words
):
    facts = {"incarnation": number, "exit": "killed by SIGKILL", "phase": "in one batch for 22 s"}
    run.run(updated_at=time.time() + 60).problem(code, "worker-1", time.time() - 70, **facts)
    *lines, end = shown(dlctl_command("logs", "--failed").out)
    assert lines == [("worker-1", word) for word in words]
    assert end[1].startswith("----  ")
    assert f"! worker-1: {end[1][6:]}\n" in dlctl_command("status").out
    assert dlctl_command("logs", "--failed", "worker-0").out == ""


def test_failed_shows_a_process_that_is_gone(run, dlctl_command):
    run.run(updated_at=time.time() + 60)
    there = ME | {"pid_start": OF_ANOTHER_BOOT}
    run.daemon("worker-1", incarnation=2, updated_at=time.time() - 3.1, **there)
    first, end = shown(dlctl_command("logs", "--failed").out)
    assert first == ("worker-1", "INFO  here again")
    assert end[1].startswith("----  ")


def test_failed_shows_a_dead_coordinator_and_not_everybody_else(run, dlctl_command):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    run.run(incarnation=2, updated_at=time.time() - 12.3, **gone)
    for name in ("server-0", "worker-0", "worker-1"):
        run.daemon(name, incarnation=1, **ME)
    run.log("coordinator", 1, line(1, "long ago"))
    run.log("coordinator", 2, line(2, "step 9"))
    names, lines = zip(*shown(dlctl_command("logs", "--failed").out), strict=True)
    assert set(names) == {"coordinator"}
    assert lines[0] == "INFO  step 9"
    assert " 12s " in lines[1]


def test_the_time_of_a_death_that_nobody_has_seen_is_that_of_the_last_sign_of_life(
    run, dlctl_command
):
    """It was the time of the command: four looks at one death told of four times."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    heard_at = time.time() - 12.3
    run.run(incarnation=2, updated_at=heard_at - 3, **gone)
    run.daemon("server-0", incarnation=1, updated_at=heard_at, **gone)
    run.log("coordinator", 2, line(heard_at - AT - 2, "step 9"))
    whole = dlctl_command("logs", "--failed", "coordinator", "server-0").out
    marks = [row.split()[2] for row in whole.splitlines() if " ----  " in row]
    said = [values.clock(at, time.time()) for at in (heard_at - 3, heard_at)]
    assert marks == said


def test_what_is_wrong_has_the_time_at_which_it_began(run, dlctl_command):
    """And not that of the command."""
    taken_over_at = time.time() - 7.3
    run.run(
        state="running", incarnation=2, updated_by=ME["pid_start"], updated_at=time.time(), **ME
    )
    run.event(taken_over_at - 9, "state", "", "running")
    run.event(taken_over_at, "recover", "coordinator", "it is back")
    (mark,) = (
        row for row in dlctl_command("logs", "--failed", "coordinator").out.splitlines()
        if " ----  " in row
    )  # fmt: skip
    assert values.clock(taken_over_at, time.time()) in mark
    (ago_s,) = re.findall(r" restarted ([\d.]+)s ago \(died\)$", mark)
    assert 7.25 <= float(ago_s) <= time.time() - taken_over_at + 0.05


def test_a_line_that_a_full_disk_has_cut_off_is_text(run, dlctl_command):
    cut = json.dumps(line(7, "no room", "error"))[:60]
    run.log("server-0", 1, cut)
    assert shown(dlctl_command("logs", "server-0").out)[-1] == ("server-0", f"text  {cut}")


def test_failed_shows_a_coordinators_last_words_and_not_how_good_the_model_was(run, dlctl_command):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        run.run(incarnation=1, **identity(dead.pid))
    run.log("coordinator", 1, line(0, "worker-1: a push is late", "warning"))
    for step in range(50):  # On a full disk there are no events of them.
        run.log("coordinator", 1, line(step, f"worker-0: step {step}: accuracy 0.9778"))
        run.log("coordinator", 1, line(step, f"step {step}: worker-0 0.9778"))  # Its own metric.
    first, end = shown(dlctl_command("logs", "--failed", "coordinator").out)
    assert first[1] == "WARN  worker-1: a push is late"
    assert end[1].startswith("----  ")
    chosen = dlctl_command("logs", "--failed", "coordinator", "-l", "info").out
    assert shown(chosen)[0] == first


def test_failed_shows_the_coordinator_of_a_run_that_failed_without_a_dead_daemon(
    run, dlctl_command
):
    run.run(state="failed", reason="a shard is lost", incarnation=1, ended_at=AT + 9)
    for name in ("server-0", "worker-0", "worker-1"):
        run.daemon(name, state="stopped", incarnation=1)
    run.log("coordinator", 1, line(9, "it is over", "error"))
    assert [rest for _, rest in shown(dlctl_command("logs", "--failed").out)] == [
        "ERROR it is over", "----  failed: a shard is lost",
    ]  # fmt: skip


def test_the_previous_life_of_a_dead_daemon_is_its_last_one(run, dlctl_command):
    run.daemon("worker-1", state="backoff", incarnation=2)
    assert "here again" in dlctl_command("logs", "worker-1", "--previous").out
    never = dlctl_command("logs", "worker-0", "--previous")
    assert (never.code, "restarted" in never.err) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["worker-9"], 4, 'no daemon is called "worker-9"'),
        (["-g", "("], 2, "--grep: "),
        (["-n", "some"], 2, "neither a number nor"),
        (["--since", "noon"], 2, "neither a duration"),
        (["-f", "-p"], 2, "--follow shows new lines"),
        (["-l", "loud"], 2, "loud"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(
    run, dlctl_command, arguments, code, message
):
    ended = dlctl_command("logs", *arguments)
    assert (ended.code, message in ended.err) == (code, True)


def test_logs_of_a_daemon_that_has_yet_to_start_are_empty(run_directory, dlctl_command):
    run_directory(workers=3)
    assert dlctl_command("logs", "worker-2") == (0, "", "")


def test_following_goes_on_through_a_restart_until_the_run_ends(run, dlctl_command, monkeypatch):
    monkeypatch.setattr(live, "LOOK_S", 0.02)
    events = iter(
        [
            lambda: run.log("worker-0", 1, line(7, "last words")),
            lambda: lived(run, "worker-0", 1, "killed by SIGKILL"),
            lambda: run.log("worker-0", 2, line(8, "a new life")),
            lambda: run.run(state="finished", reason="3 epochs"),
        ]
    )
    wait = live.time.sleep
    monkeypatch.setattr(live.time, "sleep", lambda s: (next(events, lambda: None)(), wait(s)))
    code, out, err = dlctl_command("logs", "-f", "-n", "1", "worker-*")
    assert code == 0
    assert [rest for _, rest in shown(out)] == [
        "INFO  here again",
        "DEBUG loss 0.5",
        "INFO  last words",
        "----  incarnation 2 starts",
        "INFO  a new life",
    ]
    assert err == "-- digits-7f3a has finished (3 epochs) --\n"


def test_following_an_ended_run_shows_its_lines_and_returns(run, dlctl_command):
    run.run(state="stopped")
    code, out, _ = dlctl_command("logs", "-f", "-n", "all")
    assert (code, len(out.splitlines())) == (0, 9)
    filtered = dlctl_command("logs", "-f", "-l", "warning", "-n", "1").out
    assert "Killed" in filtered
    assert "behind" not in filtered


def test_ctrl_c_leaves_and_says_that_the_job_goes_on(run):
    """In a process of its own, with a real SIGINT."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = "import sys; from dlctl.cli.app import run; sys.exit(run(['logs', '-f', 'worker-0']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=-1, stderr=-1, text=True
    ) as process:
        timer = threading.Timer(20, process.kill)
        timer.start()
        assert "step 1" in process.stdout.readline()
        process.send_signal(2)
        _, err = process.communicate()
        timer.cancel()
    assert process.returncode == 0
    assert "digits-7f3a" in err
    assert "dlctl logs -f -j digits-7f3a" in err
    assert "dlctl stop -j digits-7f3a" in err
    assert "Traceback" not in err


def test_colours_of_names_are_the_same_in_every_run_and_never_red_or_yellow(run):
    console.setup(color="always")
    try:
        first, second = (Printer(["worker-1"])._prefix("worker-1") for _ in range(2))
        names = [f"worker-{n}" for n in range(40)]
        colors = {Printer(names)._prefix(name).split("m")[0] for name in names}
    finally:
        console.setup()
    assert first == second
    assert first.startswith("\x1b[38;5;")
    assert len(colors) > 5
    assert not colors & {f"\x1b[38;5;{n}" for n in (1, 3, 9, 11, 160, 196, 220, 226)}


def test_of_many_lines_those_that_are_shown_are_taken_apart_once_and_no_others(
    run, dlctl_command, monkeypatch
):
    """That is what takes the time: the tail of a long log must not cost all of it."""
    taken_apart: list[str] = []
    parse = logs.parse

    def counted(raw, *others):
        taken_apart.append(raw)
        return parse(raw, *others)

    monkeypatch.setattr(logs, "parse", counted)
    run.log("worker-0", 1, *(line(10 + n / 1000, f"step {n}") for n in range(10_000)))
    for arguments, count in ((("-n", "all"), 10_003), ((), TAIL)):
        taken_apart.clear()
        out = dlctl_command("logs", "worker-0", *arguments).out
        assert (len(out.splitlines()), len(taken_apart)) == (count, count)
