"""A stream of three shards, real processes: a worker is killed, the run is stopped and goes on."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from workplace import SLOW_S, Workplace

SHARDS = {"a": 320, "b": 150, "c": 45}
TASK = f"""
import os
import threading

import torch
from torch import nn


class Stream:
    def shards(self):
        return ["a", "b", "c"]

    def open(self, shard, offset):
        for number in range(offset, {SHARDS}[shard]):
            yield torch.tensor([float(number % 7)]), "abc".index(shard), number


class Task:
    def model(self):
        return nn.Linear(1, 1)

    def dataset(self):
        return Stream()

    def loss(self, model, batch):
        threading.Event().wait({3 * SLOW_S})
        values, shard, number = batch
        with open(__file__ + ".seen", "a") as file:
            for s, n in zip(shard.tolist(), number.tolist()):
                file.write(f"{{os.getpid()}} {{'abc'[s]}} {{n}}\\n")
        return model(values).square().mean()


task = Task()
"""


@pytest.mark.long
def test_no_sample_of_a_stream_is_left_out_and_only_a_dead_worker_s_are_taken_again(
    place: Workplace,
) -> None:
    place.task(TASK)
    total = sum(SHARDS.values())
    place.job(stop=f"{{ samples = {total} }}", workers=2, more_workers="loader_processes = 1")
    place.start()
    place.until_step(6)
    killed = place.pid("worker-1")
    os.kill(killed, signal.SIGKILL)
    place.until_step(20)
    assert place.dlctl("stop").code == 0
    before = place.run()["samples"]
    assert 0 < before < total
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    run = place.run()
    assert (run["samples"], run["reason"]) == (total, f"{total} samples are done")

    seen: dict[bool, Counter[tuple[str, int]]] = {True: Counter(), False: Counter()}
    for line in (place.path / "train.py.seen").read_text().splitlines():
        pid, shard, number = line.split()
        seen[int(pid) == killed][shard, int(number)] += 1
    everything = {(shard, n) for shard, length in SHARDS.items() for n in range(length)}
    assert {*seen[True], *seen[False]} == everything
    assert max(seen[False].values()) == 1
    again = set(seen[True]) & set(seen[False])
    assert len(again) < total // 4, "what it had pushed is not computed again"
    assert not place.events("stream")
    place.nothing_left()
