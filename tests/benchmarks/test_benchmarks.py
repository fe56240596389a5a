"""The benchmarks measure something. What they measure is looked at by people, never asserted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import cli, encryption, hosts, waiting
from benchmarks.__main__ import CHAPTERS, main
from benchmarks.figures import Figure, ratio, table, take_turns, to_json
from benchmarks.peers.contest import Tries, against, bytes_against, compete, figures_of
from benchmarks.peers.places import loopback
from benchmarks.peers.run import Result, result_of, run
from benchmarks.peers.table import FAST, SLOW, Peer
from benchmarks.peers.watch import Watch
from benchmarks.peers.work import Flat, accuracy
from benchmarks.placement import pinned, placements
from benchmarks.plot import to_svg
from benchmarks.train import settings_for
from tests.hosts.cluster import missing

ROOT = Path(__file__).parents[2]


@pytest.mark.long
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
    assert {figure["skipped"] for figure in figures} <= {"", "ray is not installed", missing()}
    assert all(figure["what"] in ended.stdout for figure in figures)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [peer.name for peer in FAST])
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


def test_a_peer_that_fails_is_a_figure_that_says_so_and_everybody_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("nobody", "no_such_program", 0.1)
    settings = settings_for(tmp_path, quick=True)
    with loopback(settings.workers) as place:
        tries = compete([broken], place, settings, rounds=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "  round 1: nobody ...", "who is at it is told beforehand"
    assert lines[1].startswith("  nobody failed: ")
    (figure,) = figures_of("train", "to accuracy 0.85", tries)
    assert figure.skipped.startswith("failed in 1 of 1 rounds: ")
    assert figure.skipped.endswith("No module named benchmarks.peers.no_such_program")


def test_what_is_not_installed_is_counted_in_the_table_and_said_in_the_json() -> None:
    absent = Peer("Ray", "ray_actor", 0.1, needs="a_package_that_nobody_has")
    tries = {absent.name: Tries(why_not=absent.why_not())}
    figures = figures_of("train", "to accuracy 0.85", tries)
    assert table(figures).splitlines()[-1] == "1 of 1 figures were skipped"
    (row,) = to_json(figures, quick=False)["figures"]
    assert (row["median"], row["skipped"]) == (None, "a_package_that_nobody_has is not installed")


@pytest.mark.long
def test_without_namespaces_the_table_says_which_figures_there_are_none_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encryption, "REPEATS", {10_000: 2})
    for module in (encryption, hosts, waiting):
        monkeypatch.setattr(module, "missing", lambda: "not root")
        figures = module.measure(quick=True)
        skipped = [figure for figure in figures if figure.skipped]
        assert {figure.skipped for figure in skipped} == {"not root"}
        assert [figure for figure in figures if figure.asked and not figure.skipped] == []
        assert any(figure.asked for figure in skipped)


def test_where_dlctl_itself_fails_the_benchmark_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever measures dlctl must not be told that all is well because nothing was measured."""
    broken = Peer("dlctl", "no_such_program", 0.1, is_ours=True)
    settings = settings_for(tmp_path, quick=True)
    with loopback(settings.workers) as place:
        tries = compete([broken], place, settings, rounds=1)
    tries["DDP"] = tries_of({0: 2.0})
    figures = [*figures_of("train", "s", tries), against("train", "dlctl", "DDP", tries, 0.333)]
    assert [(figure.skipped, figure.is_over()) for figure in figures] == [
        ("", True), ("", False), ("", True),
    ]  # fmt: skip
    monkeypatch.setattr(cli, "measure", lambda *, quick: figures)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")  # `main` removes it.
    assert main(["cli"]) == main(["cli", "--quick"]) == 1
    last_table = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split().count("FAILED") for line in last_table] == [0, 0, 1, 0, 1, 0]
    assert "failed in 1 of 1 rounds: " in last_table[2]
    assert last_table[-1] == "2 of 3 figures failed"


def test_a_round_that_dlctl_loses_is_not_made_up_for_by_the_others() -> None:
    tries = {
        "dlctl": tries_of({0: 1.0, 2: 1.0}, ours=True),
        "DDP": tries_of(dict.fromkeys(range(3), 10.0)),
    }
    tries["dlctl"].failures[1] = "ended with 1: Traceback ...\nonly 0.200 after 60.0 s"
    own, _ = figures_of("train", "s", tries)
    compared = against("train", "dlctl", "DDP", tries, asked=0.333)
    for figure in (own, compared, bytes_against("train", "dlctl", "DDP", tries, asked=0.333)):
        assert figure.failed == "failed in 1 of 3 rounds: only 0.200 after 60.0 s"
        assert figure.is_over()
    assert compared.values == (0.1, 0.1)
    assert "FAILED" in table([compared])


