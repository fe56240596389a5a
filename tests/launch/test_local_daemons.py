"""The daemons of a run are found by their command lines, however its directory is spelled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlctl.launch import base, local

QUIET = "import signal\nprint(flush=True)\nsignal.pause()\n"


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A run directory, and the same one behind a symbolic link."""
    real = tmp_path / "disk" / "runs" / "digits-7f3a"
    real.mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    return real, tmp_path / "runs" / "digits-7f3a"


@pytest.fixture
def server(linked: tuple[Path, Path], tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A daemon that does nothing, started with the directory behind the link."""
    package = tmp_path / "code" / "daemons"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server.py").write_text(QUIET)
    command = base.argv("server", linked[1], "server-0", 3, "ipc:///nowhere")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        start_new_session=True,
    ) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def found(directory: Path) -> list[tuple[str, str, int, int]]:
    return [daemon[:4] for daemon in local.living(directory)]


def test_a_daemon_is_found_through_every_spelling_of_its_directory(linked, server):
    real, link = linked
    expected = [("server", "server-0", 3, server.pid)]
    assert found(link) == expected
    assert found(real) == expected


def test_a_daemon_of_another_run_or_of_a_copy_is_not_ours(linked, server, tmp_path):
    copy = tmp_path / "copies" / "digits-7f3a"
    copy.mkdir(parents=True)
    assert found(copy) == []
    assert found(tmp_path / "never-was") == []


def test_a_command_line_is_read_back_as_it_was_written(linked, tmp_path):
    real, link = linked
    words = base.argv("worker", link, "worker-2", 4, "tcp://127.0.0.1:9")
    assert base.parse_argv(words, link) == ("worker", "worker-2", 4)
    assert base.parse_argv(words, real) == ("worker", "worker-2", 4)
    assert base.parse_argv(words, tmp_path) is None
    assert base.parse_argv(words[:-1], real) is None
    assert base.parse_argv([*words[:3], "elsewhere.worker", *words[4:]], real) is None
    assert base.parse_argv([sys.executable, "-c", "pass"], real) is None


def test_a_directory_that_is_gone_still_has_its_one_spelling(linked):
    real, link = linked
    words = base.argv("worker", real, "worker-2", 4, "")
    real.rmdir()
    assert base.parse_argv(words, real) == ("worker", "worker-2", 4)
    assert base.parse_argv(words, link) is None


def test_sets_of_strings_have_one_order_in_all_workers_of_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    (tmp_path / "job.json").write_text('{"job": {"seed": 11}}')
    of = [base.environment("worker", tmp_path, f"worker-{n}", n)["PYTHONHASHSEED"] for n in (0, 1)]
    assert of == ["11", "11"]
    assert base.environment("server", tmp_path, "server-0", 1)["PYTHONHASHSEED"] == "random"


def test_warnings_of_torch_in_c_are_off_in_workers_unless_the_user_wants_them(
    tmp_path, monkeypatch
):
    def level() -> str:
        return base.environment("worker", tmp_path, "worker-0", 1)["TORCH_CPP_LOG_LEVEL"]

    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert level() == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert level() == "INFO"
