"""Copies of the parameters during training, to determine when the accuracy was reached.

A copy every 30 ms, or of every 2 % of the time so far, costs nearly nothing; their accuracy is
computed after the training. Only at a few moments (after 1 s, 1.5 s, 2.25 s ...) a copy is
evaluated at once, so that a run can stop before its budget is spent. If all workers wait for that
evaluation, it is subtracted from the clock; if they train meanwhile, it is not. All of gloo's
workers wait for the one that evaluates, but those with many steps between two averages first
continue to the next average, which gains them about half an evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.settings import Settings
from benchmarks.peers.work import accuracy, data_of

EVERY_S, EVERY_PART = 0.03, 0.02
FIRST_LOOK_S, NEXT_LOOK = 1.0, 1.5


class Watch:
    """Create it before the clock starts: it loads the test set."""

    def __init__(self, settings: Settings, *, all_wait: bool) -> None:
        self._settings, self._all_wait = settings, all_wait
        self._copies: list[np.ndarray] = []
        self._rows: list[tuple[float, float, int]] = []
        self._look_at_s = FIRST_LOOK_S
        self._last_s = -1.0
        self._off_s = 0.0
        data_of(settings.work)

    def start(self, at: float | None = None) -> None:
        """All processes are ready: the clock starts now, or at Unix time `at`."""
        self._off_s = 0.0
        self._began = time.time() if at is None else at

    def is_enough(self, parameters: Callable[[], Tensor], updates: int) -> bool:
        """Call it as often as possible. Returns True if the training can stop.

        parameters: float32[d] as they are now. updates: steps of all workers so far.
        """
        now_s = time.time() - self._began - self._off_s
        must_look = now_s >= self._look_at_s
        if must_look or now_s - self._last_s >= max(EVERY_S, EVERY_PART * now_s):
            self._last_s = now_s
            self._rows.append((now_s, time.time(), updates))
            self._copies.append(parameters().numpy().copy())
        if must_look and self._is_last_good():
            return True
        return now_s > self._settings.budget_s

    def _is_last_good(self) -> bool:
        self._look_at_s *= NEXT_LOOK
        began = time.time()
        reached = accuracy(self._settings.work, torch.from_numpy(self._copies[-1]))
        self._off_s += time.time() - began if self._all_wait else 0.0
        return reached >= self._settings.target

    def write(self) -> None:
        """Write the file for `run.py`: when the clock started (Unix time), and for every copy the
        seconds on the clock, the Unix time, the updates and the parameters."""
        seconds, moments, updates = zip(*self._rows, strict=True)
        path = Path(self._settings.snapshots)
        temporary = path.with_suffix(".part.npz")
        np.savez(
            temporary, began=self._began, seconds=seconds, moments=moments, updates=updates,
            copies=self._copies,
        )  # fmt: skip
        temporary.rename(path)
