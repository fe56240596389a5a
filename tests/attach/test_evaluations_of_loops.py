"""A loop that evaluates by itself, when the run asks for it, and saves the run's model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loops import LOOP, script, write_loop
from workplace import Workplace

from dlctl.runs import checkpoints, lineage

STEP = "            run.step(loss=loss)\n"
EVALUATES = f"""{STEP}            while run.wants_evaluation:
                with run.shared_weights():
                    run.report(**task.evaluate(model))
"""
END = '    print("the run is", run.ended)\n'
SAVES = f'{END}    run.save(HERE / "model.pt")\n'


@pytest.mark.long
def test_a_loop_evaluates_the_shared_weights_and_saves_those_of_the_end(place: Workplace) -> None:
    """Whether it evaluates or not: the last evaluation is asked for when its data has ended."""
    loop = LOOP.replace(", task.evaluate)", ")").replace(STEP, EVALUATES).replace(END, SAVES)
    write_loop(place, loop, pause_s=0.02)
    place.job(
        stop="{ epochs = 3 }", workers=2, program=script(), optimizer="",
        algorithm='name = "diloco"\nlocal_steps = 4', more="\n[evaluation]\nevery_epochs = 1.0\n",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=200.0)
    assert ended.code == 0, ended.err
    run = place.run()
    assert run["samples"] == 3 * 256
    assert 0.0 < run["evaluation"]["val"] < 0.5
    evaluated = [text for text in place.events() if text.startswith("step ") and " val " in text]
    assert len(evaluated) >= 2
    assert any(text.startswith(f"step {run['step']}:") for text in evaluated), evaluated
    found = lineage.newest_good(place.directory)
    assert found is not None
    directory, manifest = found
    weights = checkpoints.read_slice(directory, manifest, "w", 0, manifest["size"])
    saved = torch.load(place.path / "model.pt")
    assert np.array_equal(np.concatenate([each.ravel() for each in saved.values()]), weights)
    place.nothing_left()
