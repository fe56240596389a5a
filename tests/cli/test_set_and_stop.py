"""`set`, `stop` and `checkpoint create`: asking a socket that answers as a coordinator does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime

import pytest
from dead_runs import keep, save
from fake_coordinator import coordinator, done
from fake_daemon import orphan
from process_identity import ME, OF_ANOTHER_BOOT, identity

from dlctl.control import client
from dlctl.runs.database import RunDb
from dlctl.util.text import KILLED
from dlctl.wire.messages import Reply, Request


@contextmanager
def living() -> Iterator[subprocess.Popen]:
    """A process that does nothing, and is gone when the test ends."""
    code = "import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(run_directory):
    return run_directory(servers=1, workers=2).run(state="running", **ME)


# ---------------------------------------------------------------- set


def change(q: Request, _: int) -> list[Reply]:
    """What a coordinator of two workers answers that puts all in force that it is asked for."""
    rows = [
        {"name": name, "key": key, "old": "off", "new": text, "ms": 3.21}
        for name in ("worker-0", "worker-1")
        for key, text in q.arguments["settings"].items()
    ]
    return [done(q, changes=rows, missing=[])]


def refused(words: str, code: int, hint: str = "") -> Callable[[Request, int], list[Reply]]:
    result = {"exit_code": code} | ({"hint": hint} if hint else {})
    return lambda q, n: [Reply(q.request, True, words, result)]


def test_a_change_that_is_on_no_record_is_said_so(run, dlctl_command):
    def unwritten(q: Request, n: int) -> list[Reply]:
        (reply,) = change(q, n)
        return [replace(reply, result={**reply.result, "unwritten": "no space left on device"})]

    with coordinator(unwritten) as (address, _):
        run.run(control=address)
        code, out, err = dlctl_command("set", "worker-0", "push=100MB/s")
    assert code == 0
    assert "worker-0" in out
    assert err.startswith("warning: ")


def test_a_change_is_shown_when_the_daemons_have_acknowledged_it(run, dlctl_command):
    with coordinator(change) as (address, heard):
        run.run(control=address)
        ended = dlctl_command("set", "worker-*", "push=5MB/s")
    assert heard[0].verb == "set"
    assert heard[0].arguments == {"names": ["worker-*"], "settings": {"push": "5MB/s"}}
    assert (ended.code, ended.out.splitlines()) == (
        0,
        [
            "NAME      KEY   CHANGE        APPLIED IN",
            "worker-0  push  off -> 5MB/s  3.2 ms",
            "worker-1  push  off -> 5MB/s  3.2 ms",
        ],
    )


@pytest.mark.parametrize(("key", "is_warned"), [("lr", True), ("push", False)])
def test_who_sets_one_server_is_warned_that_the_parts_of_the_model_differ(
    run, dlctl_command, key, is_warned
):
    uneven = {"lr": {"server-0": 0.2, "server-1": 0.1}}

    def answer(q: Request, _: int) -> list[Reply]:
        return [done(q, changes=[], missing=[], uneven=uneven)]

    with coordinator(answer) as (address, _):
        run.run(control=address)
        ended = dlctl_command("set", f"{key}=0.2")
    assert ended.code == 0
    assert [word in ended.err for word in ("server-0 0.2", "server-1 0.1")] == 2 * [is_warned]


def test_a_change_reads_no_checkpoint(run, dlctl_command, monkeypatch):
    saved = save(run, step=9, number=1)
    for name in ("verify", "read_manifest", "finished", "complete"):
        monkeypatch.setattr(f"dlctl.runs.checkpoints.{name}", None)
    with coordinator(change) as (address, _):
        run.run(control=address, checkpoint={"number": 1, "step": 9, "path": str(saved)})
        assert dlctl_command("set", "push=5MB/s").code == 0


def test_all_daemons_and_keys_are_in_one_request_and_the_coordinator_checks_them(
    run, dlctl_command
):
    with coordinator(change) as (address, heard):
        run.run(control=address)
        assert dlctl_command("set", "server-0", "worker-*", "lr=x", "psuh= off", "a=b=c").code == 0
    (request,) = heard
    assert request.arguments == {
        "names": ["server-0", "worker-*"],
        "settings": {"lr": "x", "psuh": "off", "a": "b=c"},
    }


@pytest.mark.parametrize(("code", "hint"), [(2, "dlctl set --list"), (4, "dlctl status"), (1, "")])
def test_what_the_coordinator_refuses_is_told_in_its_words_with_its_code_and_hint(
    run, dlctl_command, code, hint
):
    with coordinator(refused("that-is-no-rate", code, hint)) as (address, _):
        run.run(control=address)
        ended = dlctl_command("set", "push=5")
    assert (ended.code, ended.out) == (code, "")
    assert "that-is-no-rate" in ended.err
    assert ended.next == hint


def test_daemons_that_did_not_answer_are_named_and_the_code_is_8(run, dlctl_command):
    with coordinator(lambda q, n: [done(q, changes=[], missing=["worker-1"])]) as (address, _):
        run.run(control=address)
        ended = dlctl_command("set", "worker-*", "push=off")
    assert ended.code == 8
    assert "worker-1" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["worker-0"], 2, "nothing to set"),
        (["push=off", "push=1MB/s"], 2, "push is given twice"),
        (["--timeout", "5", "push=off"], 2, "for '--timeout': "),
    ],
)
def test_a_wrong_change_is_refused_before_anybody_is_asked(
    run, dlctl_command, arguments, code, message
):
    ended = dlctl_command("set", *arguments)
    assert (ended.code, message in ended.err) == (code, True)


@pytest.mark.parametrize(
    ("assignment", "key", "helps"),
    [
        (
            "batch_size=64",
            "workers.batch_size is",
            "dlctl stop -j digits-7f3a && dlctl start /x.toml",
        ),
        (
            "servers.count=3",
            "servers.count is",
            "write it into /x.toml, then dlctl stop -j digits-7f",
        ),
        ("every_s=9", "checkpoints.every_s is", "dlctl start /x.toml, which resumes with it"),
        ("seed=1", "job.seed is", "dlctl stop"),
        ("workers.count=4", "workers.count is", "dlctl scale worker=4"),
    ],
)
def test_a_key_that_is_not_live_is_answered_with_the_way_to_change_it(
    run, dlctl_command, assignment, key, helps
):
    run.run(job_file="/x.toml")
    ended = dlctl_command("set", "push=off", assignment)
    assert ended.code == 2
    assert (f" {key} " in ended.err, "in the job file" in ended.err) == (True, True)
    assert helps in ended.err


def test_an_ended_run_cannot_be_changed(run, dlctl_command):
    run.run(state="stopped", job_file="/somewhere/job.toml", name="digits")
    ended = dlctl_command("set", "push=off")
    assert (ended.code, ended.next) == (1, "dlctl start /somewhere/job.toml")


def test_the_live_settings_are_listed_without_any_run(own_place, dlctl_command):
    code, out, _ = dlctl_command("set", "--list")
    assert code == 0
    assert "push_every_steps" in out


# ---------------------------------------------------------------- stop


SAVED = {"step": 345, "path": "ckpt/000000000345-1", "nbytes": 9}


def stopping(run, process: subprocess.Popen, **end):
    """A coordinator in `process` that drains, saves, says so, and exits; `end`: the run then."""
    if not (run.path / SAVED["path"]).exists():
        save(run, step=345, number=1)
    keys = {"state": "stopped", "step": 345, "checkpoint": SAVED, **end}

    def answer(q: Request, _: int) -> list[Reply]:
        with closing(RunDb(run.path)) as db:
            db.put_run(**keys)
            db.commit()
        process.kill()
        phases = [
            {"phase": "received"},
            {"phase": "draining", "waiting": ["worker-0", "worker-1"]},
            {"phase": "draining", "waiting": ["worker-1"]},
            {"phase": "saving", "waiting": ["the manifest"]},
            {"phase": "over", "waiting": []},
        ]
        return [*(Reply(q.request, False, "", phase) for phase in phases), done(q, state="stopped")]

    return answer


def test_a_stop_names_whom_it_waits_for_and_returns_when_nothing_is_left(run, dlctl_command):
    with living() as process, coordinator(stopping(run, process)) as (address, heard):
        run.run(control=address, **identity(process.pid))
        code, out, err = dlctl_command("stop", "--grace", "7s")
    assert (code, out) == (0, "")
    kept = {"names": [], "checkpoint": True, "grace_s": 7.0, "kill": False, "origin": "command"}
    assert heard[0].arguments == kept
    assert err.splitlines() == [
        "draining: worker-0, worker-1",
        "draining: worker-1",
        "saving: the manifest",
        "digits-7f3a stopped at step 345",
        "checkpoint  step 345, 9 B, runs/digits-7f3a/ckpt/000000000345-1",
    ]


def stopped(run, dlctl_command, *arguments: str, **end):
    with living() as process, coordinator(stopping(run, process, **end)) as (address, _):
        run.run(control=address, **identity(process.pid))
        return dlctl_command("stop", *arguments)


def test_a_stop_names_whose_invitations_end(run, dlctl_command):
    rows = {"run": ["running", "", 3.0], "work": [90, 100, 0.5, 64, [0, 0], None]}
    invited = {"bob": [2, "ab" * 8, 2e9, ""], "eve": [3, "cd" * 8, 2e9, "it was revoked"]}
    run.db.put_memory(rows | {f"invitation/{name}": row for name, row in invited.items()})
    run.db.commit()
    ended = stopped(run, dlctl_command)
    assert (ended.code, "bob" in ended.err, "eve" in ended.err) == (0, True, False)


FULL = {"checkpoint_error": "server-0: disk full"}


@pytest.mark.parametrize(
    ("name", "code", "arguments", "end"),
    [
        ("older", 8, [], {"step": 400, **FULL}),
        ("no-older", 8, [], {"checkpoint": None, **FULL}),
        ("residual", 0, [], {"checkpoint": {**SAVED, "without": ["worker-1", "worker-2"]}}),
        ("not-wanted", 0, ["--no-checkpoint"], {"step": 346, **FULL}),
        ("not-begun", 0, [], {"checkpoint": None, "step": 0, "ready_at": None}),
        # Pushes may have been applied before a step counts.
        ("before-step", 8, [], {"checkpoint": None, "step": 0, "ready_at": 1.0}),
        ("not-ready", 8, [], {"checkpoint": None, "step": 7, "ready_at": None}),
    ],
)
def test_a_stop_tells_of_its_last_checkpoint_and_a_loss_has_code_8(
    run, dlctl_command, golden, name, code, arguments, end
):
    ended = stopped(run, dlctl_command, *arguments, **end)
    assert ended.code == code
    golden(f"stop-{name}", ended.err)


def test_not_saving_and_killing_are_passed_on(run, dlctl_command):
    for arguments, expected in (("--no-checkpoint", False), ("--kill", True)):
        with (
            living() as process,
            coordinator(stopping(run, process)) as (address, heard),
        ):
            run.run(state="running", control=address, **identity(process.pid))
            assert dlctl_command("stop", arguments).code == 0
        assert (heard[0].arguments["checkpoint"], heard[0].arguments["kill"]) == (False, expected)


def test_stopping_a_stopped_job_is_no_error(run, dlctl_command, golden):
    run.run(state="stopped")
    code, _, err = dlctl_command("stop")
    assert code == 0
    golden("stop-ended", err)


def test_a_process_that_nobody_knows_of_is_found_by_its_command_line_and_ended(run, dlctl_command):
    run.run(state="failed")
    with orphan(run.path, "worker-1", 3) as process:
        ended = dlctl_command("stop")
        process.wait()
    assert (ended.code, process.returncode) == (0, -15)
    assert "worker-1" in ended.err
    assert "worker-1" not in dlctl_command("stop").err


def test_shards_that_a_failed_run_has_left_are_told_of_and_removed_with_a_word(run, dlctl_command):
    keep(run, 0, 3, [])
    run.run(state="failed", reason="server-1 ended")
    assert "dlctl stop --kill -j digits-7f3a" in dlctl_command("stop").err
    assert "1 shard" in dlctl_command("stop", "--kill").err
    assert "shard" not in dlctl_command("stop", "--kill").err


def test_what_a_dead_coordinator_left_behind_is_ended_and_told(run, dlctl_command, golden):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        gone = identity(dead.pid)
    with living() as orphan, living() as foreign:
        run.run(**gone)
        run.daemon("worker-0", **identity(orphan.pid)).daemon(
            "worker-1", pid=foreign.pid, pid_start=OF_ANOTHER_BOOT
        )
        code, _, err = dlctl_command("stop")
        assert (code, foreign.poll()) == (0, None)
        foreign.kill()
    golden("stop-orphan", err)


def test_a_coordinator_that_dies_while_it_stops_is_cleaned_up_after(
    run, dlctl_command, monkeypatch, golden
):
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    with living() as process, living() as orphan:

        def die(q: Request, _: int) -> list[Reply]:
            process.kill()
            return [Reply(q.request, False, "", {"phase": "draining", "waiting": ["worker-0"]})]

        with coordinator(die) as (address, _):
            run.run(control=address, **identity(process.pid)).daemon(
                "worker-0", **identity(orphan.pid)
            )
            ended = dlctl_command("stop", "--grace", "5s")
    assert ended.code == 1
    golden("stop-coordinator-died", ended.err)
    (event,) = (
        event for event in run.db.events(kind="state") if event["text"].startswith("failed: ")
    )
    assert not event["daemon"]


def test_kill_takes_a_mute_coordinator_and_its_daemons_by_itself(run, dlctl_command, monkeypatch):
    from dlctl.ops import stop

    monkeypatch.setattr(stop, "NO_REPLY_S", 0.2)
    with (
        living() as process,
        living() as worker,
        coordinator(lambda q, n: []) as (address, _),
    ):
        run.run(control=address, **identity(process.pid)).daemon("worker-0", **identity(worker.pid))
        code, _, err = dlctl_command("stop", "--kill")
    assert code == 0
    assert err.count("coordinator, worker-0") == 2, "who is killed, and who has ended"
    with closing(RunDb(run.path, readonly=True)) as db:
        assert db.run()["state"] == "stopped", "an agent starts the coordinator of any other run"
        assert db.run()["reason"] == KILLED
        assert [(row["state"], row["pid"]) for row in db.daemons()] == [("stopped", None)]
        assert [event["text"] for event in db.events(kind="state")] == [f"stopped: {KILLED}"]


def test_daemons_that_outlive_their_coordinators_orderly_end_are_ended(run, dlctl_command):
    with (
        living() as process,
        living() as left,
        coordinator(stopping(run, process)) as (address, _),
    ):
        run.run(control=address, **identity(process.pid)).daemon("server-0", **identity(left.pid))
        code, _, err = dlctl_command("stop")
    assert code == 0
    assert "server-0" in err


# ---------------------------------------------------------------- checkpoint create


def test_saving_now_shows_what_was_saved(run, dlctl_command, golden):
    row = {"number": 3, "step": 12345, "path": str(run.path / "ckpt/x"), "nbytes": 312e6,
           "seconds": 0.82, "at": 1.75e9, "error": ""}  # fmt: skip
    with coordinator(lambda q, n: [done(q, **row)]) as (address, heard):
        run.run(control=address)
        golden("checkpoint", dlctl_command("checkpoint").out)
        data = json.loads(dlctl_command("checkpoint", "create", "--json").out)
        assert dlctl_command("checkpoint", "-j", "digits", "create").code == 0
    assert [q.verb for q in heard] == ["checkpoint"] * 3
    assert data["schema"] == "dlctl.checkpoint/1"
    # The coordinator's own clock, which its answer has, is no time of day.
    assert abs(datetime.fromisoformat(data["at"]).timestamp() - time.time()) < 60


def test_a_checkpoint_that_failed_is_an_error(run, dlctl_command):
    row = {"number": 3, "step": 5, "path": "ckpt/x", "error": "server-0: disk full"}
    with coordinator(lambda q, n: [done(q, **row)]) as (address, _):
        run.run(control=address)
        ended = dlctl_command("checkpoint")
    assert (ended.code, FULL["checkpoint_error"] in ended.err) == (1, True)
    assert ended.next == "dlctl logs coordinator -l warning -j digits-7f3a"
    run.run(state="finished")
    assert dlctl_command("checkpoint").code == 1


def test_whom_a_checkpoint_waits_for_and_does_without_is_said(run, dlctl_command, golden):
    row = {"step": 10, "path": "runs/x", "nbytes": 9, "seconds": 20.0, "error": ""}
    waits = [
        {"phase": "saving", "waiting": ["worker-0", "worker-1"]},
        {"phase": "saving", "waiting": ["worker-1 (in one batch for 57 s)"], "left_s": 17.6},
    ]

    def answer(q: Request, _: int) -> list[Reply]:
        on_the_way = [Reply(q.request, False, "", wait) for wait in waits]
        return [*on_the_way, done(q, **row, without=["worker-1"])]

    with coordinator(answer) as (address, _):
        run.run(control=address)
        code, out, err = dlctl_command("checkpoint", "create")
    assert (code, out.startswith("step 10 ")) == (0, True)
    golden("checkpoint-waits", err)


# ---------------------------------------------------------------- get, events, wait


def test_settings_are_shown_so_that_set_takes_them_again(run, dlctl_command):
    run.run(settings={"worker-0": {"push": 5e6}})
    run.daemon("worker-0", metrics={"settings": {"push": None, "push_every_steps": 4}})
    run.daemon("server-0", metrics={"settings": {"lr": 0.05, "colour": "blue"}})
    code, out, _ = dlctl_command("get")
    assert code == 0
    assert [x.split(maxsplit=2) for x in out.splitlines()[1:]] == [
        ["server-0", "lr", "0.05"],
        ["server-0", "colour", "blue"],
        ["worker-0", "push", "5 MB/s"],
        ["worker-0", "push_every_steps", "4"],
    ]
    assert dlctl_command("get", "worker-0", "push", "-q").out == "5 MB/s\n"
    data = json.loads(dlctl_command("get", "server-*", "lr", "--json").out)
    assert (data["schema"], data["settings"]) == (
        "dlctl.job.settings/1",
        {"server-0": {"lr": 0.05}},
    )
    assert dlctl_command("get", "worker-9").code == 4
    assert dlctl_command("get", "fetch").out == ""


def test_events_are_shown_in_order_and_chosen(run, dlctl_command):
    for second, (kind, daemon) in enumerate(
        [("state", ""), ("exit", "worker-1"), ("start", "worker-1"), ("set", "worker-0")]
    ):
        run.event(1.75e9 + second, kind, daemon, f"{kind} \x1b[1m", code=second)
    code, out, _ = dlctl_command("events")
    assert code == 0
    assert [x.split()[-2] for x in out.splitlines()] == ["state", "exit", "start", "set"]
    assert "\x1b" not in out
    assert len(dlctl_command("events", "worker-1").out.splitlines()) == 2
    assert len(dlctl_command("events", "--kind", "exit", "--kind", "set").out.splitlines()) == 2
    assert len(dlctl_command("events", "-n", "3").out.splitlines()) == 3
    since = dlctl_command("events", "--since", "2025-06-15T15:06:42Z", "--json").out.splitlines()
    assert [json.loads(x)["at"] for x in since] == [
        "2025-06-15T15:06:42.000Z", "2025-06-15T15:06:43.000Z",
    ]  # fmt: skip
    run.run(state="finished")
    assert dlctl_command("events", "-f").code == 0


def test_so_many_events_are_shown_as_are_asked_for(run, dlctl_command):
    for second in range(60):
        run.event(1.75e9 + second, "state", "", f"number {second}")

    def shown(*arguments: str) -> list[int]:
        code, out, _ = dlctl_command("events", *arguments)
        assert code == 0
        return [int(line.split()[-1]) for line in out.splitlines()]

    since = ("--since", "2025-06-15T15:06:45Z")
    assert shown() == [*range(10, 60)]
    assert shown(*since) == [*range(5, 60)], "all of them"
    assert shown(*since, "-n", "2") == [58, 59]
    assert shown("-n", "all") == [*range(60)]
    assert shown("-n", "0") == shown(*since, "-n", "0") == []
    for number in ("-1", "some"):
        ended = dlctl_command("events", "-n", number)
        assert (ended.code, f'"{number}"' in ended.err) == (2, True)


def test_events_leave_out_evaluations(run, dlctl_command):
    run.event(1.75e9, "evaluation", "worker-0", "step 9: accuracy 0.9")
    run.event(1.75e9, "scale", "", "workers 2 -> 3", before=2, after=3)

    def kinds(*arguments: str) -> list[str]:
        out = dlctl_command("events", "--json", *arguments).out
        return [json.loads(line)["kind"] for line in out.splitlines()]

    assert kinds() == ["scale"]
    assert kinds("--evaluations") == ["evaluation", "scale"]
    assert kinds("--kind", "evaluation") == ["evaluation"]


def test_events_of_the_coordinator_and_of_several_daemons_at_once_are_found(run, dlctl_command):
    run.event(1.75e9, "recover", "", "the coordinator is back")
    run.event(1.75e9, "set", "worker-0, worker-1", "set push=off")
    assert " recover " in dlctl_command("events", "coordinator").out
    assert " recover " in dlctl_command("status", "coordinator").out
    assert " push=off" in dlctl_command("events", "worker-1").out
    assert dlctl_command("why", "coordinator").code == 0


def test_waiting_for_what_is_already_so_returns_at_once(run, dlctl_command):
    run.run(step=100, data_epoch=1.5)
    for goal in ("ready", "step=100", "epoch=1.5"):
        assert dlctl_command("wait", "--for", goal).code == 0
    run.run(state="finished")
    assert dlctl_command("wait").code == 0
    data = json.loads(dlctl_command("wait", "--for", "stopped", "--json").out)
    assert data == {"schema": "dlctl.wait/1", "run_id": "digits-7f3a", "goal": "stopped",
                    "state": "finished", "step": 100}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "goal", "code"),
    [
        ("failed", "finished", 7),
        ("failed", "step=9", 7),
        ("stopped", "finished", 3),
        ("stopped", "ready", 3),
        ("finished", "step=9", 3),
        ("failed", "stopped", 0),
    ],
)
def test_a_goal_that_has_become_impossible_ends_the_waiting(run, dlctl_command, state, goal, code):
    run.run(state=state, reason="worker-0: boom")
    assert dlctl_command("wait", "--for", goal).code == code


def test_waiting_has_an_end_and_wrong_goals_are_refused(run, dlctl_command):
    ended = dlctl_command("wait", "--timeout", "300ms")
    assert ended.code == 6
    assert dlctl_command("wait", "--for", "luck").code == 2
    assert dlctl_command("wait", "--for", "step=x").code == 2
    assert dlctl_command("wait", "--timeout", "5").code == 2
    never = dlctl_command("wait", "-j", "never", "--timeout", "300ms")
    assert (never.code, "never" in never.err) == (6, True)


def test_a_new_checkpoint_is_waited_for_and_an_old_one_does_not_count(run):
    from dlctl.cli.commands.wait import _goal
    from dlctl.runs.snapshot import load

    begin = load(run.run(checkpoint={"number": 3}).path)
    reached = _goal("checkpoint")
    assert not reached(begin, begin)
    assert reached(begin, load(run.run(checkpoint={"number": 4}).path))
