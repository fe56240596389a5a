"""`[replica]` in job files: what goes together, and what is said of what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.jobfile import JobFileError

JOB = '[job]\nname = "cut"\ntask = "train.py:task"\n'


def read(folder: Path, text: str):
    (folder / "train.py").write_text("")
    (folder / "job.toml").write_text(JOB + text)
    return jobfile.load(folder / "job.toml")


@pytest.mark.parametrize(
    ("text", "ranks", "pieces"),
    [
        ("", 1, 1),
        ("[replica]\nfsdp = 4", 4, 4),
        ("[replica]\ntensor = 2", 2, 1),
        ("[replica]\npipeline = 3", 3, 6),
        ("[replica]\npipeline = 3\nmicrobatches = 4", 3, 4),
        ('[inner]\nname = "muon"\n[replica]\npipeline = 2', 2, 4),
        ("[workers]\nbatch_size = 1\n[replica]\npipeline = 2", 2, 4),
    ],
)
def test_a_replica_has_so_many_processes(
    tmp_path: Path, text: str, ranks: int, pieces: int
) -> None:
    job = read(tmp_path, text)
    assert (job.ranks, job.replica.ranks, job.replica.pieces) == (ranks, ranks, pieces)


FSDP = "[replica]\nfsdp = 2\n"
PIPELINE = "[replica]\npipeline = 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[replica]\nfsdp = 2\ntensor = 2", "is cut in one way, not by fsdp and tensor"),
        (f'[algorithm]\nname = "gossip"\n[workers]\ncount = 2\n{FSDP}', "gossip has no servers"),
        (f'[algorithm]\nname = "kfac"\n{FSDP}', "kfac has no servers"),
        (f'[algorithm]\nname = "rows"\n{FSDP}', "rows brings the rows of a batch to one process"),
        (
            '[compression]\nname = "topk"\n[replica]\nfsdp = 11\n[workers]\nbatch_size = 16',
            "a push is made up of what 8 processes have taken, or fewer",
        ),
        ("[replica]\nhogwild = 2\nfsdp = 2", "is cut in one way, not by fsdp and hogwild"),
        (f'[workers]\nbatch_size = "auto"\n{FSDP}', "fsdp needs a number"),
        (f"[workers]\nbatch_size = 1\n{FSDP}", "is cut into 2, and has 1 samples"),
        (f"[gradient]\ncompile = true\n{PIPELINE}", "torch.compile does not go with pipeline"),
        (f'[gradient]\nprecision = "fp16"\n{PIPELINE}', "fp16 does not go with pipeline"),
        (f'[inner]\nname = "muon"\n{FSDP}', "muon may need whole parameters"),
        (f"{FSDP}microbatches = 2", "there are no stages"),
        (f"{PIPELINE}microbatches = 64", "is cut into 64, and has 32 samples"),
    ],
)
def test_what_cannot_work_is_one_fault(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        read(tmp_path, text)
    (problem,) = caught.value.problems
    assert message in problem.message
