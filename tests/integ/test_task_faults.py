"""What the user's task does wrong ends the run with one clear error, and never in silence."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from workplace import ENDLESS, TASK, Command, Ended, Workplace

AT_ONCE = 2
"""Jobs that run beside each other: importing torch is most of what they do."""


class Fault(NamedTuple):
    before: str
    after: str
    """Replaces `before` in the task; the task's first line is number 1."""
    says: str
    """In the error: what was called, and what came of it."""
    more: str = ""
    next: tuple[str, ...] = ("logs --failed -j {run}",)
    """One of these commands is next."""


AT_THE_END = "evaluate() raises"
GOOD = TASK.lstrip("\n").format(pause_s=0.0, samples=64)
LINES = GOOD.splitlines()


def _line(text: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if text in line)


MODEL, DATASET, LOSS, EVALUATE = (
    _line(f"def {name}(") for name in ("model", "dataset", "loss", "evaluate")
)
FAULTS = {  # One of every place where a task can fail; all the words are in test_user_task.py.
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
        # It fails in its first step: while it starts, or just after `run` has seen that it trains.
        next=("logs --failed -j {run}", "start job.toml"),
    ),
    AT_THE_END: Fault(
        "points, label = clouds(512, seed=2).tensors",
        "raise OSError('no test set')",
        f"task.evaluate raised OSError: no test set ({{train}}:{EVALUATE + 1})",
        next=("recover -j {run}",),
    ),
}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[Workplace, Ended]]]:
    """Those of these jobs that are looked at, run to their ends."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = {test.callspec.params["name"] for test in tests if hasattr(test, "callspec")}
    places = {name: _place(FAULTS[name]) for name in FAULTS if name in {*names, AT_THE_END}}
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


@pytest.mark.per_commit(2)
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
    assert run.out.count(says) <= 1, "once more as a headline, if it is short"
    commands = [f"dlctl {each}".format(run=place.directory.name) for each in FAULTS[name].next]
    assert any(command in errors for command in commands)
    assert place.run()["state"] == "failed"
    place.nothing_left()


def test_what_was_learned_before_evaluate_raised_is_saved(
    ended: dict[str, tuple[Workplace, Ended]],
) -> None:
    place, _ = ended[AT_THE_END]
    assert place.run()["checkpoint"]["step"] == place.run()["step"] >= 8


@pytest.mark.long
def test_a_model_that_never_gets_built_is_named_when_the_time_is_over(place: Workplace) -> None:
    place.task(GOOD.replace("return nn.Seq", "threading.Event().wait()\n        return nn.Seq"))
    place.job(more="[timeouts]\nready_s = 8.0\n")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "worker-0 (building the model)" in ended.err
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


@pytest.mark.long
def test_what_only_one_worker_raises_takes_it_out_until_it_is_restarted(place: Workplace) -> None:
    """The first process that gets there, as one whose disk is broken."""
    first = f"not __import__('subprocess').call(['mkdir', '-m', '700', '{place.path}/first'])"
    _task(place, f"if self.calls == 20 and {first}: raise OSError('its disk is broken')")
    place.job(stop=ENDLESS, workers=2)
    place.start()
    names = ("worker-0", "worker-1")

    def lost() -> list[str]:
        return [name for name in names if place.daemon(name)["state"] == "quarantined"]

    place.until("one worker to be taken out", lambda: bool(lost()))
    (name,) = lost()
    place.until_step(place.run()["step"] + 20)
    says = f"task.loss raised OSError: its disk is broken ({place.path}/train.py:{LOSS + 4})"
    status = place.dlctl("status").out
    assert f"{name}: quarantined: {says}" in " ".join(status.split()), status
    assert f"dlctl restart {name} -j {place.directory.name}" in status
    assert place.dlctl("restart", name).code == 0
    place.until("all to train", lambda: place.run()["state"] == "running")
    assert place.dlctl("stop").code == 0


@pytest.mark.long
def test_a_loss_that_stays_nan_fails_the_run_and_never_gets_into_the_weights(
    place: Workplace,
) -> None:
    _task(place, "if self.calls > 20: return model(batch[0]).sum() * float('nan')")
    place.job(stop="{ epochs = 1000 }", more_workers="nonfinite_steps_max = 6")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "6 steps" in ended.err
    assert " lr" in ended.err
    run = place.run()
    assert 0 < run["step"] <= 20
    for path in place.directory.glob("ckpt/*/*.safetensors"):
        for name, array in load_file(path).items():
            assert np.isfinite(array).all(), (path, name)
    assert run["checkpoint"]["step"] == run["step"]
    place.nothing_left()


@pytest.mark.long
def test_a_model_that_a_rate_has_ruined_comes_back_as_it_was_before_however_often_that_fails(
    place: Workplace,
) -> None:
    """What status names is done, and works; what it warns of is tried before, and harms nothing."""
    ruined = "max(float(p.abs().max()) for p in model.parameters()) > 1e3"
    _task(place, f"if {ruined}: return model(batch[0]).sum() * float('inf')")
    place.job(stop=ENDLESS, more_workers="nonfinite_steps_max = 6", more="keep = 1")
    place.start()
    place.until_step(20)
    saved = json.loads(place.dlctl("checkpoint", "create", "--json").out)
    assert abs(datetime.fromisoformat(saved["at"]).timestamp() - time.time()) < 120
    assert place.dlctl("set", "lr=1e5").code == 0
    place.until_state("failed")
    for _ in range(2):
        place.dlctl("recover")
        place.until_state("failed")
    listed = json.loads(place.dlctl("checkpoint", "ls", "--json").out)["checkpoints"]
    good = [row["step"] for row in listed if row["failure"] is None]
    assert good == [saved["step"]]
    way = f"dlctl recover -j {place.directory.name} --from-checkpoint"
    assert way in place.dlctl("status").out
    back = place.dlctl(*way.split()[1:])
    assert back.code == 0, back.err
    place.until_step(place.run()["step"] + 20)
    assert "lr   0.1" in place.dlctl("get", "lr").out, "the job file's applies again"
    assert place.dlctl("stop").code == 0


@pytest.mark.long
def test_the_batches_of_gradients_that_no_server_would_take_are_named_by_status_and_events(
    place: Workplace,
) -> None:
    """No step is made along them: with one, smaller ones would follow that are taken."""
    _task(place, "if self.calls > 20: return model(batch[0]).sum() * 1e12")
    place.job(stop="{ epochs = 1000 }", more="[evaluation]\nevery_epochs = 0")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "worker-0: " in ended.err
    left_out = (
        r"gradient of norm \S+, above what servers\.push_norm_max allows \(its loss is \S+\), "
        r"samples \d+\.\.\d+ of the order of epoch \d+"
    )
    assert re.search(left_out, ended.err)
    assert re.search(left_out, place.dlctl("status").out)
    events = [
        json.loads(line) for line in place.dlctl("events", "--json", "-n", "all").out.splitlines()
    ]
    (exited,) = [e for e in events if (e["kind"], e["daemon"]) == ("exit", "worker-0")]
    assert re.search(f"discarded, not pushed: {left_out}", "\n".join(exited["data"]["last_lines"]))
    for path in place.directory.glob("ckpt/*/*.safetensors"):
        for name, array in load_file(path).items():
            assert np.abs(array).max(initial=0) < 1e3, (path, name)
    place.nothing_left()


@pytest.mark.long
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
    assert "discarded, not pushed: loss inf" in ended.err
    printed = place.dlctl("logs", "worker-0", "-n", "all", "--grep", "^line 49 of").out
    assert len(printed.splitlines()) == 32
    assert "stream=stdout" in printed


@pytest.mark.long
def test_a_process_that_crashes_again_and_again_fails_the_run_with_its_last_words(
    place: Workplace,
) -> None:
    _task(place, "__import__('os').abort()")
    place.job(more_workers="restarts_max = 1")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert " 2 times" in ended.err
    assert "Fatal Python error: Aborted" in ended.err
    assert "train.py" in ended.err, "where it crashed"
    assert place.daemon("worker-0")["last_exit"]["text"] == "killed by SIGABRT"
    place.nothing_left()


@pytest.mark.long
def test_a_task_that_ends_its_own_process_is_blamed_for_it_whatever_the_code_is(
    place: Workplace,
) -> None:
    """Code 0, too, which a process of dlctl has that was told to end: its log would say so."""
    _task(place, "if self.calls > 20: __import__('os')._exit(0)")
    place.job(stop=ENDLESS, more_workers="restarts_max = 1")
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7
    assert "exit 0, for the 2nd" in ended.err
    last = place.daemon("worker-0")["last_exit"]
    assert (last["code"], last["in_row"]) == (0, 2)
    assert last["cause"] == "task"
    assert "os._exit" in ended.err
    step = "find what ends the process in train.py and fix it first, then"
    assert step in place.dlctl("status").out
    place.nothing_left()


@pytest.mark.long
def test_a_process_that_loads_data_and_hangs_is_named_by_its_line(place: Workplace) -> None:
    text = GOOD.replace("clouds(64, seed=1)", "Hanging(clouds(64, seed=1))")
    hanging = """
