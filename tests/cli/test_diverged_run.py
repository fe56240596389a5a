"""A run that has failed because nobody could use what its workers computed: what every command says
then is a way that works.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dead_runs import keep, remember, save

from dlctl import jobfile
from dlctl.job import config
from dlctl.ops import ready
from dlctl.ops.recover import Launched
from dlctl.runs import checkpoints, kept_shards, lineage, lock
from dlctl.util.text import DISCARDED, NO_WORKER

REASON = f"{NO_WORKER}: worker-1: {DISCARDED} for 20 steps in a row"
ACCURACY = {"accuracy": 0.9778, "step": 55}


@pytest.fixture
def failed(run_directory, job) -> Iterator[Any]:
    """It was at step 60 when it was saved, and failed at step 90; all of that is kept."""
    run = run_directory("ruined-7f3a", servers=1, workers=2)
    remember(run, "server-0", state="failed")
    keep(run, 0, version=41, deliveries=[])
    place, now = lock.place(run.path), time.time()
    run.run(state="failed", reason=REASON, step=90, resume="", place=place, job_file=str(job))
    run.run(ready_at=now - 60, ended_at=now, name=json_of(run)["job"]["name"])
    save(run, step=60, number=1, version=30, evaluation=ACCURACY)
    save(run, step=90, number=2, version=41, evaluation=ACCURACY, failure=REASON)
    yield run
    kept_shards.remove(run.path, config.Servers())


def json_of(run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / "job.json").read_text())
    return found


def set_lr(run) -> None:
    """Somebody has set a rate live three seconds before the end."""
    row = {"role": "server", "has_served": True, "settings": {"lr": 1e5}}
    run.db.put_memory({"daemon/server-0": row})
    run.db.add_event(run.db.run()["ended_at"] - 3.0, "set", "server-0", "set lr=1e5", {})
    run.db.commit()


RECOVER = "dlctl recover -j ruined-7f3a --from-checkpoint"


def test_status_why_and_logs_name_the_checkpoint_before_the_failure(failed, dlctl_command, golden):
    """The rate that was set live is forgotten with it."""
    failed.daemon("worker-1", state="quarantined", incarnation=1, error=DISCARDED)
    for command in ("status", "why", "logs --failed"):
        ended = dlctl_command(*command.split())
        assert RECOVER in ended.out + ended.err, command
    golden("why-ruined", dlctl_command("why").out)


def test_if_only_what_was_saved_at_the_failure_is_left_to_begin_anew_is_another_way(
    failed, dlctl_command, golden
):
    assert dlctl_command("checkpoint", "prune", "--keep", "1").code == 0
    listed = dlctl_command("checkpoint", "ls")
    assert "000000000060-1" in listed.out, "what is saved at a failure does not count"
    (failed.path / "ckpt" / "000000000060-1" / "manifest.json").unlink()
    golden("why-ruined-no-checkpoint", dlctl_command("why").out)


def test_who_tries_in_vain_to_bring_it_back_is_told_what_works(failed):
    error = ready.failed(Launched(failed.path, None), "could not be recovered")
    assert RECOVER in error.hint


def look(dlctl_command, *arguments: str) -> dict[str, Any]:
    ended = dlctl_command("recover", "--dry-run", "--json", *arguments)
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_recover_takes_what_was_saved_before_the_failure_or_what_is_named(failed, dlctl_command):
    found = look(dlctl_command, "--from-checkpoint")
    assert (found["checkpoint"]["step"], found["lost_steps"]) == (60, 30)
    found = look(dlctl_command, "--checkpoint", "2")
    assert (found["checkpoint"]["step"], found["lost_steps"]) == (90, 0)
    save(failed, step=30, number=3, version=15)
    found = look(dlctl_command, "--checkpoint", "1")
    assert (found["way"], found["checkpoint"]["step"]) == ("resume", 60)
    ended = dlctl_command("recover", "--dry-run", "--checkpoint", "1")
    assert ended.next == "dlctl recover --checkpoint 1 -j ruined-7f3a"


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused_with_those_that_are(
    failed, dlctl_command
):
    unknown = dlctl_command("recover", "--checkpoint", "9")
    assert (unknown.code, " 9" in unknown.err) == (4, True)
    assert dlctl_command("recover", "--checkpoint", "60").code == 4, "that is a step"
    (failed.path / "ckpt" / "000000000060-1" / "shard-0.safetensors").write_bytes(b"cut")
    damaged = dlctl_command("recover", "--checkpoint", "1")
    assert (damaged.code, "shard-0.safetensors" in damaged.err) == (1, True)
    assert failed.db.run()["state"] == "failed", "nothing was begun"


def test_what_was_set_live_is_forgotten_with_the_checkpoint_that_is_named(
    failed, job, play, dlctl_command
):
    set_lr(failed)
    save(failed, step=80, number=3, version=40)
    play("start", "ready", "forever")
    ended = dlctl_command("recover", "--checkpoint", "1", str(failed.path))
    assert ended.code == 0, ended.err
    assert failed.db.run()["resume"].endswith("000000000060-1")
    assert "daemon/server-0" not in failed.db.memory(), "the rate was set on that"
    (told,) = [event["text"] for event in failed.db.events(kind="resumed")]
    assert re.findall(r"\d+", told)[:2] == ["60", "30"], "from which step, and what is done again"
    first = lineage.order(failed.path)[0]
    assert checkpoints.number(first)[0] == 1, "those that it has left are not gone back to"


def test_start_goes_back_to_before_the_failure_and_says_how_it_would_not(
    failed, job, play, dlctl_command
):
    content = config.to_dict(jobfile.load(job))
    (failed.path / "job.json").write_text(json.dumps(content))
    shutil.copy(job, failed.path / "job.toml")
    failed.run(name=content["job"]["name"])
    planned = json.loads(dlctl_command("plan", "--json", "job.toml").out)
    assert (planned["way"], planned["done_again"]) == ("resume", 30)
    play("start", "ready", "forever")
    ended = dlctl_command("start", "job.toml")
    assert ended.code == 0, ended.err
    assert [text in ended.err for text in ("30 steps", "11 updates")] == [True, True]
    assert failed.db.run()["resume"].endswith("000000000060-1")


def test_an_evaluation_of_another_step_is_shown_with_that_step(failed, dlctl_command, golden):
    raised = "worker-0: task.loss raised KeyError: 7 (train.py:45)"
    save(failed, step=95, number=3, evaluation={"accuracy": 0.5, "step": 95}, failure=raised)
    listed = dlctl_command("checkpoint", "ls")
    _, first, second, third = listed.out.splitlines()
    assert [" 55)" in row for row in (first, second, third)] == [True, True, False]
    golden("checkpoint-ls-ruined", listed.err)
    rows = json.loads(dlctl_command("checkpoint", "ls", "--json").out)["checkpoints"]
    assert [row["failure"] for row in rows] == [None, REASON, raised]
