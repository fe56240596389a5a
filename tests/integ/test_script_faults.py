"""Scripts that end before they have joined the run: it fails, and names the line and the remedy."""

from __future__ import annotations

import pytest
from workplace import Workplace

ATTACHED = """\
import torch, dlctl
from torch.utils.data import TensorDataset
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = dlctl.attach(model, optimizer)
"""
TRAINS = """\
with run:
    for (x,) in run.loader(TensorDataset(torch.ones(64, 2)), 8):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
"""
FAULTS = {
    "syntax": ("import dlctl\n\nrun = dlctl.attach(\n", ":3", "raised SyntaxError"),
    "no attach": ("import sys\nsys.exit(0)\n", ":2", "without a call of dlctl.attach"),
    "attached, raises": (f"{ATTACHED}[][1]\n", ":6", "raised IndexError"),
    "attached, never trains": (f"{ATTACHED}raise SystemExit\n", ":6", "before it has joined"),
    "raises": ("import json\njson.loads('')\n", ":2", "raised JSONDecodeError"),
}


def _write(place: Workplace, text: str, workers: int, algorithm: str = "local-sgd") -> None:
    place.task(text)
    file = place.path / "job.toml"
    place.job(workers=workers, algorithm=f'name = "{algorithm}"')
    file.write_text(file.read_text().replace('task = "train.py:task"', 'script = "train.py"'))


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_script_that_ends_before_it_attaches_fails_the_run(place: Workplace, name: str) -> None:
    text, line, says = FAULTS[name]
    _write(place, text, workers=2)
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7, ended.err
    why = f"{place.path / 'train.py'}{line}"
    errors = ended.err[ended.err.index("error: ") :].splitlines()
    assert why in errors[0]
    assert says in errors[0]
    assert place.run()["state"] == "failed"
    assert not place.daemon("worker-0").get("restarts")
    assert f"fix train.py{line}" in place.dlctl("why").out
    place.nothing_left()


@pytest.mark.long
def test_an_error_after_the_run_is_in_the_log(place: Workplace) -> None:
    """The run has finished, and is not told; but the traceback is not lost."""
    _write(place, f"{ATTACHED}{TRAINS}[][1]\n", workers=1)
    assert place.dlctl("run", "job.toml").code == 0
    assert place.run()["state"] == "finished"
    said = place.dlctl("logs", "worker-0").out
    assert f"raised IndexError: list index out of range ({place.path / 'train.py'}:12)" in said
    place.nothing_left()
