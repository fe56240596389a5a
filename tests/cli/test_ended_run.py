"""Every command on a run that has ended: what it may still do, and with which exit code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

REASONS = {
    "finished": "3 epochs are done",
    "stopped": "stopped by Ctrl-C",
    "failed": "server-0 ended: killed by SIGKILL; its shard is lost",
}
LOOKING = [
    ("ps",), ("status",), ("status", "worker-0", "--wide"), ("logs",), ("logs", "-f"), ("events",),
    ("get",), ("checkpoint", "ls"), ("wait", "--for", "stopped"), ("stop",), ("stop", "--kill"),
]  # fmt: skip
"""Done, or nothing to do: 0."""
CHANGING = [("set", "lr=0.1"), ("set", "worker-0", "push=off"), ("checkpoint",)]
"""Nobody is there to do it: 1."""
MISSING = [("checkpoint", "verify"), ("checkpoint", "export", "-o", "model.safetensors")]
"""There is no checkpoint: 4."""


@pytest.fixture(params=REASONS)
def state(request: pytest.FixtureRequest, run_directory: Any) -> str:
    """The state of a run that ended in each of the three ways."""
    run = run_directory().run(state=request.param, reason=REASONS[request.param], step=7)
    run.daemon("server-0", state="stopped").daemon("worker-0", state="stopped")
    return request.param


@pytest.mark.usefixtures("state")
def test_looking_at_it_and_stopping_it_again_succeed(dlctl_command: Callable[..., Any]) -> None:
    codes = {command: dlctl_command(*command).code for command in LOOKING}
    assert codes == dict.fromkeys(LOOKING, 0)


@pytest.mark.usefixtures("state")
def test_changing_it_fails_and_never_with_the_code_of_a_question(
    dlctl_command: Callable[..., Any],
) -> None:
    codes = {command: dlctl_command(*command).code for command in CHANGING + MISSING}
    assert codes == dict.fromkeys(CHANGING, 1) | dict.fromkeys(MISSING, 4)


def test_only_questions_about_its_state_answer_with_3_and_7(
    state: str, dlctl_command: Callable[..., Any]
) -> None:
    assert dlctl_command("status", "--check").code == 3
    waited = {"finished": 0, "stopped": 3, "failed": 7}
    assert dlctl_command("wait").code == waited[state]


def test_a_job_that_fails_while_it_starts_ends_start_run_and_wait_alike(
    job: Any, play: Callable[..., None], dlctl_command: Callable[..., Any]
) -> None:
    play("start", "fail")
    assert dlctl_command("start", os.fspath(job)).code == 7
    assert dlctl_command("run", os.fspath(job)).code == 7
    assert dlctl_command("wait", "--for", "ready").code == 7