def test_only_equal_rounds_are_compared_since_each_has_its_own_order_of_samples() -> None:
    """Another that has lost round 1 is compared in rounds 0 and 2; one that is measured once, in
    all of them; one that has lost them all, in none, and that is no fault of dlctl's."""
    tries = {
        "dlctl": tries_of({0: 1.0, 1: 50.0, 2: 4.0}, ours=True),
        "RPC": tries_of({0: 2.0, 2: 2.0}),
        "DDP": tries_of({0: 100.0}, once=True),
        "Ray": tries_of({}),
    }
    tries["RPC"].failures[1] = "not ended after 300 s: \n"
    tries["Ray"].failures.update({0: "ended with 1", 1: "ended with 2"})
    rpc, ddp, ray = (against("train", "dlctl", name, tries, 1.5) for name in ("RPC", "DDP", "Ray"))
    assert rpc.values == (0.5, 2.0)
    assert rpc.detail == "the other failed in 1 of 3 rounds: not ended after 300 s:"
    assert (
        ddp.values == bytes_against("train", "dlctl", "DDP", tries, 1.5).values == (0.01, 0.5, 0.04)
    )
    assert ray.skipped == "failed in 2 of 2 rounds: ended with 2"
    assert not any(figure.is_over() for figure in (rpc, ddp, ray))


def tries_of(seconds: dict[int, float], *, ours: bool = False, once: bool = False) -> Tries:
    """By round; a byte for every microsecond."""
    results = {n: Result(s, start_s=1.0, sent_mb=s, updates=100) for n, s in seconds.items()}
    return Tries(results, is_ours=ours, is_once=once)


def test_dlctl_is_known_as_ours_and_nobody_else() -> None:
    for peers in (FAST, SLOW):
        is_named = [peer.name.partition(",")[0] == "dlctl" for peer in peers]
        assert [peer.is_ours for peer in peers] == is_named
        assert peers[0].name == "dlctl"


@pytest.mark.long
def test_seconds_and_bytes_count_from_when_all_were_ready_not_from_the_first_copy(
    tmp_path: Path,
) -> None:
    """dlctl says a moment later when that was: what was done until then counts all the same."""
    settings = dataclasses.replace(settings_for(tmp_path, quick=True), target=0.0)
    watch, ready_at = Watch(settings, all_wait=False), time.time() - 5.0
    watch.start(ready_at)
    watch.is_enough(lambda: Flat(settings.work).w, 7)
    watch.write()
    at, sent = (ready_at - 2, ready_at, ready_at + 60), (10_000_000, 10_000_000, 70_000_000)
    result = result_of(settings, began=ready_at - 2, counts=[*zip(at, sent, strict=True)])
    assert result.seconds >= 5.0
    assert result.start_s == pytest.approx(2.0)
    assert result.sent_mb == pytest.approx(result.seconds, rel=1e-3)
    assert result.updates == 7


def test_the_picture_shows_every_figure_also_the_skipped_and_the_failed_ones() -> None:
    figures = [
        Figure("train", "dlctl", "s", (), failed="failed in 1 of 1 rounds"),
        Figure("train", "dlctl <1>", "s", (1.0, 2.0, 4.0)),
        Figure("train", "Ray", "s", (), skipped="ray is not installed"),
        Figure("push", "dense", "x", (3.0,), asked=2.0),
    ]
    picture = ElementTree.fromstring(to_svg(figures))
    texts = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if "logarithmic" not in text] == [
        "dlctl", "failed", "dlctl <1>", "2 s", "Ray", "skipped", "dense", "3x",
    ]  # fmt: skip


def test_an_unknown_chapter_is_refused_with_the_names_of_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["pull"])
    error = capsys.readouterr().err
    assert 'no chapter "pull"' in error
    assert all(chapter in error for chapter in CHAPTERS)


def test_help_and_readme_name_every_chapter_that_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ROOT / "benchmarks"
    parts = {"roundtrip_dense", "roundtrip_peers"}  # of a chapter
    measuring = {file.stem for file in folder.glob("*.py") if "\ndef measure(" in file.read_text()}
    assert measuring - parts == set(CHAPTERS)
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.strip().split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert all([name, what] in lines for name, what in CHAPTERS.items())
    readme = (folder / "README.md").read_text()
    assert [name for name in CHAPTERS if f"**{name}**" not in readme] == []


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
