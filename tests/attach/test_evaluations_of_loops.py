"""A loop that evaluates by itself, when the run asks for it."""

from __future__ import annotations

import pytest
from loops import LOOP, script, write_loop
from workplace import Workplace

STEP = "            run.step(loss=loss)\n"
EVALUATES = f"""{STEP}            while run.wants_evaluation:
                with run.shared_weights():
                    run.report(**task.evaluate(model))
"""


@pytest.mark.long
def test_a_loop_evaluates_the_shared_weights_when_it_is_asked(place: Workplace) -> None:
    write_loop(place, LOOP.replace(", task.evaluate)", ")").replace(STEP, EVALUATES), pause_s=0.02)
    place.job(
        stop="{ epochs = 3 }", workers=2, program=script(), optimizer="",
        algorithm='name = "diloco"\nlocal_steps = 4', more="\n[evaluation]\nevery_epochs = 1.0\n",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=200.0)
    assert ended.code == 0, ended.err
    run = place.run()
    assert run["samples"] == 3 * 256
    assert 0.0 < run["evaluation"]["val"] < 0.5
    assert sum(text.startswith("step ") and " val " in text for text in place.events()) >= 2
    place.nothing_left()
