"""Applying a delta to a shard of 25,000,000 float32, against a memcpy of the vector. One thread.

    python -m benchmarks.apply [--quick]    prints the figures as JSON, measured on one core

A server splits large deltas over threads, one per core; a process with one core uses one. A memcpy
reads and writes one vector; Adagrad reads three and writes two, and computes a root and a quotient
of every element. Durability is "none", so that only the rule is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import numpy as np

from benchmarks.figures import Figure, ratio, take_turns
from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.shards.base import Shard, Spec
from dlctl.shards.memory import InMemory

CHAPTER = "apply"
ELEMENTS = 25_000_000
DENSITY = 0.01
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam")
ASKED = {("adagrad", "dense"): 5.0, ("adagrad", "sparse"): 1.5}


def measure(*, quick: bool) -> list[Figure]:
    command = [sys.executable, "-m", "benchmarks.apply", *(["--quick"] if quick else [])]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Figure(**found | {"values": tuple(found["values"])}) for found in json.loads(printed)]


def _measure(*, quick: bool) -> list[Figure]:
    size, rounds = (250_000, 1) if quick else (ELEMENTS, 5)
    random = np.random.default_rng(0)
    gradient = random.standard_normal(size, dtype=np.float32)
    where = np.sort(random.choice(size, max(1, int(DENSITY * size)), replace=False))
    deltas = {"dense": Delta(gradient), "sparse": Delta(gradient[where], where)}
    copy = np.empty_like(gradient)
    figures = []
    for optimizer in OPTIMIZERS:
        kind = registry.load("optimizers", optimizer)
        spec = Spec("bench", 0, 0, size, kind(kind.Options()).slots, workers=1)
        shard = Shard(kind(kind.Options()), InMemory().create(spec))
        for name, delta in deltas.items():
            ours, bare = take_turns(
                rounds, partial(shard.apply, delta), partial(np.copyto, copy, gradient)
            )
            what = f"{name}{'' if name == 'dense' else f' {DENSITY:.0%}'}, {optimizer}"
            asked = ASKED.get((optimizer, name))
            figures.append(ratio(CHAPTER, f"{what}, {size:,} / memcpy", ours, bare, asked))
    return figures


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps([asdict(figure) for figure in _measure(quick="--quick" in sys.argv)]))
