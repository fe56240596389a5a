"""The page, the picture and the live view of a run whose history is known."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest
from recorded import row
from rich.console import Console

from dlctl.observe import chart
from dlctl.observe.top import COLUMNS, TopView, draw, table
from dlctl.util import extras

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\u202e"
LIMIT_S = 20.0


def test_the_page_has_everything_in_it_and_loads_nothing(trained, dlctl_command) -> None:
    made = trained(state="finished", reason=HOSTILE)
    made.event(1_750_000_007.0, "error", "worker-0", HOSTILE)
    made.db.add_metric(1_750_000_020.0, "run", 100, row(20, 100, task={HOSTILE: 1.0})[3])
    made.db.commit()
    (made.path / "job.toml").write_text(f"# {HOSTILE}\n")
    ended = dlctl_command("report", "digits-7f3a")
    assert (ended.code, ended.out) == (0, "digits-7f3a.html\n"), ended.err
    with open("digits-7f3a.html", encoding="utf-8") as file:
        page = file.read()
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href)\s*=|@import|url\((?!#)", page) == []
    assert page.count("<script") == page.count("</script>") == 2, "ours, and the numbers"
    assert "\x1b" not in page
    assert "\u202e" not in page
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.S)[0])
    titles = {made["title"] for made in data["charts"]}
    assert {"Loss", "Learning rate", "Throughput", "Staleness", "Traffic"} <= titles
    assert "Evaluation: accuracy" in titles
    for made in data["charts"]:
        for line in made["lines"]:
            places = data["sources"][line["source"]]
            assert {len(line["y"])} == {len(found) for found in places.values()}
    assert [event["look"] for event in data["events"]] == ["bad", "bad"]


def test_a_page_that_cannot_be_written_is_one_error(trained, dlctl_command) -> None:
    trained()
    ended = dlctl_command("report", "-o", "nowhere/page.html")
    assert (ended.code, ended.where) == (2, "nowhere/page.html")
    assert "mkdir -p nowhere" in ended.err


@pytest.mark.parametrize(
    ("command", "begin"),
    [
        ("report", b"<!DOCTYPE html>"),
        pytest.param("plot", b"\x89PNG\r\n\x1a\n", marks=pytest.mark.long),
    ],
)
def test_a_page_and_a_picture_go_to_standard_output_and_into_a_fifo(
    trained, tmp_path, command, begin
) -> None:
    trained()
    words = [sys.executable, "-m", "dlctl", command, "-o"]
    done = subprocess.run([*words, "-"], capture_output=True, check=False)
    assert (done.returncode, done.stdout[: len(begin)]) == (0, begin), done.stderr
    assert done.stderr == b"/dev/stdout\n"
    os.mkfifo(tmp_path / "out")
    with subprocess.Popen([*words, str(tmp_path / "out")], stdout=subprocess.PIPE) as writing:
        assert (tmp_path / "out").read_bytes()[: len(begin)] == begin
        assert writing.communicate()[0].decode() == f"{tmp_path / 'out'}\n"
    assert (tmp_path / "out").is_fifo()
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run([*words, "-"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (141, b"")


def test_the_format_of_a_picture_is_its_suffix(trained, dlctl_command, own_place) -> None:
    trained()
    assert dlctl_command("plot", "-o", "picture").code == 0
    assert (own_place / "picture").read_bytes()[:4] == b"\x89PNG"
    refused = dlctl_command("plot", "-o", "picture.html")
    assert (refused.code, "'html'" in refused.err) == (1, True)
    assert not (own_place / "picture.html").exists()


def test_several_runs_are_in_one_picture(trained, dlctl_command) -> None:
    trained("digits-7f3a")
    trained("digits-a22d")
    both = ("digits-7f3a", "digits-a22d")
    ended = dlctl_command("plot", *both, "--x", "bytes", "-o", "both.svg")
    assert (ended.code, ended.out) == (0, "both.svg\n"), ended.err
    with open("both.svg", encoding="utf-8") as file:
        assert set(both) <= set(re.findall(r"digits-\w+", file.read()))
    assert dlctl_command("plot", *both, "--y", "accuracy", "--log").code == 0
    with open("plot.png", "rb") as picture:
        assert picture.read(8) == b"\x89PNG\r\n\x1a\n"
    unknown = dlctl_command("plot", *both, "--y", "acuracy")
    assert unknown.code == 2
    assert '"accuracy"' in unknown.err


def test_without_its_package_a_command_says_how_to_install_it(
    trained, dlctl_command, monkeypatch, tmp_path
) -> None:
    trained()
    for package in extras.PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    ended = dlctl_command("plot")
    assert ended.code == 1
    assert '"matplotlib"' in ended.err
    assert "next: pip install 'dlctl[plot]'" in ended.err
    (tmp_path / "train.py").write_text("task = None\n")
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "a"\ntask = "train.py:task"\n[log]\ntensorboard = true\n'
    )
    refused = dlctl_command("validate", str(tmp_path / "job.toml"))
    assert refused.code == 2
    assert '"tensorboard"' in refused.err
    assert "pip install 'dlctl[tensorboard]'" in refused.err


def test_a_line_goes_from_corner_to_corner() -> None:
    assert chart.lines([0.0, 1.0], [1.0, 0.0], 4, 2) == ["⠑⢄⠀⠀", "⠀⠀⠑⢄"]
    assert chart.lines([0.0, 1.0], [0.0, 1.0], 4, 2) == ["⠀⠀⡠⠊", "⡠⠊⠀⠀"]
    assert chart.lines([0.0, 1.0], [3.0, 3.0], 2, 1) == ["⠤⠤"]
    assert chart.lines([], [], 4, 1) == ["⠀⠀⠀⠀"]
    assert chart.sparkline([0.0, 5.0, 10.0], 2) == "▅█"


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_the_live_view_leaves_at_a_key_and_the_terminal_is_as_before(trained, key: bytes) -> None:
    trained(state="finished")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    program = [sys.executable, "-c", "from dlctl.cli.app import main; main()", "top"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    shown, until = b"", time.monotonic() + LIMIT_S
    with subprocess.Popen(
        program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        start_new_session=True, preexec_fn=lambda: _take_terminal(theirs),
    ) as top:  # fmt: skip
        while b"q leaves" not in shown and time.monotonic() < until:
            shown += os.read(ours, 65536)
        os.write(ours, key)
        assert top.wait(until - time.monotonic()) == 0
    after = termios.tcgetattr(theirs)
    os.close(theirs)
    with suppress(OSError):  # All of it, until nobody has the other end.
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    assert after == before
    text = shown.decode()
    assert "\x1b[?1049h" in text
    assert "\x1b[?1049l" in text
    assert "digits-7f3a" in text
    assert " 10s " in text


def _take_terminal(descriptor: int) -> None:
    """So that Ctrl-C in it is a signal to whoever we start."""
    import fcntl

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def test_without_a_terminal_the_live_view_names_what_does_without(trained, dlctl_command) -> None:
    trained()
    ended = dlctl_command("top")
    assert (ended.code, ended.out) == (1, "")
    assert "dlctl status --watch" in ended.err


@pytest.mark.parametrize(("width", "height", "workers"), [(200, 60, 3), (20, 5, 100)])
def test_the_live_view_fits_into_any_terminal(width: int, height: int, workers: int) -> None:
    rows = [{"name": f"worker-{slot}", "state": HOSTILE, "metrics": 7} for slot in range(workers)]
    view = TopView("digits-7f3a", "running", HOSTILE, {"loss": HOSTILE, "totals": 3}, rows, None)
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(draw(view, {}, width, height))
    shown = captured.get()
    assert "\x1b" not in shown
    assert "loss" in shown
    assert ("more daemons" in shown) == (workers == 100)


@pytest.mark.parametrize(("width", "left_out"), [(100, []), (80, [""]), (60, ["", "STALE", "RST"])])
def test_the_least_important_columns_are_left_out_and_none_is_cut(
    width: int, left_out: list[str]
) -> None:
    rates = {"samples_per_s": 12345.0, "push_bytes_per_s": 9.52e5, "fetch_bytes_per_s": 3.34e6}
    metrics = {"step": 12345, "staleness_mean": 13.9, **rates}
    rows = [{"name": "worker-0", "state": "starting", "restarts": 0, "metrics": metrics}]
    view = TopView("digits-7f3a", "running", "", {}, rows, None)
    before = {"worker-0": [1.0, 2.0]}
    made = table(view, 1, before, width)
    assert [name for name in COLUMNS if name not in [c.header for c in made.columns]] == left_out
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(made)
    assert "\u2026" not in captured.get()
