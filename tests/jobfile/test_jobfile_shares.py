"""Servers beside workers, and the servers' shares of the model, in the job file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlctl import jobfile
from dlctl.job import placement
from dlctl.job.config import JobFile
from dlctl.jobfile import summary

JOB = '[job]\nname = "a"\ntask = "train.py:task"\n[workers]\ncount = {workers}\n'
HOSTS = '[[hosts]]\nssh = "h1"\n[[hosts]]\nssh = "h2"\n[[hosts]]\nssh = "h3"\n'
BESIDE = '[servers]\nplacement = "workers"\n'


@pytest.fixture
def load(tmp_path: Path) -> Any:
    (tmp_path / "train.py").write_text("task = None\n")

    def load_text(text: str, workers: int = 3) -> JobFile:
        file = tmp_path / "job.toml"
        file.write_text(JOB.format(workers=workers) + text)
        return jobfile.load(file)

    return load_text


@pytest.fixture
def problem(load: Any) -> Any:
    def only_problem(text: str, workers: int = 3) -> jobfile.JobFileProblem:
        with pytest.raises(jobfile.JobFileError) as refused:
            load(text, workers)
        (found,) = refused.value.problems
        return found

    return only_problem


def test_on_this_machine_alone_each_worker_has_a_server(load: Any) -> None:
    job = load(BESIDE, 4)
    assert job.servers.count == 4
    assert "4 servers beside the workers" in summary.of(job)
    assert load(BESIDE + "count = 2\n", 4).servers.count == 2


def test_every_host_with_workers_has_a_server(load: Any) -> None:
    placed = placement.place(load(BESIDE + HOSTS, 6))
    assert [placed[f"server-{i}"] for i in range(3)] == ["agent-1", "agent-2", "agent-3"]
    assert len(placed) == 9
    # A host without workers serves nothing; a number of a host is kept.
    job = load(BESIDE + HOSTS + "workers = 0\n" + '[[hosts]]\nssh = "h4"\nservers = 2\n', 3)
    servers = [a for name, a in placement.place(job).items() if name.startswith("server")]
    assert Counter(servers) == {"agent-1": 1, "agent-2": 1, "agent-4": 2}
    assert job.servers.count == 4


def test_fewer_workers_than_hosts_leave_hosts_without_a_server(load: Any) -> None:
    assert load(BESIDE + HOSTS, 2).servers.count == 2


def test_a_stated_number_is_spread_over_the_hosts_with_workers(load: Any) -> None:
    job = load(BESIDE + "count = 4\n" + HOSTS + "workers = 0\n", 2)
    servers = [a for name, a in placement.place(job).items() if name.startswith("server")]
    assert servers == ["agent-1", "agent-1", "agent-2", "agent-2"]


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        (BESIDE + "count = 2\n" + HOSTS, ("servers", "count"), 8),
        (BESIDE + HOSTS + "workers = 0\nservers = 1\n", ("hosts", 2, "servers"), 15),
        (BESIDE + HOSTS + "servers = 0\n", ("hosts", 2, "servers"), 14),
        (BESIDE + 'algorithm.name = "gossip"\n', ("servers", "placement"), 7),
        ("[servers]\ncount = 3\nweights = [1, 2]\n", ("servers", "weights"), 8),
        ("[servers]\ncount = 2\nweights = [1, -2]\n", ("servers", "weights", 1), 8),
        ("[servers]\ncount = 2\nweights = [1, nan]\n", ("servers", "weights", 1), 8),
        ("[servers]\ncount = 2\nweights = 3\n", ("servers", "weights"), 8),
    ],
)  # fmt: skip
def test_what_does_not_go_is_named_with_its_line(
    problem: Any, text: str, key: tuple[Any, ...], line: int
) -> None:
    if "gossip" in text:
        text = text.replace('algorithm.name = "gossip"\n', '[algorithm]\nname = "gossip"\n')
    found = problem(text)
    assert found.line == line
    assert str(key[-1]) in str(found) or "weights" in str(found)


def test_the_servers_of_one_machine_are_not_too_many(problem: Any) -> None:
    assert "256" in str(problem(BESIDE, 300))


def test_weights_are_numbers_in_the_job_and_in_its_summary(load: Any) -> None:
    job = load("[servers]\ncount = 3\nweights = [2, 1, 1.5]\n")
    assert job.servers.weights == (2, 1, 1.5)
    assert "2 : 1 : 1.5" in summary.of(job)


def test_weights_and_shares_by_bandwidth_exclude_each_other(problem: Any) -> None:
    hosts = HOSTS.replace('"\n', '"\nbandwidth = "100Mbit/s"\n')
    found = problem('[servers]\ncount = 3\nlayout = "bandwidth"\nweights = [2, 1, 1]\n' + hosts)
    assert found.key == "servers.weights"
    assert "remove one" in found.suggestion
