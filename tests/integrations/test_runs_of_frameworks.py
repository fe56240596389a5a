"""The examples of other packages' training loops, with two workers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import Workplace

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


def prepare(place: Workplace, example: str, method: str) -> Path:
    """Copy an example, which is to train with this method; returns the path of its script."""
    for path in (ROOT / "examples" / example).glob("*.*"):
        shutil.copy(path, place.path)
    job, script = place.path / "job.toml", place.path / "train.py"
    head, rest = job.read_text().split("[algorithm]")
    _, _, rest = rest.partition("[servers]")
    head = head[: head.index("stop =")] + f"stop = {{ epochs = {EPOCHS} }}\n\n"
    servers, _, _ = rest.partition("[evaluation]")
    if method == "allreduce":
        _, _, servers = servers.partition("[workers]")
        servers = f"[workers]{servers}"
    else:
        servers = f"[servers]{servers}"
    evaluation = "[evaluation]\nevery_epochs = 1\n"
    job.write_text(f"{head}[algorithm]\n{METHODS[method]}\n{servers}\n{evaluation}")
    first = next(
        line for line in script.read_text().splitlines() if "__getitem__" in line
    ) if "__getitem__" in script.read_text() else ""  # fmt: skip
    script.write_text(script.read_text().replace(f"{first}\n", SEEN) if first else script.read_text())
    return script


@pytest.mark.parametrize("method", METHODS)
def test_transformers_fine_tunes_with_lora(place: Workplace, method: str) -> None:
    from safetensors import safe_open

    script = prepare(place, "transformers", method)
    ended = place.dlctl("run", "job.toml", timeout_s=240)
    assert ended.code == 0, ended.err + place.story()
    run = place.run()
    assert run["state"] == "finished"
    seen = Counter(map(int, Path(f"{script}.seen").read_text().split()))
    assert {seen[index] for index in range(256, 2048)} == {EPOCHS}
    with safe_open(place.path / "adapter" / "adapter_model.safetensors", "numpy") as adapter:
        assert any("lora_A" in name for name in adapter.keys())
    place.nothing_left()


@pytest.mark.parametrize("method", METHODS)
def test_lightning_fits_a_module(place: Workplace, method: str) -> None:
    prepare(place, "lightning", method)
    ended = place.dlctl("run", "job.toml", timeout_s=240)
    assert ended.code == 0, ended.err + place.story()
    assert place.run()["state"] == "finished"
    assert (place.path / "spirals.ckpt").exists()
    place.nothing_left()
