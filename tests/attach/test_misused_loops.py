"""Mistakes in a loop of the user's own: each is an error that names the line, and what to do.

The loops run alone, where nothing but the run is missing: what they call is the same.
"""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path

import pytest
from loops import CLOUDS, LOOP

from daemons.worker.task.user_task import user_line
from dlctl.errors import DlctlError

STEP = "            run.step(loss=loss)\n"
OPTIMIZER_STEP = "            optimizer.step()\n"
BACKWARD = "            loss.backward()\n"
REPLACES = (
    "            model[0].weight = nn.Parameter(model[0].weight.detach().clone())\n"
    "            run.step(loss=loss)  # here\n"
)


# What is wrong -> (what is replaced, by what, in which loop, what the hint names).
MISTAKES = {
    "never": (STEP, "", "own", "run.step()"),
    "never with a method of gradients": (STEP, "", "gradients", "run.step()"),
    "twice": (STEP, STEP + "            run.step(loss=loss)  # here\n", "own", "run.step("),
    "twice with gradients": (
        STEP, STEP + "            run.step(loss=loss)  # here\n", "gradients", "run.step("
    ),
    "before the optimizer": (
        OPTIMIZER_STEP, "            run.step(loss=loss)  # here\n", "own", "optimizer.step()"
    ),
    "before backward": (
        BACKWARD, "            run.step(loss=loss)  # here\n" + BACKWARD, "own", "optimizer.step()"
    ),
    "no backward": (BACKWARD, "", "gradients", "loss.backward()"),
    "two steps of the optimizer": (
        OPTIMIZER_STEP, OPTIMIZER_STEP * 2, "own", "optimizer.step()"
    ),
    "another layer": (
        STEP, "            model.append(nn.Linear(2, 2))\n            run.step()  # here\n", "own",
        "before dlctl.attach",
    ),
    "a replaced parameter": (STEP, REPLACES, "own", "copy_"),
    "another thread": (
        STEP,
        "            import concurrent.futures\n"
        "            with concurrent.futures.ThreadPoolExecutor(1) as pool:\n"
        "                pool.submit(run.step).result()  # here\n",
        "own", "dlctl.attach",
    ),
    "another optimizer": (
        "    run = dlctl",
        "    optimizer = torch.optim.SGD([torch.ones(1)], lr=1)\n    run = dlctl",
        "own", "the parameters of the model",
    ),
    "another model": ("run.optimizer(model)\n", "run.optimizer(task.model())  # here\n",
        "gradients", "the same model"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_its_line_and_the_remedy(tmp_path: Path, name: str) -> None:
    old, new, way, remedy = MISTAKES[name]
    assert LOOP.count(old) == 1
    loop = LOOP.replace(old, new).replace("{batch_size}", "8").replace("{lr}", "0.05")
    file = tmp_path / "train.py"
    file.write_text(CLOUDS.format(samples=256, pause_s=0.0) + loop)
    main = runpy.run_path(str(file))["main"]
    with pytest.raises(DlctlError) as caught:
        main(way)
    assert remedy in (caught.value.hint or "")
    error = caught.value
    where = error.where or user_line(traceback.extract_tb(error.__traceback__))
    path, _, line = (where or "").rpartition(":")
    assert path == str(file)
    marked = [n for n, text in enumerate(file.read_text().splitlines(), 1) if "# here" in text]
    assert [int(line)] == marked or not marked
