"""The benchmarks measure something. What they measure is looked at by people, never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.figures import Figure, ratio, table, take_turns
from benchmarks.placement import pinned, placements

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(400)  # Real processes on a machine that may have other things to do.
def test_a_quick_run_measures_real_pushes_and_real_commands(tmp_path: Path) -> None:
    result = tmp_path / "figures.json"
    chapters = ["push", "cli", "roundtrip"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *chapters, "--quick", "--json", str(result)],
        cwd=ROOT, text=True, capture_output=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(result.read_text())["figures"]
    assert {figure["chapter"] for figure in figures} == set(chapters)
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in figures)
    assert all(figure["what"] in ended.stdout for figure in figures)


def test_an_unknown_chapter_is_refused_with_the_names_of_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["pull"])
    assert 'no chapter "pull"; there are start, server_memory, push' in capsys.readouterr().err


def test_a_ratio_is_taken_round_by_round_so_that_a_slow_round_is_slow_for_both() -> None:
    figure = ratio("push", "dense", ours_s=[2.0, 30.0, 4.0], bare_s=[1.0, 10.0, 1.0], asked=3.0)
    assert figure.values == (2.0, 3.0, 4.0)
    assert figure.median == 3.0
    assert not figure.is_over()


def test_the_table_shows_what_was_asked_beside_what_was_measured() -> None:
    over = Figure("push", "dense", "x", (3.0, 4.0, 5.0), asked=3.0, detail="4 us against 1 us")
    informs = Figure("server_memory", "USS", "MB", (22.0,))
    _, _, first, second = table([over, informs]).splitlines()
    assert first.split() == [
        "push", "dense", "<=", "3x", "4.00x", "3.00", "..", "5.00", "3", "OVER", "4", "us",
        "against", "1", "us",
    ]  # fmt: skip
    assert second.split() == ["server_memory", "USS", "22.0", "MB", "22.0", "..", "22.0", "1"]


def test_both_sides_take_turns_and_the_first_round_does_not_count() -> None:
    turns: list[str] = []
    ours_s, bare_s = take_turns(2, lambda: turns.append("ours"), lambda: turns.append("bare"))
    assert turns == ["ours", "bare"] * 3
    assert (len(ours_s), len(bare_s)) == (2, 2)


def test_a_pinned_process_gets_its_cores_back() -> None:
    before = os.sched_getaffinity(0)
    servers, client = placements()["one core"]
    with pinned((), (servers, client)):
        assert os.sched_getaffinity(0) == {client}
    assert os.sched_getaffinity(0) == before
