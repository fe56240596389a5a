"""A line drawn in a terminal, with the dots of Braille characters: 2 by 4 in each."""

from __future__ import annotations

from collections.abc import Sequence

COLUMNS, ROWS = 2, 4
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in each row and column of a character (Unicode 17.0, block 2800)."""
_BLANK = 0x2800
_BARS = "▁▂▃▄▅▆▇█"


def lines(xs: Sequence[float], ys: Sequence[float], width: int, height: int) -> list[str]:
    """The line through these points, as `height` lines of `width` characters; x is sorted."""
    canvas = [[0] * width for _ in range(height)]
    if xs:
        columns, rows = width * COLUMNS - 1, height * ROWS - 1
        across = [round(_part(x, min(xs), max(xs)) * columns) for x in xs]
        down = [round((1 - _part(y, min(ys), max(ys))) * rows) for y in ys]
        before = (across[0], down[0])
        for place in zip(across, down, strict=True):
            for x, y in _between(before, place):
                canvas[y // ROWS][x // COLUMNS] |= _DOTS[y % ROWS][x % COLUMNS]
            before = place
    return ["".join(chr(_BLANK + cell) for cell in row) for row in canvas]


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest values as bars; the highest of them fills its cell, 0 is the lowest."""
    shown = [*values][-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[round(max(0.0, value) / top * (len(_BARS) - 1))] for value in shown)


def _part(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """All dots from one to another, both included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * i / steps),
            round(start[1] + (end[1] - start[1]) * i / steps),
        )
        for i in range(steps + 1)
    ]
