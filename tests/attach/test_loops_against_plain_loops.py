"""A loop in a run of one worker is the loop without dlctl: also across a stop and another start."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from loops import CLOUDS, script, write_loop
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workplace import Workplace

STEPS, ROUND = 200, 20
RECORDING = """

def main():
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    run = dlctl.attach(model, optimizer)
    flat = lambda: nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    records = []
    try:
        with run:
            for batch in run.loader(task.dataset(), 8):
                before = flat()
                task.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                records.append((batch, before, flat()))
                run.step()
    finally:
        torch.save(records, HERE / f"records-{run.is_restart:d}-{len(list(HERE.glob('rec*')))}")


if __name__ == "__main__":
    main()
"""


def _task() -> Any:
    """What the script has."""
    module = ModuleType("clouds")
    vars(module)["__file__"] = __file__
    exec(CLOUDS.format(samples=8, pause_s=0.0), vars(module))
    return vars(module)["task"]


class Plain:
    """The same loop without dlctl."""

    def __init__(self) -> None:
        self.task = _task()
        self.model: nn.Module = self.task.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)

    def step(self, batch: Any) -> torch.Tensor:
        self.task.loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return parameters_to_vector(self.model.parameters()).detach()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_was_stopped_and_started_again_is_one_loop_without_dlctl(
    place: Workplace,
) -> None:
    """DiLoCo with one worker and an outer SGD of rate 1: theta - (theta - theta') is rounded once
    in a round; within a round nothing is.
    """
    write_loop(place, RECORDING, samples=STEPS * 8, pause_s=0.05)
    place.job(
        stop="{ epochs = 1 }", program=script(),
        algorithm=f'name = "diloco"\nlocal_steps = {ROUND}',
        optimizer='[optimizer]\nname = "sgd"\nlr = 1.0\n',
    )  # fmt: skip
    place.start()
    place.until_step(60, timeout_s=100.0)
    assert place.dlctl("stop").code == 0
    stopped_at = place.run()["step"]
    assert 60 <= stopped_at < STEPS - ROUND
    ended = place.dlctl("run", "job.toml", timeout_s=120.0)
    assert ended.code == 0, ended.err
    assert place.run()["step"] == STEPS
    first, second = (torch.load(path) for path in sorted(place.path.glob("records-*")))
    assert (len(first), len(second)) == (stopped_at, STEPS - stopped_at)
    plain, within = Plain(), Plain()
    for batch, before, after in first + second:
        vector_to_parameters(before, within.model.parameters())
        assert torch.equal(within.step(batch), after), "bit for bit, with the optimizer's state"
        values = plain.step(batch)
        assert (values - after).abs().max() < 1e-6
    place.nothing_left()
