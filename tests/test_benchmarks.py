"""The benchmarks measure something. What they measure is looked at by people, never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.figures import Figure, ratio, table, take_turns, to_json
from benchmarks.peers.contest import Tries, compete, figures_of
from benchmarks.peers.places import loopback
from benchmarks.peers.run import run
from benchmarks.peers.table import FAST, HOGWILD, Peer
from benchmarks.peers.work import accuracy
from benchmarks.placement import pinned, placements
from benchmarks.plot import to_svg
from benchmarks.train import settings_for

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
    measured = [figure for figure in figures if not figure["skipped"]]
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in measured)
    assert {figure["skipped"] for figure in figures} <= {"", "ray is not installed"}
    assert all(figure["what"] in ended.stdout for figure in figures)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        peer.name if peer is HOGWILD else pytest.param(peer.name, marks=pytest.mark.long)
        for peer in FAST
    ],
)
def test_a_peer_trains_until_the_accuracy_is_reached(name: str, tmp_path: Path) -> None:
    """Not a mock: from random values to 0.85 of the handwritten digits of the test set."""
    (peer,) = (peer for peer in FAST if peer.name == name)
    if why := peer.why_not():
        pytest.skip(why)
    settings = settings_for(tmp_path, quick=True)
    with loopback(settings.workers) as place:
        result = run(peer, place, settings)
    assert 0 < result.seconds < settings.budget_s
    assert result.updates > 0
    copies = np.load(settings.snapshots)["copies"]
    assert accuracy(settings.work, torch.from_numpy(copies[0])) < settings.target


def test_a_peer_that_fails_is_a_figure_that_says_so_and_everybody_ends(tmp_path: Path) -> None:
    broken = Peer("nobody", "no_such_program", 0.1)
    settings = settings_for(tmp_path, quick=True)
    with loopback(settings.workers) as place:
        tries = compete([broken], place, settings, rounds=1)
    (figure,) = figures_of("train", "to accuracy 0.85", tries)
    assert figure.skipped.startswith("failed: ")
    assert figure.skipped.endswith("No module named benchmarks.peers.no_such_program")


def test_what_is_not_installed_is_counted_in_the_table_and_said_in_the_json() -> None:
    absent = Peer("Ray", "ray_actor", 0.1, needs="a_package_that_nobody_has")
    tries = {absent.name: Tries(why_not=absent.why_not())}
    figures = figures_of("train", "to accuracy 0.85", tries)
    assert table(figures).splitlines()[-1] == "1 of 1 figures were skipped"
    (row,) = to_json(figures, quick=False)["figures"]
    assert (row["median"], row["skipped"]) == (None, "a_package_that_nobody_has is not installed")


def test_the_picture_shows_every_figure_also_the_skipped_ones() -> None:
    figures = [
        Figure("train", "dlctl <1>", "s", (1.0, 2.0, 4.0)),
        Figure("train", "Ray", "s", (), skipped="ray is not installed"),
        Figure("push", "dense", "x", (3.0,), asked=2.0),
    ]
    picture = ElementTree.fromstring(to_svg(figures))
    texts = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if "logarithmic" not in text] == [
        "dlctl <1>", "2 s", "Ray", "skipped", "dense", "3x",
    ]  # fmt: skip


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
