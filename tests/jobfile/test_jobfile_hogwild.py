"""What a job file may not ask for where processes step in one model without locks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlctl import jobfile

JOB = 'job = { name = "a", task = "train.py:task" }\n'
HOGWILD = '[algorithm]\nname = "hogwild"\n'
REPLICA = "[replica]\nhogwild = 4\n"


def load(path: Path, text: str) -> None:
    (path / "train.py").touch()
    (path / "job.toml").write_text(JOB + text)
    jobfile.load(path / "job.toml")


@pytest.mark.parametrize(
    "text",
    [
        HOGWILD + "[workers]\ncount = 4",
        HOGWILD + "steps_at_once = 100\n[inner]\nname = 'sgd'\nweight_decay = 1e-4",
        HOGWILD + "[workers]\ncount = 2\n[[hosts]]\nworkers = 0\n[[hosts]]\nssh = 'b'",
        REPLICA,
        REPLICA + "[[hosts]]\nssh = 'a'\n[[hosts]]\nssh = 'b'\n[workers]\ncount = 2",
    ],
)
def test_it_is_for_one_host_and_its_replicas_for_several(tmp_path: Path, text: str) -> None:
    load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            HOGWILD + "[workers]\ncount = 2\n[[hosts]]\nssh = 'a'\n[[hosts]]\nssh = 'b'",
            r"share the memory of one host, not of 2.*\[replica\] hogwild",
        ),
        (HOGWILD + "[inner]\nname = 'sgd'\nmomentum = 0.9", "state of sgd would be local to each"),
        (HOGWILD + "[inner]\nname = 'adamw'", "the state of adamw would be local to each process"),
        (HOGWILD + "[inner]\nname = 'none'", 'use "sgd"'),
        (HOGWILD + "[workers]\ndevice = 'cuda'", 'use "cpu"'),
        (HOGWILD + "[servers]\ncount = 1", "hogwild has no servers"),
        (HOGWILD + REPLICA, "replicas of hogwild do not both step by themselves and push"),
        (REPLICA + "[algorithm]\nname = 'sync'", 'use "downpour"'),
        (REPLICA + "[algorithm]\nname = 'diloco'", 'use "downpour"'),
        (REPLICA + "[inner]\nname = 'adamw'", "the state of adamw"),
        (REPLICA + "[workers]\nloader_processes = 2", "each process loads its own data"),
        (REPLICA + "[gradient]\nprecision = 'fp16'", 'use "bf16"'),
    ],
)
def test_what_does_not_go_with_it_is_said_with_what_does(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(jobfile.JobFileError) as caught:
        load(tmp_path, text)

    assert re.search(says, str(caught.value), re.DOTALL)
