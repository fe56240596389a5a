"""Workers that list the files of a stream as their file systems do: each in an order of its own,
below a directory of its own. A file is added while the run is stopped.
"""

from __future__ import annotations

from collections import Counter

import pytest
from workplace import SLOW_S, Workplace

FILES = {"b": 160, "c": 45, "d": 210, "f": 70, "h": 115}
NEW = {"a": 20, "e": 50}
TASK = f"""
import os
import random
import threading
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Parts:
    def shards(self):
        root = HERE / f"mounted-{{os.getpid()}}"
        root.is_symlink() or root.symlink_to(HERE / "files")
        names = sorted(os.listdir(root))
        random.Random(os.getpid()).shuffle(names)
        return [root / name for name in names]

    def open(self, shard, offset):
        for line in shard.read_text().splitlines()[offset:]:
            yield torch.tensor([float(line)]), shard.name


class Task:
    def model(self):
        return nn.Linear(1, 1)

    def dataset(self):
        return Parts()

    def loss(self, model, batch):
        threading.Event().wait({2 * SLOW_S})
        values, names = batch
        with open(HERE / "seen", "a") as file:
            file.writelines(f"{{name}} {{int(n)}}\\n" for name, n in zip(names, values.flatten()))
        return model(values / 100).square().mean()


task = Task()
"""


def write(place: Workplace, files: dict[str, int]) -> None:
    folder = place.path / "files"
    folder.mkdir(exist_ok=True)
    for name, length in files.items():
        (folder / name).write_text("".join(f"{n}\n" for n in range(length)))


@pytest.mark.long
def test_each_sample_is_read_once_whatever_the_order_and_the_directory(place: Workplace) -> None:
    write(place, FILES)
    place.task(TASK)
    everything = [(name, n) for name, length in (FILES | NEW).items() for n in range(length)]
    place.job(stop=f"{{ samples = {len(everything)} }}", workers=2)
    place.start()
    place.until_step(6)
    assert place.dlctl("stop").code == 0
    assert 0 < place.run()["samples"] < sum(FILES.values())
    write(place, NEW)
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    seen = Counter[tuple[str, int]]()
    for line in (place.path / "seen").read_text().splitlines():
        name, number = line.split()
        seen[name, int(number)] += 1
    assert seen == Counter(everything)
    assert place.events("data") == ["2 shards of the stream are new since the checkpoint"]
    place.nothing_left()
