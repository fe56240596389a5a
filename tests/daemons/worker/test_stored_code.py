"""A worker that replaces another one has the task's code of the start, whoever edits it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from daemons.worker.task.stored_code import _is_of_task
from dlctl.runs import task_code

TASK = """
    from helpers.sizes import SIZE

    def model(): ...
    def dataset(): ...
    def loss(model, batch):
        raise ValueError(VERSION)  # line of version 1

    VERSION = 1
    """
WORKER = """
    import sys
    from pathlib import Path
    from daemons.worker.task.user_task import TaskError, load_task

    task = load_task("train.py", Path("project"), Path("run"))
    import late
    print(task._user.VERSION, task._user.SIZE, late.WHEN, Path(task._user.__file__).parent.name)
    try:
        task.loss(None, None)
    except TaskError as error:
        print(error.detail)
    """


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / "helpers").mkdir(parents=True)
    (made / "train.py").write_text(dedent(TASK))
    (made / "helpers" / "sizes.py").write_text("SIZE = 1")
    (made / "late.py").write_text("WHEN = 1")
    (tmp_path / "run").mkdir()
    return made


def worker(project: Path) -> str:
    """What a new worker process says, which has what the one before may have left of bytecode."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(WORKER)],
        cwd=project.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_code_of_the_start_is_used_until_it_is_forgotten(project: Path) -> None:
    run = project.parent / "run"
    assert worker(project).startswith("1 1 1 project\n")
    assert task_code.changed(run) == []
    for path in (project / "train.py", project / "helpers" / "sizes.py", project / "late.py"):
        path.write_text("\n" * 20 + path.read_text().replace("= 1", "= 2").replace("n 1", "n 2"))
    output = worker(project)
    assert output.startswith("1 1 1 project\n")
    assert "# line of version 1" in output, "tracebacks show what has run"
    assert len(task_code.changed(run)) == 3
    for name in ("train", "late", "helpers/sizes"):
        (project / f"{name}.py").rename(project / f"{name}.old")
    assert worker(project).startswith("1 1 1 project\n"), "another branch is checked out"
    for name in ("train", "late", "helpers/sizes"):
        (project / f"{name}.old").rename(project / f"{name}.py")
    task_code.forget(run)
    assert worker(project).startswith("2 2 2 project\n")
    assert task_code.changed(run) == []


def test_of_two_workers_that_read_a_file_at_once_both_have_the_same(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    assert task_code.as_it_was(tmp_path, path, b"first") == b"first"
    assert task_code.as_it_was(tmp_path, path, b"second") == b"first"
    assert task_code.as_it_was(tmp_path, path, None) == b"first"
    assert task_code.as_it_was(tmp_path, tmp_path / "none.py", None) is None


def test_without_room_for_it_the_code_is_what_it_is(tmp_path: Path) -> None:
    (tmp_path / task_code.CODE).touch()  # No directory can be made here.
    assert task_code.as_it_was(tmp_path, tmp_path / "train.py", b"now") == b"now"


def test_what_is_installed_below_the_task_is_not_the_task_s(tmp_path: Path) -> None:
    assert _is_of_task(str(tmp_path), tmp_path)
    assert _is_of_task(str(tmp_path / "helpers"), tmp_path)
    assert not _is_of_task(str(tmp_path / ".venv/lib/python3/site-packages/x"), tmp_path)
    assert not _is_of_task(str(tmp_path.parent), tmp_path)
    assert not _is_of_task(logging.__path__[0], Path("/"))
