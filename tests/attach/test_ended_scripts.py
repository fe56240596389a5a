"""Scripts that end, fork or stand still in the middle of a run: who is to blame is said by line."""

from __future__ import annotations

import re

import pytest
from loops import LOOP, script, write_loop
from workplace import ENDLESS, Workplace

STEP = "            run.step(loss=loss)\n"
AFTER_FIVE = "            if run.steps == 5:\n                "
MODEL = "    model = task.model()\n"
DILOCO = 'name = "diloco"\nlocal_steps = 4'
FORKS = f"""{STEP}            if run.steps == 5:
                import os
                child = os.fork()
                if not child:
                    run.step(loss=loss)  # here
                print("the child ended with", os.waitpid(child, 0)[1] >> 8)
"""
ENDS = {
    "exits": (STEP, f"{STEP}{AFTER_FIVE}sys.exit(0)  # here\n"),
    "raises": (STEP, f'{STEP}{AFTER_FIVE}raise ValueError("no")  # here\n'),
    "steps twice": (STEP, f"{STEP}            run.step(loss=loss)  # here\n"),
    "attaches twice": (
        "    with run:\n", "    dlctl.attach(model, optimizer)  # here\n    with run:\n"
    ),
    "never trains": ("    with run:\n        for", "    if not run:\n        for"),
    "builds another model": (
        MODEL,
        "    import os\n"
        '    more = int(os.environ["DLCTL_NAME"][-1])\n'
        "    model = nn.Sequential(nn.Linear(2, 8 + more), nn.Tanh(), nn.Linear(8 + more, 2))\n",
    ),
}  # fmt: skip
"""What is wrong -> (what is replaced in the loop, by what)."""


def _write(place: Workplace, old: str, new: str, **options: float) -> None:
    assert LOOP.count(old) == 1
    write_loop(place, LOOP.replace(old, new), **options)  # type: ignore[arg-type]


def _lines(place: Workplace) -> list[int]:
    text = (place.path / "train.py").read_text()
    return [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]


@pytest.mark.timeout(200)
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ENDS)
def test_a_script_that_ends_before_the_run_fails_it(place: Workplace, name: str) -> None:
    _write(place, *ENDS[name])
    place.job(
        stop=ENDLESS, program=script(), algorithm=DILOCO, optimizer="",
        workers=2 if name == "builds another model" else 1,
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml", timeout_s=150.0)
    assert ended.code == 7, ended.err
    assert not place.daemon("worker-0").get("restarts")
    (error,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    assert [int(line) for line in re.findall(r"train\.py:(\d+)\)", error)] == _lines(place)
    if name == "builds another model":
        assert '"0.weight" is float32[' in error
    place.nothing_left()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_script_that_forks_goes_on_and_its_child_may_not(place: Workplace) -> None:
    _write(place, STEP, FORKS)
    place.job(stop="{ epochs = 1 }", program=script(), algorithm=DILOCO, optimizer="")
    ended = place.dlctl("run", "job.toml", timeout_s=100.0)
    assert ended.code == 0, ended.err
    assert place.run()["samples"] == 256
    said = place.dlctl("logs", "worker-0").out
    assert "the child ended with 1" in said
    assert f'train.py", line {_lines(place)[0]}, in main' in said
    place.nothing_left()


@pytest.mark.long
def test_a_script_that_leaves_in_the_middle_of_a_portion_is_started_again(
    place: Workplace,
) -> None:
    leaves = (
        "            if run.steps == 5 and not run.is_restart:\n                break  # here\n"
    )
    _write(place, STEP, STEP + leaves)
    place.job(stop="{ epochs = 2 }", program=script(), algorithm=DILOCO, optimizer="")
    ended = place.dlctl("run", "job.toml", timeout_s=200.0)
    assert ended.code == 0, ended.err
    assert place.daemon("worker-0")["incarnation"] == 2
    assert place.run()["samples"] == 2 * 256
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_why_names_the_line_where_a_silent_script_stands(place: Workplace) -> None:
    _write(place, STEP, f"{STEP}{AFTER_FIVE}threading.Event().wait()  # here\n")
    place.job(stop=ENDLESS, program=script(), algorithm=DILOCO, optimizer="")
    place.start()
    where = f"train.py:{_lines(place)[0]}"
    place.until("why names the line", lambda: where in place.dlctl("why").out, timeout_s=120.0)
    assert place.dlctl("stop", "--kill").code == 0
    place.nothing_left()
