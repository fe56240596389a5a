"""`dlctl explain`, and where people and programs see the codes of problems."""

from __future__ import annotations

from dlctl.cli import app
from dlctl.ops import problem_texts


def test_a_code_stands_behind_its_problem(run_directory, daemon, capsys):
    run = run_directory()
    run.run(state="running", **daemon("coordinator", run.path))
    run.daemon("worker-0", state="quarantined").problem(
        "daemon-quarantined", "worker-0", error="20 steps in a row with a NaN"
    )
    for command in ("status", "why"):
        assert app.run([command]) == 0
        assert " [daemon-quarantined]\n" in capsys.readouterr().out


def test_explain_says_cause_and_remedy_and_suggests(dlctl_command):
    assert dlctl_command("explain").out.count("\n") == len(problem_texts.CODES) + 1
    said = dlctl_command("explain", "worker-stuck").out
    entry = problem_texts.CODES["worker-stuck"]
    assert all(text in said for text in (entry.what, entry.cause, entry.remedy))
    code, _, err = dlctl_command("explain", "worker-stack")
    assert (code, '"worker-stuck"' in err) == (4, True)
