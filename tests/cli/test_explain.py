"""`dlctl explain`, and where people and programs see the codes of problems."""

from __future__ import annotations

import json
from typing import get_args

from dlctl.cli import app
from dlctl.ops import codes


def test_every_code_is_explained():
    """That no other is ever given, mypy sees to."""
    assert set(get_args(codes.Name)) == codes.CODES.keys()


def test_a_code_stands_behind_its_problem_and_in_json(run_directory, daemon, capsys):
    run = run_directory()
    run.run(state="running", **daemon("coordinator", run.path))
    run.daemon("worker-0", state="quarantined", error="20 steps in a row with a NaN")
    assert app.run(["status"]) == 0
    assert "20 steps in a row with a NaN  [daemon-quarantined]\n" in capsys.readouterr().out
    assert app.run(["status", "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], problem["daemon"]) == ("daemon-quarantined", "worker-0")
    assert "dlctl restart worker-0" in json.dumps(problem)
    assert app.run(["why", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["code"] == "daemon-quarantined"


def test_explain_says_cause_and_remedy_and_suggests(dlctl_command):
    assert dlctl_command("explain").out.count("\n") == len(codes.CODES) + 1
    said = dlctl_command("explain", "worker-stuck").out
    assert all(text in said for text in codes.CODES["worker-stuck"])
    code, _, err = dlctl_command("explain", "worker-stack")
    assert (code, 'did you mean "worker-stuck"?' in err) == (4, True)
