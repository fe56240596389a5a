"""The running means of the loss, and of what else the user's code returns with it, for reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlctl.roles.protocol.meters import follow

LOSS_WEIGHT = 0.05
"""Weight of the newest value in the running means."""


class Losses:
    def __init__(self) -> None:
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}

    def follow(self, loss: float | None, metrics: Mapping[str, float]) -> None:
        """Those of one more step; None: its loss is unknown."""
        if loss is not None:
            change = loss - self._loss if self._loss is not None else 0.0
            self._loss = loss if self._loss is None else self._loss + LOSS_WEIGHT * change
        if metrics:
            follow(self._metrics, metrics, LOSS_WEIGHT)

    def metrics(self) -> dict[str, Any]:
        """As a worker reports them."""
        found: dict[str, Any] = {}
        if self._loss is not None:
            found["loss"] = round(self._loss, 6)
        if self._metrics:
            found["task"] = dict(self._metrics)
        return found
