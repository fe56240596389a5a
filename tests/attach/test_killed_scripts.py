"""Scripts that are shot in each phase, and daemons around them: they start again, join and go on;
no push that was acknowledged is lost, none is applied twice.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from faults import ledger
from loops import DYING, LOOP, script, write_loop
from workplace import ENDLESS, Workplace

from dlctl.runs import acks, checkpoints, lineage

SHARDS, CELLS, BLOCK_CELLS = 2, 1 << 14, 64
LEDGER = 'name = "downpour"\npush_every_steps = 1\nfetch_every_steps = 4'
DEADLY = """
class Deadly:
    def state_dict(self):
        pass_through("save")
        return {}

    def load_state_dict(self, state):
        pass


def pass_through(phase, steps=5):
    import os, signal

    first = os.environ["DLCTL_NAME"], os.environ["DLCTL_INCARNATION"]
    if phase == sys.argv[2] and steps >= 5 and first == ("worker-0", "1"):
        os.kill(os.getpid(), signal.SIGKILL)


def main"""
"""What is asked for its state as a scheduler, when the run saves."""
SGD = '[optimizer]\nname = "sgd"\nlr = 1.0\n'


def _start_account(place: Workplace, *phases: str) -> None:
    """Start a run of two workers, of which one dies in these phases."""
    shutil.copy(Path(ledger.__file__).with_name("ledger_task.py"), place.path)
    blocks = place.path / "blocks"
    blocks.touch()
    place.env |= {
        "LEDGER_SHARDS": str(SHARDS),
        "LEDGER_CELLS": str(CELLS),
        "LEDGER_BLOCK_CELLS": str(BLOCK_CELLS),
        "LEDGER_WORK": "0",
        "LEDGER_SAMPLES": "512",
        "LEDGER_BLOCKS": str(blocks),
    }
    place.task(DYING)
    place.job(
        stop=ENDLESS, program=script(*phases), algorithm=LEDGER, optimizer=SGD, workers=2,
        servers=SHARDS, more="\n[evaluation]\nevery_epochs = 0.5\n",
    )  # fmt: skip
    started = place.dlctl("start", "job.toml", timeout_s=200.0)  # One may die before it joins.
    assert started.code == 0, started.err


def _verdict(place: Workplace) -> ledger.Verdict:
    found = lineage.newest_good(place.directory)
    assert found is not None
    directory, manifest = found
    weights = checkpoints.read_slice(directory, manifest, "w", 0, manifest["size"])
    blocks = ledger.read_blocks(place.path / "blocks", BLOCK_CELLS)
    return ledger.judge(
        np.asarray(weights), SHARDS, blocks, BLOCK_CELLS, acks.read_all(place.directory)
    )


def _until_it_steps(place: Workplace, incarnation: int, timeout_s: float) -> None:
    def steps() -> bool:
        row = place.daemon("worker-0")
        return row["incarnation"] == incarnation and row["metrics"].get("step", 0) > 4

    place.until(f"the script steps in life {incarnation}", steps, timeout_s)


def _kill(place: Workplace, name: str) -> None:
    before = place.pid(name)
    os.kill(before, signal.SIGKILL)

    def is_replaced() -> bool:
        row = place.run() if name == "coordinator" else place.daemon(name)
        return row.get("pid") not in (None, before)

    place.until(f"{name} has a successor", is_replaced)
    place.until_state("running", timeout_s=60.0)
    place.until_step(place.run()["step"] + 20)


@pytest.mark.timeout(300)
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("phases", [("push",), ("evaluation", "join", "step", "push")])
def test_whoever_is_shot_no_push_is_lost_or_applied_twice(
    place: Workplace, phases: tuple[str, ...]
) -> None:
    _start_account(place, *phases)
    _until_it_steps(place, len(phases) + 1, timeout_s=240.0)
    _kill(place, "server-1")
    _kill(place, "coordinator")
    assert place.daemon("worker-0")["incarnation"] == len(phases) + 1, "they were all that it took"
    assert place.dlctl("stop").code == 0
    verdict = _verdict(place)
    assert (verdict.lost, verdict.twice, verdict.strange) == (0, 0, 0)
    assert verdict.acknowledged > SHARDS * 50
    assert verdict.applied * SHARDS >= verdict.acknowledged
    verified = place.dlctl("verify")
    assert verified.code == 0, verified.out
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", ["save", "report"])
def test_each_sample_counts_once_although_a_script_is_shot(place: Workplace, phase: str) -> None:
    """While its optimizer is copied for a checkpoint; with steps that it has not reported."""
    loop = LOOP.replace("task.evaluate)", "scheduler=Deadly())").replace("def main", DEADLY)
    step = "            run.step(loss=loss)\n"
    loop = loop.replace(step, step + '            pass_through("report", run.steps)\n')
    write_loop(place, loop, pause_s=0.1)
    place.job(
        stop="{ epochs = 6 }", program=script("own", phase), optimizer="", workers=2,
        algorithm='name = "diloco"\nlocal_steps = 8', checkpoint_every_s=2.0,
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=240.0)
    assert ended.code == 0, ended.err
    assert place.daemon("worker-0")["incarnation"] == 2
    assert place.run()["samples"] == 6 * 256
    verified = place.dlctl("verify")
    assert verified.code == 0, verified.out
    place.nothing_left()