class Hanging(torch.utils.data.Dataset):
    def __init__(self, samples): self.samples = samples
    def __len__(self): return len(self.samples)
    def __getitem__(self, index):
        if index == 33: threading.Event().wait()
        return self.samples[index]
"""
    place.task(text + hanging)
    place.job(stop=ENDLESS, more_workers="loader_processes = 2")
    place.start()
    place.until("its place", lambda: "stuck_at" in place.daemon("worker-0")["metrics"])
    line = len(LINES) + hanging.splitlines().index(
        "        if index == 33: threading.Event().wait()"
    )
    why = place.dlctl("why").out
    assert re.search(f" 1[0-9] s, at train.py:{line + 1}  ", why), why
    logged = place.dlctl("logs", "worker-0").out
    assert re.search(rf"pids \d+, \d+; \d+ is at .*/train.py:{line + 1}\n", logged)
    assert "in __getitem__" in logged
    assert place.dlctl("stop", "--kill").code == 0
    place.nothing_left()


@pytest.mark.long
def test_all_who_hang_in_one_line_name_it_and_go_on_when_it_is_corrected(place: Workplace) -> None:
    """What `status` and `why` advise works, and one command is enough for all of them."""
    _task(place, "if self.calls > 20: threading.Event().wait()")
    place.job(stop=ENDLESS, workers=2, more="[timeouts]\ngrace_s = 2.0\n")
    place.start()
    line = LOSS + 4  # `CALLS` goes before it.
    where = f"slow: stuck in one batch for 1[0-9] s, at train.py:{line}  "
    for name in ("worker-0", "worker-1"):
        place.until(f"{name} to be stuck", lambda name=name: place.daemon(name)["state"] == "slow")
        place.until("its place", lambda name=name: "stuck_at" in place.daemon(name)["metrics"])
    why = place.dlctl("why").out
    assert len(re.findall(where, why)) == 2, why
    command = f"dlctl restart 'worker-*' -j {place.directory.name}"
    assert why.count(command) == 1
    assert place.run()["reason"] == "worker-0, worker-1"
    _task(place, "pass")
    assert "train.py: changed since the start" in place.dlctl("status").out
    step = place.run()["step"]
    restarted = place.dlctl("restart", "worker-*")
    assert (restarted.code, "train.py: changed, reloading" in restarted.err) == (0, True)
    place.until_step(step + 20)
    assert "changed since the start" not in place.dlctl("status").out
    assert place.dlctl("stop").code == 0
