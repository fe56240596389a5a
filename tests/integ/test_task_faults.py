"""What the user's task does wrong ends the run with one clear error, and never in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from workplace import TASK, Command, Ended, Workplace

AT_ONCE = 2
"""Jobs that run beside each other: importing torch is most of what they do."""


class Fault(NamedTuple):
    before: str
    after: str
    """Replaces `before` in the task; the task's first line is number 1."""
    says: str
    """In the error: what was called, and what came of it."""
    more: str = ""


GOOD = TASK.lstrip("\n").format(pause_s=0.0, samples=64)
LINES = GOOD.splitlines()


def _line(text: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if text in line)


MODEL, DATASET, LOSS, EVALUATE = (
    _line(f"def {name}(") for name in ("model", "dataset", "loss", "evaluate")
)
FAULTS = {  # One of every place where a task can fail; all the words are in test_task.py.
    "a module that is not installed": Fault(
        "import threading",
        "import threading, torchvison",
        "importing train.py raised ModuleNotFoundError: No module named 'torchvison' "
        '({train}:1); install what provides "torchvison"',
    ),
    "model() raises": Fault(
        "nn.Linear(2, 8)",
        "nn.Linear(2, {}['size'])",
        f"task.model raised KeyError: 'size' ({{train}}:{MODEL + 1})",
    ),
    "an empty dataset": Fault(
        "clouds(64, seed=1)",
        "clouds(0, seed=1)",
        f"task.dataset() has no samples ({{train}}:{DATASET})",
    ),
    "no GPU": Fault("", "", 'cannot compute on "cuda": ', 'device = "cuda"'),
    "sys.exit() in loss()": Fault(
        "points, label = batch",
        "raise SystemExit('enough')",
        f"task.loss raised SystemExit: enough ({{train}}:{LOSS + 2})",
    ),
    "evaluate() raises": Fault(
        "points, label = clouds(512, seed=2).tensors",
        "raise OSError('no test set')",
        f"task.evaluate raised OSError: no test set ({{train}}:{EVALUATE + 1})",
    ),
}


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[str, tuple[Workplace, Ended]]]:
    """All of these jobs, run to their ends."""
    places = {name: _place(fault) for name, fault in FAULTS.items()}
    running: list[Command] = []
    done = {}
    try:
        for name, place in places.items():
            running.append(place.begin("run", "job.toml"))
            done[name] = (place, running[-1])
            if len(running) == AT_ONCE:
                running.pop(0).end()
        yield {name: (place, command.end()) for name, (place, command) in done.items()}
    finally:
        left = [text for place in places.values() for text in place.close()]
    assert not left, f"left behind: {left}"


def _place(fault: Fault) -> Workplace:
    place = Workplace()
    assert fault.before in GOOD
    place.task(GOOD.replace(fault.before, fault.after, 1) if fault.before else GOOD)
    place.job(more_workers=fault.more)
    return place


@pytest.mark.parametrize("name", FAULTS)
def test_the_run_fails_and_says_what_where_and_what_next(
    ended: dict[str, tuple[Workplace, Ended]], name: str
) -> None:
    place, run = ended[name]
    assert run.code == 7, run.err
    says = FAULTS[name].says.format(train=place.path / "train.py")
    errors = run.err[run.err.index("error: ") :]
    assert says in errors
    assert says in errors.splitlines()[0]
    assert errors.count(says) == 1, "whole, and once"
    assert (run.out + run.err).count(says) <= 2, "once more as a headline, if it is short"
    assert f"dlctl logs --failed -j {place.directory.name}" in errors
    assert place.run()["state"] == "failed"
    place.nothing_left()


def test_what_was_learned_before_evaluate_raised_is_saved(
    ended: dict[str, tuple[Workplace, Ended]],
) -> None:
    place, _ = ended["evaluate() raises"]
    assert place.run()["checkpoint"]["step"] == place.run()["step"] >= 8


