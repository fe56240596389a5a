"""The clock of a peer of the benchmarks starts where dlctl's does: all have the data by then."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import work
from benchmarks.peers.places import ROOT, free_port
from benchmarks.peers.settings import Settings
from benchmarks.peers.table import diloco
from benchmarks.train import settings_for

WITH_A_NOTE = """
import importlib, sys, time
from pathlib import Path
from benchmarks.peers import work
from benchmarks.peers.settings import from_command_line

program, folder = sys.argv.pop(), Path(sys.argv.pop())
load, cut = work._digits, work._shuffled

def noted(what, function):
    def call(*arguments):
        found = function(*arguments)
        (folder / f"{what}-{settings.rank}").write_text(str(time.time()))
        return found
    return call

work._digits, work._shuffled = noted("loaded", load), noted("cut", cut)
settings = from_command_line()
importlib.import_module(f"benchmarks.peers.{program}").main(settings)
"""
"""A peer that writes down when each of its processes has loaded its data and cut out its part."""


@pytest.mark.long
def test_the_data_is_there_when_batches_returns_not_when_the_first_one_is_asked_for() -> None:
    work.data_of.cache_clear()
    found = work.batches("digits", 1, 2, 32, seed=0)
    assert work.data_of.cache_info().currsize == 1
    inputs, labels = next(found)
    assert (inputs.shape, labels.shape) == ((32, 64), (32,))


@pytest.mark.long
@pytest.mark.timeout(200)  # Real processes on a machine that may have other things to do.
def test_the_clock_starts_when_every_process_has_loaded_its_data(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        settings_for(tmp_path, quick=True), lr=0.1, port=free_port(), options=diloco(4).options
    )
    ranks = [_start("local_sgd", settings, rank, tmp_path) for rank in range(settings.workers)]
    try:
        assert ranks[0].wait(150) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    began = float(np.load(settings.snapshots)["began"])
    notes = {note.name: float(note.read_text()) for note in tmp_path.glob("*-?")}
    assert {f"{what}-{rank}" for rank in range(settings.workers) for what in ("loaded", "cut")} <= {
        *notes
    }
    assert max(notes.values()) <= began


def _start(program: str, settings: Settings, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    told = dataclasses.replace(settings, rank=rank).to_json()
    return subprocess.Popen(
        [sys.executable, "-c", WITH_A_NOTE, told, str(folder), program], cwd=ROOT
    )
