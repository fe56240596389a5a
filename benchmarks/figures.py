"""A measured figure, how rounds become one, and the table that is printed."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

BLOCK = 10
"""Repetitions of one side before it is the other's turn."""


@dataclass(frozen=True)
class Figure:
    """One line of the table: a value per round, and what was asked of their median."""

    chapter: str
    what: str
    unit: str
    """"x" for a ratio of dlctl to the baseline; otherwise "MB" and the like."""
    values: tuple[float, ...]
    """Empty if it was skipped."""
    asked: float | None = None
    """The median is to be this at most; None: nothing was asked, the figure informs."""
    detail: str = ""
    """The absolute figures behind a ratio."""
    skipped: str = ""
    """Why it could not be measured here."""

    @property
    def median(self) -> float:
        return median(self.values)

    def is_over(self) -> bool:
        return self.asked is not None and not self.skipped and self.median > self.asked


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


def take_turns(
    rounds: int, ours: Callable[[], object], bare: Callable[[], object], repeats: int = 1
) -> tuple[list[float], list[float]]:
    """Seconds that both take, one value per round: the median of `repeats` times.

    They alternate in blocks of a few, so that whatever else the machine does slows down both. One
    round before the others is not counted.
    """
    block = min(repeats, BLOCK)
    rounds_s: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        times_s: tuple[list[float], list[float]] = [], []
        for _ in range(repeats // block):
            for side, work in enumerate((ours, bare)):
                times_s[side].extend(timed(work) for _ in range(block))
        for side in (0, 1):
            rounds_s[side].append(median(times_s[side]))
    return rounds_s[0][1:], rounds_s[1][1:]


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def seconds(value: float) -> str:
    """1.5 s, 23 ms, 87 us."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def table(figures: Sequence[Figure]) -> str:
    """Asked beside measured, one figure per line; in the end, how many were skipped."""
    head = ("chapter", "what", "asked", "median", "min .. max", "rounds", "", "absolute")
    rows = [head, *map(_row, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    skipped = sum(1 for figure in figures if figure.skipped)
    last = [f"{skipped} of {len(figures)} figures were skipped"] if skipped else []
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *last])


def _row(figure: Figure) -> tuple[str, ...]:
    unit = "x" if figure.unit == "x" else f" {figure.unit}"
    asked = "" if figure.asked is None else f"<= {figure.asked:g}{unit}"
    if figure.skipped:
        return figure.chapter, figure.what, asked, "skipped", "", "", "", figure.skipped
    verdict = "" if figure.asked is None else "OVER" if figure.is_over() else "ok"
    spread = f"{_number(min(figure.values))} .. {_number(max(figure.values))}"
    return (
        figure.chapter, figure.what, asked, f"{_number(figure.median)}{unit}", spread,
        str(len(figure.values)), verdict, figure.detail,
    )  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def to_json(figures: Sequence[Figure], *, quick: bool) -> dict[str, Any]:
    """Every value of every round, with the machine that they are of."""
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
                "median": None if figure.skipped else figure.median,
                "min": min(figure.values, default=None),
                "max": max(figure.values, default=None),
                "values": figure.values,
                "detail": figure.detail,
                "skipped": figure.skipped,
            }
            for figure in figures
        ],
    }