def test_a_model_that_never_gets_built_is_named_when_the_time_is_over(place: Workplace) -> None:
    place.task(GOOD.replace("return nn.Seq", "threading.Event().wait()\n        return nn.Seq"))
    place.job(more="[timeouts]\nready_s = 8.0\n")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "not ready in time; waiting for worker-0 (building the model)" in ended.err
    place.nothing_left()


# ---------------------------------------------------------------- at work


CALLS = """    calls = 0

    def loss(self, model, batch):
        self.calls += 1
"""


def _task(place: Workplace, does: str) -> None:
    """`does`: what loss() does first; `self.calls` counts."""
    assert "    def loss(self, model, batch):\n" in GOOD
    text = GOOD.replace("    def loss(self, model, batch):\n", f"{CALLS}        {does}\n")
    place.task(text)


def test_a_loss_that_stays_nan_fails_the_run_and_never_gets_into_the_weights(
    place: Workplace,
) -> None:
    _task(place, "if self.calls > 20: return model(batch[0]).sum() * float('nan')")
    place.job(stop="{ epochs = 1000 }", more_workers="nonfinite_steps_max = 6")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "the loss or its gradient was not finite for 6 steps in a row" in ended.err
    assert "A smaller lr" in ended.err
    run = place.run()
    assert 0 < run["step"] <= 20
    for path in place.directory.glob("ckpt/*/*.safetensors"):
        for name, array in load_file(path).items():
            assert np.isfinite(array).all(), (path, name)
    assert run["checkpoint"]["step"] == run["step"]
    place.nothing_left()


def test_the_batches_of_pushes_that_are_refused_are_named_by_status_and_events(
    place: Workplace,
) -> None:
    _task(place, "if self.calls > 20: return model(batch[0]).sum() * 1e12")
    place.job(stop="{ epochs = 1000 }", more="[evaluation]\nevery_epochs = 0")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "no worker is left: worker-0: 3 pushes in a row were refused" in ended.err
    assert "above servers.push_norm_max = 1e+09" in ended.err
    refused = r"refused a push \(samples \d+\.\.\d+ of the order of epoch \d+[,)]"
    assert len(re.findall(refused, place.dlctl("status").out)) >= 1
    told = [
        json.loads(line) for line in place.dlctl("events", "--json", "-n", "all").out.splitlines()
    ]
    (exited,) = [e for e in told if (e["kind"], e["daemon"]) == ("exit", "worker-0")]
    last_words = "\n".join(exited["data"]["last_lines"])
    assert re.search(refused, last_words)
    assert re.search(r"they were of samples \d+\.\.\d+ of the order of epoch \d+, ", last_words)
    for path in place.directory.glob("ckpt/*/*.safetensors"):
        for name, array in load_file(path).items():
            assert np.abs(array).max(initial=0) < 1e3, (path, name)
    place.nothing_left()


def test_batches_that_are_nan_now_and_then_are_left_out_and_counted(place: Workplace) -> None:
    noise = "for i in range(50): print(f'line {i} of step {self.calls}')"
    _task(
        place,
        f"{noise}\n        if self.calls % 4 == 0: return model(batch[0]).sum() * float('inf')",
    )
    place.job(stop="{ epochs = 4 }")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    assert place.run()["step"] == 24, "of 4 times 8 batches every fourth was infinite"
    status = json.loads(place.dlctl("status", "--json").out)
    worker = next(row for row in status["daemons"] if row["name"] == "worker-0")
    assert worker["metrics"]["nonfinite_steps"] == 8
    assert "not finite, not pushed: loss inf" in ended.err
    printed = place.dlctl("logs", "worker-0", "-n", "all", "--grep", "^line 49 of").out
    assert len(printed.splitlines()) == 32
    assert "stream=stdout" in printed


def test_a_process_that_crashes_again_and_again_fails_the_run_with_its_last_words(
    place: Workplace,
) -> None:
    _task(place, "__import__('os').abort()")
    place.job(more_workers="restarts_max = 1")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "worker-0 died 2 times" in ended.err
    assert "Fatal Python error: Aborted" in ended.err
    assert "train.py" in ended.err, "where it crashed"
    assert place.daemon("worker-0")["last_exit"]["text"] == "killed by SIGABRT"
    place.nothing_left()
