"""In one run of two workers: an order of the task's own, samples that nobody can load, and a batch
size that a worker finds."""

from __future__ import annotations

import re

import pytest
from workplace import Workplace

SAMPLES = 64
"""Of each epoch: the next ones of the dataset."""
TORN = ({3, 17, 40}, {64, 80, 90, 95, 96, 100, 112, 127})
"""In the first epoch; and in the second one, of which each portion has one too many."""
TRIED = 16
"""Samples, from the first one on: with that, each worker has a portion of 2 batches in an epoch."""
SAMPLER = f"""class Clouds:
    def sampler(self, dataset, epoch):
        return range({SAMPLES} * epoch, {SAMPLES} * (epoch + 1))
"""
TEAR = f"""    def __getitem__(self, index):
        if index in {TORN[0] | TORN[1]}:
            raise OSError("it is torn")
"""


@pytest.mark.long
def test_a_run_goes_on_without_bad_samples_until_they_are_too_many(place: Workplace) -> None:
    place.job(stop="{ epochs = 3 }", workers=2)
    seen = place.count_samples()
    job, train = place.path / "job.toml", place.path / "train.py"
    text = job.read_text().replace("[data]", "[data]\nbad_samples_max = 3")
    job.write_text(text.replace("batch_size = 8", 'batch_size = "auto"'))
    text = train.read_text().replace("class Clouds:\n", SAMPLER)
    train.write_text(text.replace("    def __getitem__(self, index):\n", TEAR))
    assert re.search(r"worker-1 .* auto\n", place.dlctl("plan", "job.toml").out)
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7, ended.err
    torn = int(next(n for n, line in enumerate(train.read_text().split("\n"), 1) if "torn" in line))
    says = rf"task\.dataset\(\)\[\d+\] raised OSError: it is torn \({train}:{torn}\)"
    count = "4 samples of epoch 1 could not be loaded, and data.bad_samples_max is 3"
    assert re.search(f"error: .*worker-[01]: {says}; {re.escape(count)}", ended.err), ended.err
    named = [re.match(r"sample (\d+) could not be loaded \((\d) of at most 3 in epoch (\d)\)", text)
             for text in place.events("sample")]  # fmt: skip
    found = [tuple(map(int, each.groups())) for each in named if each is not None]
    assert {sample for sample, _, epoch in found if epoch == 0} == TORN[0]
    assert {sample for sample, _, epoch in found if epoch == 1} <= TORN[1]
    assert {n for _, n, epoch in found if epoch == 0} == {1, 2, 3}
    assert place.run()["batch_size"] == TRIED
    assert f"batch size {TRIED}" in place.dlctl("status").out
    sound = set(range(TRIED, SAMPLES)) - TORN[0]
    assert sound <= seen().keys(), "twice, if the worker that is taken out had not pushed them"
    assert not TORN[0] & seen().keys()
    assert place.run()["samples"] <= sum(seen().values()), "those that are torn do not count"
    place.nothing_left()
