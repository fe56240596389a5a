"""A measured figure, how rounds are aggregated, and the printed table."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

BLOCK = 10
"""Repetitions of one side before the other side runs."""


@dataclass(frozen=True)
class Figure:
    """One line of the table: a value per round, and the target of their median."""

    chapter: str
    what: str
    unit: str
    """"x" for a ratio of dlctl to the baseline; otherwise "MB" etc."""
    values: tuple[float, ...]
    """Empty if it was skipped or dlctl failed in every round."""
    asked: float | None = None
    """Target: the median is at most this. None: no target."""
    detail: str = ""
    """The absolute figures behind a ratio."""
    skipped: str = ""
    """Why it could not be measured."""
    failed: str = ""
    """In how many rounds dlctl itself failed, and how; good rounds do not compensate."""

    @property
    def median(self) -> float | None:
        """None without values."""
        return median(self.values) if self.values else None

    def is_over(self) -> bool:
        """Whether the median exceeds its target, or dlctl failed, which is worse."""
        if self.failed:
            return True
        return self.asked is not None and self.median is not None and self.median > self.asked


def ratio(
    chapter: str,
    what: str,
    ours_s: Sequence[float],
    bare_s: Sequence[float],
    asked: float | None = None,
) -> Figure:
    """dlctl against the baseline, round by round: a slow round is slow for both."""
    ratios = tuple(ours / bare for ours, bare in zip(ours_s, bare_s, strict=True))
    detail = f"{seconds(median(ours_s))} against {seconds(median(bare_s))}"
    return Figure(chapter, what, "x", ratios, asked, detail)


def nothing() -> None:
    """The default preparation: none."""


def take_turns(
    rounds: int,
    ours: Callable[[], object],
    bare: Callable[[], object],
    repeats: int = 1,
    prepare: Callable[[], object] = nothing,
    prepare_bare: Callable[[], object] = nothing,
) -> tuple[list[float], list[float]]:
    """Seconds of both sides, one value per round: the median of `repeats` times.

    The sides alternate in small blocks, so that other load on the machine slows down both. A first
    round is not counted. `prepare` and `prepare_bare` run before each call of their side, off the
    clock.
    """
    block = min(repeats, BLOCK)
    rounds_s: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        times_s: tuple[list[float], list[float]] = [], []
        for _ in range(repeats // block):
            for side, (before, work) in enumerate(((prepare, ours), (prepare_bare, bare))):
                for _ in range(block):
                    before()
                    times_s[side].append(timed(work))
        for side in (0, 1):
            rounds_s[side].append(median(times_s[side]))
    return rounds_s[0][1:], rounds_s[1][1:]


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def seconds(value: float) -> str:
    """1.5 s, 23 ms, 87 us."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def table(figures: Sequence[Figure]) -> str:
    """One figure per line, with its target; then the numbers of skipped and failed figures."""
    head = ("chapter", "what", "target", "median", "min .. max", "rounds", "", "absolute")
    rows = [head, *map(_row, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    counts = {
        "were skipped": sum(1 for figure in figures if figure.skipped),
        "failed": sum(1 for figure in figures if figure.failed),
    }
    last = [f"{count} of {len(figures)} figures {how}" for how, count in counts.items() if count]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *last])


def _row(figure: Figure) -> tuple[str, ...]:
    unit = "x" if figure.unit == "x" else f" {figure.unit}"
    asked = "" if figure.asked is None else f"<= {figure.asked:g}{unit}"
    if figure.skipped:
        return figure.chapter, figure.what, asked, "skipped", "", "", "", figure.skipped
    spread, middle = "", "failed"
    if figure.median is not None:
        spread = f"{_number(min(figure.values))} .. {_number(max(figure.values))}"
        middle = f"{_number(figure.median)}{unit}"
    return (
        figure.chapter, figure.what, asked, middle, spread, str(len(figure.values)),
        _verdict(figure), "; ".join(filter(None, (figure.failed, figure.detail))),
    )  # fmt: skip


def _verdict(figure: Figure) -> str:
    if figure.failed:
        return "FAILED"
    return "" if figure.asked is None else "OVER" if figure.is_over() else "ok"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def to_json(figures: Sequence[Figure], *, quick: bool) -> dict[str, Any]:
    """Every value of every round, with the machine."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": quick,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "figures": [
            {
                "chapter": figure.chapter,
                "what": figure.what,
                "unit": figure.unit,
                "asked": figure.asked,
                "median": figure.median,
                "min": min(figure.values, default=None),
                "max": max(figure.values, default=None),
                "values": figure.values,
                "detail": figure.detail,
                "skipped": figure.skipped,
                "failed": figure.failed,
            }
            for figure in figures
        ],
    }
