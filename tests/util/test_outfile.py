"""Where commands write: what is there stays what it is, and a regular file is whole at any time."""

from __future__ import annotations

import errno
import os
import pty
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dlctl.errors import DlctlError, UsageError
from dlctl.util import outfile

DATA = b"content" * 100_000
"""More than a pipe takes."""
ECHO = """
import sys
from pathlib import Path
from dlctl.util import outfile
print("before")
outfile.write(Path(sys.argv[1]), b"content\\n")
print("after")
"""


@contextmanager
def read_from(path: Path) -> Iterator[list[bytes]]:
    """What another process gets from a FIFO."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(path.read_bytes()))
    thread.start()
    yield found
    thread.join()


def test_a_fifo_is_written_to_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    with read_from(tmp_path / "out") as found:
        outfile.write(tmp_path / "out", DATA)
    assert found == [DATA]
    assert (tmp_path / "out").is_fifo()


def test_a_fifo_that_nobody_reads_is_given_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(outfile, "READER_S", 0.1)
    os.mkfifo(tmp_path / "out")
    with pytest.raises(DlctlError, match="FIFO"):
        outfile.write(tmp_path / "out", DATA)
    assert (tmp_path / "out").is_fifo()


def test_a_reader_that_leaves_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    reader = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    with ExitStack() as stack:
        file = stack.enter_context(outfile.writing(tmp_path / "out"))
        os.close(reader)
        file.write(b"content")
        with pytest.raises(DlctlError, match=os.strerror(errno.EPIPE)):
            stack.close()


def test_a_device_is_written_to_also_behind_a_link(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    (tmp_path / "out").symlink_to(os.ttyname(theirs))
    for path in (Path(os.ttyname(theirs)), tmp_path / "out"):
        outfile.write(path, b"content\n")
        assert os.read(ours, 100) == b"content\r\n"
    assert (tmp_path / "out").is_symlink()
    assert stat.S_ISCHR((tmp_path / "out").stat().st_mode)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_a_file_is_replaced_when_all_is_written_with_the_mode_of_the_umask(
    tmp_path: Path, mask: int, mode: int
) -> None:
    path, before = tmp_path / "out", os.umask(mask)
    path.write_text("old")
    try:
        with suppress(ZeroDivisionError), outfile.writing(path) as file:
            file.write(DATA)
            raise ZeroDivisionError
        assert path.read_text() == "old"
        outfile.write(path, DATA)
    finally:
        os.umask(before)
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    (tmp_path / "out").symlink_to("there/file")
    outfile.write(tmp_path / "out", DATA)
    assert os.readlink(tmp_path / "out") == "there/file"
    assert (tmp_path / "there" / "file").read_bytes() == DATA
    assert os.listdir(tmp_path / "there") == ["file"]


def test_what_cannot_be_written_is_said_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, said in {
            tmp_path: "the output is a directory",
            tmp_path / "link": "the output is a link to a file that does not exist",
            tmp_path / "no" / "out": "the output would be in a directory that does not exist",
        }.items():
            with pytest.raises(UsageError, match=said):
                outfile.check(path)
        with pytest.raises(DlctlError, match="socket"):
            outfile.write(tmp_path / "socket", DATA)
        assert sorted(os.listdir(tmp_path)) == ["link", "socket"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "out"])
def test_standard_output_goes_on_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    """Though it is a regular file, into which others write too."""
    path = tmp_path / "out"
    with path.open("ab") as out:
        out.write(b"theirs\n")
        out.flush()
        subprocess.run([sys.executable, "-c", ECHO, name], stdout=out, check=True, cwd=tmp_path)
    assert path.read_text() == "theirs\nbefore\ncontent\nafter\n"


def test_standard_output_that_is_closed_is_an_error(tmp_path: Path) -> None:
    """Another file of the process may have its number."""
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", ECHO, "/dev/stdout"]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "standard output" in done.stderr
