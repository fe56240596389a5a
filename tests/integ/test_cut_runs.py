"""Replicas that are cut over processes, in real runs: they train, die as one, and come back in
another shape.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import psutil
import pytest
from workplace import DOWNPOUR, ENDLESS, SLOW_S, Workplace

from dlctl.runs import checkpoints

ADAMW = '[inner]\nname = "adamw"\nlr = 0.01\n'


def ranks_of(place: Workplace, worker: str) -> list[psutil.Process]:
    """The other processes of its replica."""
    children = psutil.Process(place.pid(worker)).children()
    return [child for child in children if "daemons.worker.later_rank" in child.cmdline()]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_takes_its_replica_along_and_no_other(place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    cut = "[replica]\nfsdp = 2\n"
    place.job(stop=ENDLESS, algorithm='name = "sync"', workers=2, more=cut)
    place.start()
    place.until_step(4, 90.0)
    other, doomed = place.pid("worker-0"), place.pid("worker-1")
    (rank,) = ranks_of(place, "worker-1")
    rank.send_signal(signal.SIGKILL)
    again = r"worker-1 starts again; .*"
    place.until(
        "it is back", lambda: any(re.fullmatch(again, t) for t in place.events("lost")), 60.0
    )
    step = place.run()["step"]
    place.until_step(step + 4, 90.0)
    assert place.pid("worker-1") != doomed
    assert place.pid("worker-0") == other
    (rank,) = ranks_of(place, "worker-0")
    os.kill(other, signal.SIGKILL)
    place.until("its rank is gone", lambda: not rank.is_running())
    assert place.dlctl("stop").code == 0
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_replicas_of_another_shape(place: Workplace) -> None:
    place.task(pause_s=0.0)
    steps = 0
    for cut in ("fsdp = 2", "fsdp = 1", "pipeline = 2", "fsdp = 3"):
        steps += 24
        more = f"{ADAMW}[replica]\n{cut}\n"
        place.job(stop=f"{{ steps = {steps} }}", algorithm=DOWNPOUR, more=more)
        ended = place.dlctl("run", "job.toml", timeout_s=150.0)
        assert ended.code == 0, ended.err
        assert place.run()["step"] == steps
    assert "accuracy 0.9" in ended.err + ended.out
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_checkpoint_goes_on_as_sync_as_fsdp_and_as_allreduce_and_back(place: Workplace) -> None:
    place.task(pause_s=0.0)
    sync, adamw = (
        {"algorithm": 'name = "sync"', "workers": 2},
        '[inner]\nname = "adamw"\nlr = 0.01\n',
    )
    servers = '[optimizer]\nname = "adamw"\nlr = 0.01\n'
    allreduce = {"algorithm": 'name = "allreduce"', "workers": 2, "servers": 0, "more": adamw}

    def resumes(steps: int, *arguments: str, **job: Any) -> str:
        """What was said of it."""
        before = place.job(stop=f"{{ steps = {steps} }}", **job)
        text = (place.path / before).read_text()
        adagrad = '[optimizer]\nname = "adagrad"\nlr = 0.1\n'
        is_own = job["algorithm"] == allreduce["algorithm"]
        (place.path / before).write_text(text.replace(adagrad, "" if is_own else servers))
        ended = place.dlctl("start", *arguments, before, timeout_s=150.0)
        assert ended.code == 0, ended.err
        assert place.dlctl("wait", "--for", "finished", timeout_s=150.0).code == 0
        assert place.run()["step"] == steps
        assert place.run()["evaluation"]["accuracy"] > 0.9
        return ended.err

    resumes(24, **sync)
    (saved,) = checkpoints.complete(place.directory)
    for more in ("", "[replica]\nfsdp = 2\n"):
        assert "starts over" not in resumes(48, "--from", str(saved), **sync, more=more)
    output = resumes(48, "--from", str(saved), **allreduce)
    changes = 'algorithm "sync" -> "allreduce", optimizer "adamw" -> "sgd", inner "none" -> "adamw"'
    kept = "; keeps: model, progress, adamw"
    assert f"{changes}{kept}" in " ".join(output.split())
    assert "starts over" not in output
    before = place.directory.name
    output = resumes(72, **sync)  # Where it is, with another method in the job file.
    assert kept in " ".join(output.split())
    assert before in output
    place.nothing_left()
