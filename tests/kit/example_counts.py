"""How many examples of hypothesis: few for every commit, many in the long run."""

from __future__ import annotations

from hypothesis import settings


def times(factor: float, **more: object) -> settings:
    """So many times the examples of the profile that is loaded, which are 25 for every commit."""
    count = max(1, round(factor * settings.default.max_examples))
    return settings(max_examples=count, **more)  # type: ignore[arg-type, union-attr]
