"""The examples of other packages' training loops, with two and four workers."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import ENDLESS, Workplace

ROOT = Path(__file__).parents[2]
METHODS = {
    "diloco": 'name = "diloco"\nlocal_steps = 16\n',
    "sync": 'name = "sync"\n\n[optimizer]\nname = "adam"\nlr = 0.005\n',
    "allreduce": 'name = "allreduce"\n',
}
"""The inner optimizer is the script's, there is none, or it steps along the mean."""
EPOCHS = 2
SEEN = """    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with open(__file__ + ".seen", "a") as file:
            file.write(f"{index}\\n")
"""


@pytest.fixture
def place() -> Iterator[Workplace]:
    workplace = Workplace()
    try:
        yield workplace
    finally:
        left = workplace.close()
    assert not left, f"left behind: {left}"


def prepare(place: Workplace, example: str, method: str, workers: int = 2) -> None:
    """Copy an example, which is to train with this method."""
    for path in (ROOT / "examples" / example).glob("*.*"):
        shutil.copy(path, place.path)
    job, script = place.path / "job.toml", place.path / "train.py"
    text = re.sub(r"epochs = \d+", f"epochs = {EPOCHS}", job.read_text())
    text = re.sub(r"\[algorithm\][^[]*", f"[algorithm]\n{METHODS[method]}\n", text)
    text = text.replace("[workers]\ncount = 2\n", f"[workers]\ncount = {workers}\n")
    assert f"[workers]\ncount = {workers}\n" in text
    if method == "allreduce":
        text = re.sub(r"\[servers\][^[]*", "", text)
    job.write_text(text)
    script.write_text(re.sub(r" *def __getitem__.*\n", lambda _: SEEN, script.read_text()))


@pytest.mark.parametrize("method", METHODS)
def test_transformers_fine_tunes_with_lora(place: Workplace, method: str) -> None:
    from safetensors import safe_open

    prepare(place, "transformers", method)
    ended = place.dlctl("run", "job.toml", timeout_s=240)
    assert ended.code == 0, ended.err + place.story()
    run = place.run()
    assert run["state"] == "finished"
    seen = Counter(map(int, (place.path / "train.py.seen").read_text().split()))
    assert {seen[index] for index in range(256, 2048)} == {EPOCHS}
    with safe_open(place.path / "adapter" / "adapter_model.safetensors", "numpy") as adapter:
        assert [name for name in [*adapter.keys()] if "lora_A" in name]
    place.nothing_left()


@pytest.mark.parametrize("method", METHODS)
def test_lightning_fits_a_module(place: Workplace, method: str) -> None:
    prepare(place, "lightning", method)
    ended = place.dlctl("run", "job.toml", timeout_s=240)
    assert ended.code == 0, ended.err + place.story()
    assert place.run()["state"] == "finished"
    assert (place.path / "spirals.ckpt").exists()
    place.nothing_left()


@pytest.mark.parametrize("example", ["transformers", "lightning"])
def test_a_killed_script_of_four_joins_again_and_a_stopped_one_saves(
    place: Workplace, example: str
) -> None:
    prepare(place, example, "diloco", workers=4)
    job, saved = place.path / "job.toml", {"transformers": "adapter", "lightning": "spirals.ckpt"}
    job.write_text(job.read_text().replace(f"stop = {{ epochs = {EPOCHS} }}", f"stop = {ENDLESS}"))
    command = place.begin("run", "job.toml")
    place.until("step 100", lambda: place.run().get("step", 0) >= 100, 120)
    os.kill(place.pid("worker-1"), signal.SIGKILL)

    def has_joined() -> bool:
        row = place.daemon("worker-1")
        return row["restarts"] == 1 and row["phase"] == "computing"

    place.until("worker-1 computes again", has_joined, 120)
    step = place.run()["step"]
    place.until("more steps", lambda: place.run()["step"] > step + 100, 60)
    assert place.dlctl("stop").code == 0
    assert command.end().code == 3
    assert place.run()["state"] == "stopped"
    assert (place.path / saved[example]).exists()
    assert sum(bool(place.daemon(f"worker-{slot}").get("restarts")) for slot in range(4)) == 1
    assert place.dlctl("verify").code == 0
    place.nothing_left()
