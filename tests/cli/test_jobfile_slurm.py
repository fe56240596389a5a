"""The section [slurm] of a job file: what it means, and what is refused, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import config, jobfile
from dlctl.placement import agents, place

JOB = """[job]
name = "spread"
task = "train.py:task"

[servers]
count = 2
[workers]
count = 4
"""
FIRST_LINE = 1 + JOB.count("\n")


@pytest.fixture
def load(tmp_path: Path):
    (tmp_path / "train.py").write_text("task = None\n")

    def load_text(text: str) -> config.JobFile:
        file = tmp_path / "job.toml"
        file.write_text(JOB + text)
        return jobfile.load(file)

    return load_text


def test_a_job_on_three_nodes_has_an_agent_on_each_and_one_here(load):
    job = load('[slurm]\nnodes = 3\npartition = "dl"\ntime = "2h"\nextra = ["--exclusive"]\n')
    assert job.has_other_hosts
    assert job.is_encrypted
    assert {name: host.launcher for name, host in agents(job.places).items()} == {
        "agent-0": "local", "agent-1": "slurm", "agent-2": "slurm", "agent-3": "slurm",
    }  # fmt: skip
    assert set(place(job).values()) == {"agent-1", "agent-2", "agent-3"}
    assert config.from_dict(config.JobFile, config.to_dict(job)) == job


def test_without_the_section_nothing_changes(load):
    assert load("").slurm.nodes == 0
    assert load("").places == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nodes = 0", "must be >= 1"),
        ('nodes = "3"', "must be a whole number"),
        ("node = 3", "unknown key"),
        ('nodes = 2\ntime = "2"', "needs a number and a unit"),
        ('nodes = 2\ntime = "0s"', "must be above zero"),
        ('nodes = 2\ntime = "2m"', "must be more than notice_s (120 s)"),
        ('nodes = 2\npartition = "a b"', "must be the name of a partition"),
        ('nodes = 2\npartition = "a\\n#SBATCH --uid=0"', "must be the name of a partition"),
        ('nodes = 2\nmemory = "16 GB"', "must be a number with K, M, G or T"),
        ('nodes = 2\ndir = "here"', "must be a full path"),
        ('nodes = 2\nscratch = "/a\\nb"', "must be a full path on the nodes"),
        ('nodes = 2\nextra = ["-x"]', "must be a long option of sbatch"),
        ('nodes = 2\nextra = ["--a=\\nb"]', "must be a long option of sbatch"),
        ('nodes = 2\nextra = ["--nodes=7"]', "--nodes is dlctl's own"),
        ("nodes = 2\nnotice_s = -1", "must be >= 0"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(load, line: str, said: str):
    with pytest.raises(jobfile.JobFileError) as refused:
        load(f"[slurm]\n{line}\n")
    problem = next(p for p in refused.value.problems if said in p.message)
    assert problem.line == FIRST_LINE + 1 + line.count("\n")


def test_nodes_must_be_given_and_hosts_must_not(load):
    with pytest.raises(jobfile.JobFileError, match='"nodes" is missing'):
        load('[slurm]\npartition = "dl"\n')
    with pytest.raises(jobfile.JobFileError, match=r"\[\[hosts\]\] and \[slurm\] exclude"):
        load('[slurm]\nnodes = 2\n[[hosts]]\nssh = "h1"\n')
    with pytest.raises(jobfile.JobFileError, match="without encryption only this machine"):
        load('[slurm]\nnodes = 2\n[network]\nencryption = "none"\n')


def test_quotes_around_a_whole_value_are_doubted(load):
    text = "[slurm]\nnodes = 2\nextra = ['--comment=\"two words\"']\n"
    (doubt,) = jobfile.doubts(load(text))
    assert 'the quotes in --comment="two words" become part of its value' in doubt
    assert jobfile.doubts(load(text.replace('"', ""))) == []
