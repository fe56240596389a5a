"""The figures as SVG: a bar for each median, a line from the minimum to the maximum.

Bars of one chapter and one unit share a scale; it is logarithmic, because values differ by factors.
A tick marks the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from benchmarks.figures import Figure

LABELS, BARS, VALUES, ROW, MARGIN = 520, 380, 130, 22, 16
WIDTH = LABELS + BARS + VALUES
OURS, OTHERS, OVER, INK = "#2b6cb0", "#a0aec0", "#c53030", "#1a202c"


def to_svg(figures: Sequence[Figure]) -> str:
    rows: list[str] = []
    height = MARGIN
    for (chapter, unit), group in groupby(figures, key=lambda f: (f.chapter, f.unit)):
        height += 2 * ROW
        name = "ratio" if unit == "x" else unit
        rows.append(_text(MARGIN, height - 8, f"{chapter} ({name}, logarithmic)", weight="bold"))
        bars = list(group)
        scale = _Scale([v for figure in bars for v in (*figure.values, figure.asked) if v])
        for figure in bars:
            rows += _row(figure, scale, height)
            height += ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + MARGIN}" '
        'font-family="sans-serif" font-size="12">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *rows, "</svg>\n"])


class _Scale:
    """Values > 0 to pixels, from slightly below the minimum to the maximum."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        self._low = math.log(min(positive) / 1.5)
        self._span = math.log(max(positive)) - self._low

    def x(self, value: float) -> float:
        part = (math.log(value) - self._low) / self._span if value > 0 else 0.0
        return LABELS + BARS * min(max(part, 0.0), 1.0)


def _row(figure: Figure, scale: _Scale, top: float) -> Iterator[str]:
    middle = top + ROW / 2
    yield _text(LABELS - 8, middle + 4, figure.what, anchor="end")
    if figure.median is None:
        word, color = ("failed", OVER) if figure.failed else ("skipped", OTHERS)
        yield _text(LABELS + 4, middle + 4, word, color=color)
        return
    color = OVER if figure.is_over() else OURS if figure.what.startswith("dlctl") else OTHERS
    end = scale.x(figure.median)
    yield (
        f'<rect x="{LABELS}" y="{top + 4}" width="{max(end - LABELS, 1):.1f}" height="{ROW - 8}" '
        f'fill="{color}"/>'
    )
    low, high = scale.x(min(figure.values)), scale.x(max(figure.values))
    yield _line(low, middle, high, middle)
    if figure.asked is not None:
        at = scale.x(figure.asked)
        yield _line(at, top + 1, at, top + ROW - 1)
    unit = "x" if figure.unit == "x" else f" {figure.unit}"
    yield _text(LABELS + BARS + 8, middle + 4, f"{figure.median:.3g}{unit}")


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{INK}" stroke-width="1.5"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    color: str = INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{color}">{escape(text)}</text>'
    )
