"""A torchrun command is taken apart, and its environment is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from daemons.guest.torchrun import MODULE, taken_apart
from daemons.script import rank_environment
from dlctl.errors import UsageError


@pytest.mark.parametrize(
    ("words", "processes", "program"),
    [
        ("train.py --lr 1", 1, "train.py --lr 1"),
        ("-m pkg.train", 1, "-m pkg.train"),
        (f"-m {MODULE} --standalone --nproc-per-node 3 train.py --lr 1", 3, "train.py --lr 1"),
        (f"-m {MODULE} --nproc_per_node=2 -m pkg.train -v", 2, "-m pkg.train -v"),
    ],
)
def test_the_processes_and_the_program_of_a_command(
    words: str, processes: int, program: str
) -> None:
    assert taken_apart(words.split()) == (processes, program.split())


@pytest.mark.parametrize("option", ["--nnodes=2", "--no-python", "--nnodes=1:4"])
def test_what_a_worker_cannot_be_is_refused(option: str) -> None:
    with pytest.raises(UsageError):
        taken_apart(["-m", MODULE, option, "train.py"])


def test_a_rank_has_the_variables_that_torchrun_gives() -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    command = [sys.executable, "-m", MODULE, "--standalone", "--no-python", sys.executable]
    said = subprocess.run([*command, "-c", show], capture_output=True, text=True, timeout=60).stdout
    torchruns = {*json.loads(said)} - {*os.environ}
    assert "MASTER_PORT" in torchruns
    mine: dict[str, str] = {}
    rank_environment.begin(mine, 2, 1234, "run")
    rank_environment.be(mine, 1)
    assert (mine["RANK"], mine["WORLD_SIZE"], mine["MASTER_PORT"]) == ("1", "2", "1234")
    groups = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert {name for name in torchruns if name.endswith(groups)} <= {*mine}
    rank_environment.leave(mine)
    assert not mine
