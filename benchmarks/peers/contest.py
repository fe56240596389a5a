"""All peers in turn, several rounds, and the figures that come of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.figures import Figure
from benchmarks.peers.places import Place
from benchmarks.peers.run import PeerFailed, Result, run
from benchmarks.peers.settings import Settings
from benchmarks.peers.table import Peer


@dataclass
class Tries:
    """What came of one peer's rounds."""

    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    why_not: str = ""

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(result.seconds for result in self.results)

    @property
    def problem(self) -> str:
        """Why there is no figure; "" if there is one."""
        if self.results:
            return ""
        return self.why_not or f"failed: {self.failures[-1].strip().splitlines()[-1]}"


def compete(
    peers: Sequence[Peer], place: Place, settings: Settings, rounds: int, once: Sequence[str] = ()
) -> dict[str, Tries]:
    """Everybody in each round, with the round's number as the seed; those named in `once` only in
    the first."""
    tries = {peer.name: Tries(why_not=peer.why_not()) for peer in peers}
    for number in range(rounds):
        for peer in peers:
            of_peer = tries[peer.name]
            if of_peer.why_not or (number and peer.name in once):
                continue
            try:
                result = run(peer, place, replace(settings, seed=number))
            except PeerFailed as error:
                of_peer.failures.append(str(error))
                print(f"  {peer.name} failed: {error}", file=sys.stderr, flush=True)
            else:
                of_peer.results.append(result)
                said = f"{result.seconds:.2f} s, {result.sent_mb:,.0f} MB"
                print(f"  round {number + 1}: {peer.name}: {said}", file=sys.stderr, flush=True)
    return tries


def figures_of(chapter: str, what: str, tries: Mapping[str, Tries]) -> list[Figure]:
    """Seconds of everybody, with bytes and the time for starting beside them."""
    return [
        Figure(
            chapter, f"{name}, {what}", "s", of_peer.seconds,
            detail=_detail(of_peer), skipped=of_peer.problem,
        )
        for name, of_peer in tries.items()
    ]  # fmt: skip


def _detail(tries: Tries) -> str:
    if not tries.results:
        return ""
    sent_mb = median(result.sent_mb for result in tries.results)
    start_s = median(result.start_s for result in tries.results)
    rate = median(result.updates / max(result.seconds, 1e-3) for result in tries.results)
    failed = f", {len(tries.failures)} rounds failed" if tries.failures else ""
    return f"{sent_mb:,.0f} MB, {rate:,.0f} updates/s; ready after {start_s:.1f} s{failed}"


def against(
    chapter: str, ours: str, other: str, tries: Mapping[str, Tries], asked: float
) -> Figure:
    """Our seconds in each round against those of another: in the same round, if it has them all,
    else against their median."""
    problem = tries[ours].problem or tries[other].problem
    what = f"{ours} / {other}, time to the accuracy"
    if problem:
        return Figure(chapter, what, "x", (), asked, skipped=problem)
    mine, theirs = tries[ours].seconds, tries[other].seconds
    if len(mine) != len(theirs):
        theirs = (median(theirs),) * len(mine)
    ratios = tuple(a / b for a, b in zip(mine, theirs, strict=True))
    return Figure(chapter, what, "x", ratios, asked)


def bytes_against(
    chapter: str, ours: str, other: str, tries: Mapping[str, Tries], asked: float
) -> Figure:
    """Our bytes on the wire until the accuracy was reached, against the median of another's."""
    problem = tries[ours].problem or tries[other].problem
    what = f"{ours} / {other}, bytes on the wire"
    if problem:
        return Figure(chapter, what, "x", (), asked, skipped=problem)
    theirs = median(result.sent_mb for result in tries[other].results)
    values = tuple(result.sent_mb / theirs for result in tries[ours].results)
    return Figure(chapter, what, "x", values, asked)
