"""`scale` and `restart`: what is asked, how long it is waited for, and what is refused."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from fake_coordinator import coordinator, done
from process_identity import ME

from dlctl.runs.database import RunDb
from dlctl.wire.messages import Reply


@pytest.fixture
def run(run_directory):
    made = run_directory(servers=1, workers=2).run(state="running", updated_at=time.time(), **ME)
    for name in ("agent-0", "server-0", "worker-0", "worker-1"):
        made.daemon(name, incarnation=1)
    return made


def scaling(run, starting=(), leaving=(), state="running"):
    """A coordinator whose new workers are in `state` at once, and whose old ones are gone."""

    def answer(q, n):
        with closing(RunDb(run.path)) as db:
            for name in starting:
                db.put_daemon(
                    name, {"name": name, "role": "worker", "state": state, "incarnation": 1}
                )
            db.remove_daemons(leaving)
            db.commit()
        after = q.arguments["workers"]
        return [done(q, before=2, after=after, starting=[*starting], leaving=[*leaving])]

    return answer


def test_scaling_up_returns_when_the_new_workers_are_at_work(run, dlctl_command):
    with coordinator(scaling(run, starting=["worker-2", "worker-3"])) as (address, heard):
        run.run(control=address)
        code, out, err = dlctl_command("scale", "worker=4")
    assert (code, out) == (0, "workers  2 -> 4  (new: worker-2, worker-3)\n"), err
    assert (heard[0].verb, heard[0].arguments) == ("scale", {"workers": 4})


def test_what_is_on_no_record_is_said_so(run, dlctl_command):
    def answer(q, n):
        return [done(q, before=2, after=2, restarting=["worker-0"], unwritten="[full]")]

    with coordinator(answer) as (address, _):
        run.run(control=address)
        for command in (("scale", "worker=3"), ("restart", "worker-0", "--no-wait")):
            code, _, err = dlctl_command(*command)
            assert (code, "[full]" in err) == (0, True)


def test_scaling_down_returns_when_those_who_leave_are_gone(run, dlctl_command):
    with coordinator(scaling(run, leaving=["worker-1"])) as (address, _):
        run.run(control=address)
        assert dlctl_command("scale", "worker=1").out.startswith("workers  2 -> 1  ")


def test_a_worker_that_does_not_come_is_named_when_the_time_is_over(run, dlctl_command):
    with coordinator(scaling(run, starting=["worker-2"], state="starting")) as (address, _):
        run.run(control=address)
        late = dlctl_command("scale", "worker=3", "--timeout", "300ms")
        at_once = dlctl_command("scale", "worker=3", "--no-wait")
    assert (late.code, "worker-2 (starting" in late.err) == (6, True)
    assert late.next.startswith("dlctl why")
    assert at_once.code == 0


def test_new_workers_that_nobody_can_use_end_the_waiting(run, dlctl_command):
    with coordinator(scaling(run, starting=["worker-2"], state="quarantined")) as (address, _):
        run.run(control=address)
        ended = dlctl_command("scale", "worker=3")
    assert (ended.code, "worker-2" in ended.err) == (8, True)


def test_a_run_that_fails_meanwhile_ends_the_waiting(run, dlctl_command):
    def answer(q, n):
        with closing(RunDb(run.path)) as db:
            db.put_run(state="failed", reason="worker-0: boom")
            db.commit()
        return [done(q, before=2, after=3, starting=["worker-2"], leaving=[])]

    with coordinator(answer) as (address, _):
        run.run(control=address)
        ended = dlctl_command("scale", "worker=3")
    assert (ended.code, "worker-0: boom" in ended.err) == (7, True)


def test_what_is_so_already_is_said(run, dlctl_command):
    with coordinator(scaling(run)) as (address, _):
        run.run(control=address)
        code, out, err = dlctl_command("scale", "worker=2")
    assert (code, out, err) == (0, "workers  2 -> 2  (no change)\n", "")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("server=3", "change count in [servers]"),
        *(
            (wanted, f'"{wanted}" is not worker=N, where N is 1 to 4096')
            for wanted in ("worker", "worker=0", "worker=-1", "worker=a", "worker=9999", "tree=3")
        ),
    ],
)
def test_what_cannot_be_scaled_is_refused_before_anybody_is_asked(
    run, dlctl_command, wanted, message
):
    ended = dlctl_command("scale", wanted)
    assert (ended.code, message in ended.err) == (2, True), ended.err


def restarting(run, state="running"):
    """A coordinator that replaces whom it is asked to at once, itself included."""

    def answer(q, n):
        with closing(RunDb(run.path)) as db:
            rows = {row["name"]: row for row in db.daemons()}
            for name in set(q.arguments["names"]) - {"coordinator"}:
                row = rows[name]
                number = row["incarnation"] + 1
                db.put_daemon(name, {**row, "incarnation": number, "state": state})
            if "coordinator" in q.arguments["names"]:
                db.put_run(incarnation=2, updated_at=time.time(), updated_by=ME["pid_start"], **ME)
            db.commit()
        return [done(q, restarting=q.arguments["names"])]

    return answer


def test_restarted_daemons_are_waited_for_and_shown(run, dlctl_command):
    with coordinator(restarting(run)) as (address, heard):
        run.run(control=address, incarnation=1)
        code, out, err = dlctl_command("restart", "worker-*", "coordinator")
    assert code == 0, err
    assert heard[0].arguments == {"names": ["coordinator", "worker-0", "worker-1"]}
    assert out.splitlines() == [
        "NAME         INCARNATION",
        "coordinator  1 -> 2",
        "worker-0     1 -> 2",
        "worker-1     1 -> 2",
    ]


def test_the_coordinator_is_waited_for_like_the_others(run, dlctl_command):
    with coordinator(lambda q, n: [done(q, restarting=q.arguments["names"])]) as (address, _):
        run.run(control=address, incarnation=1)
        late = dlctl_command("restart", "worker-1", "coordinator", "--timeout", "300ms")
        alone = dlctl_command("restart", "coordinator", "--timeout", "300ms")
    assert (late.code, "worker-1 (" in late.err) == (6, True)
    assert ["coordinator (" in ended.err for ended in (late, alone)] == [True, True]


@pytest.mark.usefixtures("clock_stands")
def test_when_a_worker_is_killed_that_hangs_is_said_once(run, dlctl_command):
    hangs = {"state": "draining", "phase": "in one batch for 57 s", "metrics": {"stuck_s": 57.0}}
    run.daemon("worker-1", incarnation=1, kill_at=time.time() + 29.9, **hangs)
    for answer, arguments in (
        (lambda q, n: [done(q, restarting=q.arguments["names"])], ("restart", "worker-1")),
        (
            lambda q, n: [done(q, before=2, after=1, starting=[], leaving=["worker-1"])],
            ("scale", "worker=1"),
        ),
    ):
        with coordinator(answer) as (address, _):
            run.run(control=address)
            late = dlctl_command(*arguments, "--timeout", "300ms")
        assert late.code == 6
        # While it waits, and in the error.
        assert [late.err.count(text) for text in ("57 s", "30 s")] == [2, 2]


def test_a_quarantined_worker_is_waited_for_until_it_is_well_or_quarantined_again(
    run, dlctl_command
):
    run.daemon("worker-1", incarnation=1, state="quarantined")
    with coordinator(restarting(run)) as (address, _):
        run.run(control=address)
        assert dlctl_command("restart", "worker-1").code == 0
    with coordinator(restarting(run, "quarantined")) as (address, _):
        run.run(control=address)
        ended = dlctl_command("restart", "worker-1")
    assert (ended.code, "worker-1" in ended.err) == (8, True)


def test_only_daemons_that_there_are_can_be_restarted(run, dlctl_command):
    assert dlctl_command("restart").code == 2
    unknown = dlctl_command("restart", "worker-7")
    assert (unknown.code, '"worker-7"' in unknown.err) == (4, True)


def test_what_the_coordinator_refuses_is_an_error_with_a_next_command(run, dlctl_command):
    with coordinator(lambda q, n: [Reply(q.request, True, "stopping", {})]) as (address, _):
        run.run(control=address)
        for arguments in (("scale", "worker=3"), ("restart", "worker-0")):
            ended = dlctl_command(*arguments)
            assert (ended.code, ended.next) == (1, "dlctl status -j digits-7f3a")
            assert "stopping" in ended.err


def test_an_ended_run_says_what_to_do_instead(run, dlctl_command):
    run.run(state="failed")
    for arguments in (("scale", "worker=3"), ("restart", "worker-0")):
        ended = dlctl_command(*arguments)
        assert (ended.code, ended.next) == (1, "dlctl start JOBFILE")
    run.run(state="stopped", job_file="/x/job.toml")
    assert dlctl_command("scale", "worker=3").next == "dlctl start /x/job.toml"
