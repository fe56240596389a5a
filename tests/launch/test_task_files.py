"""Which files of a job go to other machines, and which stay here."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from dlctl.errors import UsageError
from dlctl.job import config
from dlctl.launch import remote, taskfiles
from dlctl.launch.taskfiles import TaskFiles
from dlctl.runs.database import RunDb


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A job's directory: a task that imports a module and a package."""
    home = tmp_path / "experiment"
    write(home / "train.py", "import net, tools.data")
    write(home / "net.py", "net")
    write(home / "tools" / "__init__.py", "")
    write(home / "tools" / "data.py", "data")
    write(home / "job.toml", "[job]")
    return home


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def collect(home: Path, file: str = "train.py", run_dir: str = "runs") -> TaskFiles:
    return taskfiles.collect(home, str(home / file), home / run_dir)


def test_python_files_beside_the_job_file_and_below_it_go_along(home: Path) -> None:
    found = collect(home)
    assert found.file == "train.py"
    assert found.files == {
        "train.py": b"import net, tools.data",
        "net.py": b"net",
        "tools/__init__.py": b"",
        "tools/data.py": b"data",
    }
    assert found.left_out == ()


def test_a_task_in_a_folder_keeps_its_place(home: Path) -> None:
    assert collect(home, "tools/data.py").file == "tools/data.py"


def test_runs_caches_environments_and_hidden_files_stay(home: Path) -> None:
    before = collect(home)
    write(home / "venv" / "pyvenv.cfg", "")
    for path in (
        ".hidden.py", ".git/hook.py", "__pycache__/net.py", "tools/__pycache__/x.py",
        "venv/lib/site.py", "runs/digits-7f3a/x.py", "my-runs/digits-7f3a/x.py", "notes.txt",
    ):  # fmt: skip
        write(home / path, "no")
    assert collect(home, run_dir="my-runs") == before


def test_links_are_followed_inside_and_never_out(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "secret.py", "secret")
    write(tmp_path / "elsewhere" / "more.py", "secret")
    (home / "alias.py").symlink_to("net.py")
    (home / "out.py").symlink_to(tmp_path / "secret.py")
    (home / "nowhere.py").symlink_to(tmp_path / "nothing.py")
    (home / "folder").symlink_to(tmp_path / "elsewhere")
    (home / "circle").symlink_to(home)
    os.mkfifo(home / "pipe.py")
    found = collect(home)
    assert found.files["alias.py"] == b"net"
    assert b"secret" not in found.files.values()
    assert not any("circle" in path for path in found.files)
    assert found.left_out == ("nowhere.py", "out.py", "pipe.py")


def test_a_task_that_lies_elsewhere_cannot_be_sent(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "common.py", "task")
    (home / "linked.py").symlink_to(tmp_path / "common.py")
    for file in (str(tmp_path / "common.py"), str(home / "linked.py")):
        with pytest.raises(UsageError) as refused:
            taskfiles.collect(home, file, home / "runs")
        assert refused.value.where == file


def test_too_much_is_refused_by_naming_the_largest(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / "tools" / "weights.py", "x" * 600)
    monkeypatch.setattr(taskfiles, "BYTES_MAX", 500)
    with pytest.raises(UsageError, match=r"tools/weights.py \(600 B\)"):
        collect(home)
    monkeypatch.setattr(taskfiles, "BYTES_MAX", 16 << 20)
    monkeypatch.setattr(taskfiles, "FILES_MAX", 4)
    with pytest.raises(UsageError, match="are 5 with"):
        collect(home)


def test_a_job_in_a_directory_full_of_other_things_is_not_searched_for_ever(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskfiles, "LOOKED_AT_MAX", 5)
    with pytest.raises(UsageError, match="5 files") as refused:
        collect(home)
    assert refused.value.hint


# ---------------------------------------------------------------- the request to a host


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ({"task": "{home}/train.py:task"}, "train.py"),
        ({"script": "{home}/tools/data.py"}, "tools/data.py"),
        ({"script": "{home}/tools/data.py", "module": "tools.data"}, "tools/data.py"),
    ],
)
def test_a_host_gets_the_job_with_the_place_of_its_file_among_those_sent(
    home: Path, what: dict[str, str], file: str
) -> None:
    directory = home / "runs" / "digits-0001"
    directory.mkdir(parents=True)
    places = {key: text.format(home=home.resolve()) for key, text in what.items()}
    job = config.JobFile(job=config.Job(name="digits", **places))
    (directory / "job.json").write_text(json.dumps(config.to_dict(job)))
    with closing(RunDb(directory, create=True)) as db:
        db.put_run(job_file=str(home / "job.toml"))
        db.commit()
    request = remote.shared_request(directory)
    sent = config.of_stored(json.loads(json.dumps(request["job"]))).job
    assert sent.file == file
    assert file in request["files"]
    assert sent.module == what.get("module", "")
    assert sent.task == ("train.py:task" if "task" in what else "")
