"""Rows of a run's series, as a coordinator writes them."""

from __future__ import annotations

from typing import Any

from dlctl.records.series import RUN

START = 1_750_000_000.0
SAMPLES, PUSHES, PUSH_BYTES = 100, 10, 1000
"""Of each second, and so many bytes fetched again; a step has ten samples."""


def row(second: int, step: int, **values: Any) -> tuple[float, str, int, dict[str, Any]]:
    """The run after so many seconds at work, at a step."""
    counts = {"samples": step * 10, "seconds": float(second), "epoch": step / 50, "workers": 2}
    counts |= {"push_bytes": second * PUSH_BYTES, "fetch_bytes": second * PUSH_BYTES}
    counts |= {"pushes": second * PUSHES, "staleness_sum": second * PUSHES * 3}
    loss = {"loss": 1.0 / (1 + step), "rates": {"lr": 0.1}}
    return START + second, RUN, step, {**counts, **loss, **values}
