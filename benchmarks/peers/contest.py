"""All peers in turn, several rounds, and the resulting figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.figures import Figure
from benchmarks.peers.places import Place
from benchmarks.peers.run import PeerFailed, Result, run
from benchmarks.peers.settings import Settings
from benchmarks.peers.table import Peer


@dataclass
class Tries:
    """The results of one peer, by the number of the round."""

    results: dict[int, Result] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    why_not: str = ""
    is_ours: bool = False
    is_once: bool = False
    """Measured in the first round only."""

    @property
    def skipped(self) -> str:
        """Why there is no figure; "" if there is one. A failure of dlctl is not a skip."""
        if self.why_not or self.results or self.is_ours:
            return self.why_not
        return self.lost

    @property
    def failed(self) -> str:
        """In how many rounds dlctl failed, and how; "" if in none, or for another peer."""
        return self.lost if self.is_ours else ""

    @property
    def lost(self) -> str:
        """In how many rounds this peer failed, dlctl included, and how; "" if in none."""
        if not self.failures:
            return ""
        rounds = len(self.failures) + len(self.results)
        last_line = self.failures[max(self.failures)].strip().splitlines()[-1]
        return f"failed in {len(self.failures)} of {rounds} rounds: {last_line}"


def compete(
    peers: Sequence[Peer], place: Place, settings: Settings, rounds: int, once: Sequence[str] = ()
) -> dict[str, Tries]:
    """All peers in each round, with the round's number as the seed; those named in `once` only in
    the first."""
    tries = {
        peer.name: Tries(why_not=peer.why_not(), is_ours=peer.is_ours, is_once=peer.name in once)
        for peer in peers
    }
    for number in range(rounds):
        for peer in peers:
            of_peer = tries[peer.name]
            if of_peer.why_not or (number and of_peer.is_once):
                continue
            print(f"  round {number + 1}: {peer.name} ...", file=sys.stderr, flush=True)
            try:
                result = run(peer, place, replace(settings, seed=number))
            except PeerFailed as error:
                of_peer.failures[number] = str(error)
                print(f"  {peer.name} failed: {error}", file=sys.stderr, flush=True)
            else:
                of_peer.results[number] = result
                line = f"{result.seconds:.2f} s, {result.sent_mb:,.0f} MB"
                print(f"  round {number + 1}: {peer.name}: {line}", file=sys.stderr, flush=True)
    return tries


def figures_of(chapter: str, what: str, tries: Mapping[str, Tries]) -> list[Figure]:
    """Seconds of all peers, with their bytes and start times."""
    return [
        Figure(
            chapter, f"{name}, {what}", "s", tuple(r.seconds for r in of_peer.results.values()),
            detail=_detail(of_peer), skipped=of_peer.skipped, failed=of_peer.failed,
        )
        for name, of_peer in tries.items()
    ]  # fmt: skip


def _detail(tries: Tries) -> str:
    results = tries.results.values()
    if not results:
        return ""
    sent_mb = median(result.sent_mb for result in results)
    start_s = median(result.start_s for result in results)
    rate = median(result.updates / max(result.seconds, 1e-3) for result in results)
    line = f"{sent_mb:,.0f} MB, {rate:,.0f} updates/s; ready after {start_s:.1f} s"
    return f"{line}; {tries.lost}" if tries.lost and not tries.is_ours else line


def against(
    chapter: str, ours: str, other: str, tries: Mapping[str, Tries], asked: float
) -> Figure:
    """dlctl's seconds until the accuracy was reached, against those of another peer."""
    ratios = _ratios(tries[ours], tries[other], lambda result: result.seconds)
    what = f"{ours} / {other}, time to the accuracy"
    return _compared(Figure(chapter, what, "x", ratios, asked), tries[ours], tries[other])


def from_start_against(
    chapter: str, ours: str, other: str, tries: Mapping[str, Tries], asked: float
) -> Figure:
    """The same from the command on that starts the processes."""
    ratios = _ratios(tries[ours], tries[other], lambda result: result.start_s + result.seconds)
    what = f"{ours} / {other}, time to the accuracy from the command on"
    return _compared(Figure(chapter, what, "x", ratios, asked), tries[ours], tries[other])


def bytes_against(
    chapter: str, ours: str, other: str, tries: Mapping[str, Tries], asked: float
) -> Figure:
    """dlctl's bytes on the wire until the accuracy was reached, against those of another peer."""
    ratios = _ratios(tries[ours], tries[other], lambda result: result.sent_mb)
    what = f"{ours} / {other}, bytes on the wire"
    return _compared(Figure(chapter, what, "x", ratios, asked), tries[ours], tries[other])


def _ratios(ours: Tries, theirs: Tries, of: Callable[[Result], float]) -> tuple[float, ...]:
    """Ratios of the rounds that both completed, because rounds differ in the order of the samples.
    A peer that is measured once has the same result in every round."""
    bases = {number: of(result) for number, result in theirs.results.items()}
    if theirs.is_once and bases:
        bases = dict.fromkeys(ours.results, median(bases.values()))
    both = sorted(ours.results.keys() & bases.keys())
    return tuple(of(ours.results[number]) / bases[number] for number in both)


def _compared(figure: Figure, ours: Tries, theirs: Tries) -> Figure:
    """Adds failed rounds: one of dlctl's fails the figure, one of the peer's is left out and
    reported."""
    if ours.failed:
        return replace(figure, failed=ours.failed)
    if skipped := ours.skipped or theirs.skipped:
        return replace(figure, skipped=skipped)
    return replace(figure, detail=f"the other {theirs.lost}") if theirs.lost else figure
