"""`[servers] layout`: the weights by which a job's model is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlctl.job import shard_weights
from dlctl.job.config import Host, Job, JobFile, Servers, Workers
from dlctl.optim import bounds
from dlctl.sim.objectives import layout_of

SIZE = 22_000


def job_of(layout: str, hosts: tuple[Host, ...], servers: int, workers: int) -> JobFile:
    return JobFile(
        job=Job(name="a", task="none"), servers=Servers(count=servers, layout=layout),
        workers=Workers(count=workers), hosts=hosts,
    )  # fmt: skip


def serving(rates: tuple[int, ...], *, workers: int = 0) -> tuple[Host, ...]:
    return tuple(
        Host(ssh=f"h{n}", servers=1, workers=workers, bandwidth=f"{rate}MB/s")
        for n, rate in enumerate(rates)
    )


CLIENTS = tuple(Host(ssh=f"w{n}", servers=0, workers=1, bandwidth="100MB/s") for n in range(4))


def test_shards_are_alike_unless_the_job_says_otherwise() -> None:
    job = job_of("equal", (*serving((10, 1)), *CLIENTS), 2, 4)
    assert bounds.of_job(job, layout_of(SIZE)) == (0, SIZE // 2, SIZE)


def test_hosts_that_only_serve_have_parts_like_their_bandwidths() -> None:
    job = job_of("bandwidth", (*serving((10, 10, 1, 1)), *CLIENTS), 4, 4)
    assert bounds.of_job(job, layout_of(SIZE)) == (0, 10_000, 20_000, 21_000, 22_000)


def test_the_servers_of_one_host_share_its_part() -> None:
    hosts = (replace(serving((10,))[0], servers=2), Host(ssh="b", servers=1, workers=0))
    hosts = (hosts[0], replace(hosts[1], bandwidth="12MB/s"), *CLIENTS)
    weights = shard_weights.of_job(job_of("bandwidth", hosts, 3, 4), SIZE)
    assert weights == pytest.approx([5 / 22, 5 / 22, 12 / 22])


def test_a_slow_host_of_a_worker_may_have_nothing() -> None:
    job = job_of("shared-bandwidth", serving((10, 10, 1, 1), workers=1), 4, 4)
    assert bounds.of_job(job, layout_of(SIZE)) == (0, 11_000, 22_000, 22_000, 22_000)


def test_parts_that_are_not_worth_a_message_go_to_the_others() -> None:
    job = job_of("bandwidth", (*serving((1000, 1)), *CLIENTS), 2, 4)
    assert bounds.of_job(job, layout_of(SIZE)) == (0, SIZE, SIZE)
