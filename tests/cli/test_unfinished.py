"""What a killed command leaves behind is removed later, and nothing else ever is."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import the_run

from dlctl.runs import unfinished

KILLED = """
import os, sys
from dlctl.ops import run_directory
from dlctl.cli import app as main
run_directory.first_row = lambda *_, **__: os.kill(os.getpid(), 9)
main.run(["start", "job.toml"])
"""

KILLED_AFTER = """
import fcntl, os, pathlib, sys
from pathlib import Path
from dlctl.runs import unfinished
call = {doom}
def last(*args, **keys):
    call(*args, **keys)
    os.kill(os.getpid(), 9)
{doom} = last
with unfinished.made(Path(sys.argv[1])):
    raise SystemExit("it lived")
"""


def test_a_directory_that_a_killed_command_began_is_removed_by_the_next(
    job, own_place, play, dlctl_command
):
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (begun,) = (own_place / "runs").iterdir()
    assert (begun / unfinished.MARK).exists()
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    directory = Path(the_run(own_place)["directory"])  # there is only one
    assert directory != begun
    assert not (directory / unfinished.MARK).exists()


def test_directories_of_the_users_with_names_like_runs_are_never_touched(
    job, own_place, play, dlctl_command
):
    own = own_place / "runs" / "quick-2024"
    (own / "photos").mkdir(parents=True)
    (own / "photos" / "cat.jpg").write_text("a cat")
    empty = own_place / "runs" / "quick-2025"
    empty.mkdir()
    play("start", "ready", "finish")
    assert dlctl_command("run", "job.toml").code == 0
    assert (own / "photos" / "cat.jpg").read_text() == "a cat"
    assert empty.is_dir()


def test_only_what_is_marked_or_empty_and_hidden_is_removed(tmp_path):
    for name in ("a-0001", "a-0002", ".a-0003.new", ".a-0004.new", "a-notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "a-0001" / unfinished.MARK).touch()
    (tmp_path / "a-notes" / unfinished.MARK).touch()
    (tmp_path / ".a-0004.new" / "mine.txt").touch()
    unfinished.sweep(tmp_path, "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a-0002", ".a-0004.new", "a-notes"}


def test_a_marked_directory_that_somebody_fills_just_now_is_left_to_them(tmp_path):
    directory = tmp_path / "a-0001"
    with unfinished.made(directory):
        unfinished.sweep(tmp_path, "a")
        assert directory.exists()
    unfinished.sweep(tmp_path, "a")
    assert not directory.exists()


def test_a_command_that_is_killed_between_any_two_of_its_calls_leaves_nothing_for_long(tmp_path):
    """Killed when it makes the directory, takes the lock, makes the mark, and gives the name."""
    for doom in ("os.mkdir", "fcntl.flock", "Path.touch", "os.rename"):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_AFTER.format(doom=doom), tmp_path / "a-0001"],
            capture_output=True,
            check=False,
            text=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(list(tmp_path.iterdir())) == 1, doom
        unfinished.sweep(tmp_path, "a")
        assert not list(tmp_path.iterdir()), doom


def test_who_is_swept_away_as_it_begins_is_told_what_means_another_name(tmp_path, monkeypatch):
    """Another command holds the directory, and has removed it by the time that ours would."""

    def held(directory: Path) -> None:
        directory.rmdir()
        raise BlockingIOError(errno.EWOULDBLOCK, "held")

    monkeypatch.setattr(unfinished.paths, "held", held)
    with pytest.raises(BlockingIOError), unfinished.made(tmp_path / "a-0001"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_was_half_made_keeps_nobody_from_sweeping(tmp_path):
    with unfinished.made(tmp_path / "a-0001"):
        for name in (".run.db.tmp", ".run.db.tmp-journal", "run.db", "run.db-wal"):
            (tmp_path / "a-0001" / name).touch()
    unfinished.sweep(tmp_path, "a")
    assert not list(tmp_path.iterdir())


def test_an_empty_directory_of_the_users_keeps_its_place(tmp_path):
    own = tmp_path / "a-0001"
    own.mkdir()
    with pytest.raises(FileExistsError), unfinished.made(own):
        pass
    assert list(tmp_path.iterdir()) == [own]
    assert not list(own.iterdir())
