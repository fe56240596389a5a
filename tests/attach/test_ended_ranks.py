"""One process of a replica fails, leaves, or never comes: it is named, and no other one hangs."""

from __future__ import annotations

import re

import pytest
from group_loops import GROUP, alone, torchrun
from workplace import ENDLESS, Workplace

HERE = "# here\n"
IN_LOOP = "        # in the loop\n"
DILOCO = 'name = "diloco"\nlocal_steps = 4'
RAISES = 'raise ValueError("no")  # line\n'
MISTAKES = {
    "raises before": (HERE, f"if RANK: {RAISES}", "rank 1"),
    "raises": (IN_LOOP, f"        if RANK and run.steps > 4: {RAISES}", "rank 1"),
    "exits": (IN_LOOP, "        if RANK and run.steps > 4: sys.exit(0)  # line\n", "rank 1"),
    "never comes": (HERE, "if RANK: threading.Event().wait()\n", "rank 1"),
    "all raise": (IN_LOOP, f"        if run.steps > 4: {RAISES}", ""),
    "another model": (
        HERE, "if RANK: model = nn.Linear(2, 7)\n    optimizer = None\n", "rank 1"
    ),
    "a group of others": (
        HERE, "optimizer = optimizer\nKIND = dist.new_group([0])\n", "no group"
    ),
}  # fmt: skip
"""What is wrong -> (what is replaced in the script, by what, what is said)."""


def _write(place: Workplace, old: str, new: str) -> list[int]:
    """Returns the marked lines."""
    assert GROUP.count(old) == 1
    new = new.replace("\n    ", "\n")
    text = GROUP.replace(old, new).replace('group=KIND != "one"', "group=KIND != 'one' and THE")
    text = text.replace("# here\n", "")
    the = "THE = KIND if not isinstance(KIND, str) else True\nrun = dlctl.attach"
    text = text.replace("run = dlctl.attach", the)
    text = text.format(samples=256, batch_size=8)
    place.task(text)
    return [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# line")]


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_run_fails_and_names_the_process_and_the_line(place: Workplace, name: str) -> None:
    old, new, said = MISTAKES[name]
    lines = _write(place, old, new)
    place.job(
        stop=ENDLESS, program='script = "train.py"\nargs = ["ddp", "sgd", "0.01"]',
        algorithm=DILOCO, optimizer="", more_workers="processes = 2",
        more="\n[timeouts]\nready_s = 10.0\n",
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=150.0)
    assert ended.code == 7, ended.err
    assert not place.daemon("worker-0").get("restarts")
    error = next(line for line in ended.err.splitlines() if line.startswith("error: "))
    assert said in error
    if lines:
        assert [int(line) for line in re.findall(r"train\.py:(\d+)\)", error)] == lines
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_process_that_dies_under_torchrun_ends_all(place: Workplace) -> None:
    dies = "        if RANK and run.steps > 4: os.kill(os.getpid(), signal.SIGKILL)\n"
    _write(place, IN_LOOP, dies)
    ended = torchrun(place, 2, "ddp", "sgd", "0.01")
    assert ended.code != 0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_several_processes_without_a_group_are_refused(place: Workplace) -> None:
    place.task(GROUP.format(samples=256, batch_size=8).replace(', group=KIND != "one"', ""))
    place.env["WORLD_SIZE"] = "2"
    ended = alone(place, "one", "sgd", "0")
    assert ended.code != 0
    assert "init_process_group" in ended.said
