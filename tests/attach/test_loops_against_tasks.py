"""The same model and data as a script and as a task: with four workers they come to the same."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from loops import script, write_loop
from workplace import Workplace

LR = 0.05
SERVERS_STEP = f'[optimizer]\nname = "sgd"\nlr = {LR}\n'
OWN_STEP = f'[inner]\nname = "sgd"\nlr = {LR}\n'
BETTER_THAN = 0.4
"""The loss of a model that is not trained is 0.8, that of all of them 0.3."""
APART_MAX = 0.01


class Method(NamedTuple):
    lines: str
    """Of [algorithm]."""
    way: str
    """How a script steps: see `loops.LOOP`."""
    servers: int


METHODS = {
    "sync": Method('name = "sync"', "gradients", 1),
    "downpour": Method(
        'name = "downpour"\nfetch_every_steps = 2\npush_every_steps = 2', "gradients", 1
    ),
    "allreduce": Method('name = "allreduce"', "mean", 0),
    "diloco": Method('name = "diloco"\nlocal_steps = 4', "own", 1),
    "local-sgd": Method('name = "local-sgd"\nlocal_steps = 4', "own", 1),
    "gossip": Method('name = "gossip"', "own", 0),
}
"""Three that exchange gradients, and three that exchange parameters."""


def _loss(place: Workplace, method: Method, *, is_script: bool) -> float:
    """The loss of the model on other samples, after the same count of steps."""
    inner = "" if is_script or method.way == "gradients" else OWN_STEP
    place.job(
        stop="{ epochs = 2 }", workers=4, servers=method.servers, algorithm=method.lines,
        optimizer=SERVERS_STEP if method.way == "gradients" else "",
        program=script(method.way) if is_script else 'task = "train.py:task"',
        more=f"{inner}\n[evaluation]\nevery_epochs = 1.0\n",
    )  # fmt: skip
    ended = place.dlctl("run", "--fresh", "job.toml", timeout_s=180.0)
    assert ended.code == 0, ended.err
    run = place.run()
    assert (run["step"], run["samples"]) == (256, 2048)
    return float(run["evaluation"]["val"])


@pytest.mark.long
@pytest.mark.timeout(390)
@pytest.mark.parametrize("name", ["sync", "downpour", "allreduce", "local-sgd", "gossip", "diloco"])
def test_a_script_comes_to_the_loss_of_a_task(place: Workplace, name: str) -> None:
    write_loop(place, samples=1024, lr=LR)
    of_task = _loss(place, METHODS[name], is_script=False)
    of_script = _loss(place, METHODS[name], is_script=True)
    assert of_task < BETTER_THAN
    assert of_script == pytest.approx(of_task, rel=APART_MAX)
    place.nothing_left()
