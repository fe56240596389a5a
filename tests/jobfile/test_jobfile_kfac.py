"""K-FAC in job files: its own conflicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.jobfile import JobFileError

JOB = '[job]\nname = "factors"\ntask = "train.py:task"\n[algorithm]\nname = "kfac"\n'


def read(folder: Path, text: str):
    (folder / "train.py").write_text("")
    (folder / "job.toml").write_text(JOB + text)
    return jobfile.load(folder / "job.toml")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("factor_steps = 7", "algorithm.eigen_steps"),
        ("factor_steps = 0", "algorithm.factor_steps"),
        ("damping = 0.0", "algorithm.damping"),
        ("factor_decay = 1.0", "algorithm.factor_decay"),
        ('placement = "all"', "algorithm.placement"),
        ("[gradient]\ncompile = true", "gradient.compile"),
        ('[inner]\nname = "none"', "inner.name"),
        ("[workers]\nprocesses = 2", "workers.processes"),
        ("[replica]\nfsdp = 2", "replica.fsdp"),
        ("[replica]\nhogwild = 2", "replica.hogwild"),
        ("[servers]\ncount = 1", "servers.count"),
        ('[compression]\nname = "topk"', "compression.name"),
    ],
)
def test_what_does_not_go_with_it_names_the_key(tmp_path: Path, text: str, path: str) -> None:
    with pytest.raises(JobFileError) as caught:
        read(tmp_path, text)
    assert path in {problem.key for problem in caught.value.problems}


def test_half_precision_and_batches_of_a_step_go_with_it(tmp_path: Path) -> None:
    job = read(tmp_path, '[gradient]\nprecision = "fp16"\naccumulate = 4\nclip = "global"\n')
    assert (job.inner.name, job.inner.options["momentum"]) == ("sgd", 0.9)
