"""Which worker has how large a batch."""

from __future__ import annotations

from dlctl.job import batches, schedule
from dlctl.job.config import Gradients, Host, Job, JobFile, Schedule, Stop, Workers
from dlctl.util.names import HOME_AGENT


def job(*hosts: Host, workers: int = 4, steps: int = 100, accumulate: int = 1) -> JobFile:
    return JobFile(
        job=Job(name="batched", task="none", stop=Stop(steps=steps)),
        schedule=Schedule(kind="linear"),
        workers=Workers(count=workers, batch_size=32),
        gradient=Gradients(accumulate=accumulate),
        hosts=hosts,
    )


def test_without_a_word_of_a_host_all_are_alike():
    for each in (job(accumulate=2), job(Host(), Host(ssh="a"), accumulate=2)):
        assert batches.size(each, HOME_AGENT) == 32
        assert batches.largest(each) == batches.smallest(each) == batches.mean(each) == 64


def test_a_host_has_its_own_size_and_the_mean_is_that_of_the_workers():
    mixed = job(Host(ssh="a", workers=1, batch_size=96), Host(ssh="b"), accumulate=2)
    assert batches.size(mixed, "agent-1") == 96
    assert batches.size(mixed, "agent-2") == 32
    assert (batches.largest(mixed), batches.smallest(mixed)) == (192, 64)
    assert batches.mean(mixed) == 2 * (96 + 3 * 32) / 4
    only = job(Host(ssh="a", batch_size=96))
    assert batches.largest(only) == batches.smallest(only) == 96, "nobody has that of all"


def test_a_schedule_takes_steps_for_those_of_the_mean():
    mixed = job(Host(ssh="a", workers=1, batch_size=96), Host(ssh="b"))
    assert schedule.whole_run(mixed, 0) == 100 * 48
