"""Effects and events between a worker's role and a training loop of the user's own.

The model changes hands. The role lends it for some steps (`LendModel`); until it comes back
(`LoopStepped.returns`) the loop computes with it, and the role neither reads nor writes it. Data is
leased on demand: the loop says that it needs some (`DataWanted`), and gets it, or that there is
none for now (`GiveData`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dlctl.algorithms.needs import Pull
from dlctl.model.vector import Vector
from dlctl.util.record import record
from dlctl.wire.machine import Effect, Event
from dlctl.wire.messages import Array, Lease


@record
class LendModel(Effect):
    """Lend the model for so many steps, or until `RecallModel`; answered by `LoopStepped`."""

    steps: int
    """At most; a step with an unusable result is one of them."""
    samples: int = 0
    """Processed by all workers so far, by which the learning rate is scheduled."""
    replicas: int = 1
    """By how many the samples grow while this loop processes one."""
    steps_own: bool = True
    """The loop's own optimiser makes the steps."""
    gather: bool = False
    """Return the gradient of the step; then `steps` is 1."""
    pull: Pull | None = None
    """Added to the gradient before the own step."""
    fresh: bool = False
    """The loop's own optimiser resets its state before the first of these steps."""


@record
class RecallModel(Effect):
    """Return the model after the current step. It may be on its way already."""


@record
class GiveData(Effect):
    """Data that was leased for the loop; None: there is none for now, so that it has to finish, and
    to report, what it has begun.
    """

    lease: Lease | None
    ends: bool = False
    """None follows: the replica leaves. Portions that are not begun stay behind; a batch ends where
    its portion does."""


@record
class KeepModel(Effect):
    """The run's values at its end: the model of the loop gets them when the run is over."""

    parameters: Array
    """float32[d]"""
    averaged: Array
    """float64[n]"""


@record
class DataWanted(Event):
    """The loop's data will not last much longer."""

    now: bool = False
    """It has none left, and waits for the answer with the model in its hands."""


class PortionPart(NamedTuple):
    """Samples [start, stop) of a portion, in the order of `data_epoch`."""

    data_epoch: int
    portion: int
    start: int
    stop: int


class LoopStep(NamedTuple):
    """One step of the loop, or what was delivered to it for a step that it has skipped."""

    samples: int
    """With own data, as the loop has counted them; else those of `pieces`."""
    loss: float | None = None
    """None: unknown. One that is not finite makes the step unusable."""
    metrics: Mapping[str, float] = {}
    pieces: tuple[PortionPart, ...] = ()
    """What was delivered since the step before, in order; (): the data is the loop's own."""
    is_skipped: bool = False
    """No step was made, because the scale of the loss was too large (float16)."""


@record
class LoopStepped(Event):
    """Steps that the loop has made. It reports them at the latest when it returns the model, and
    about once a second.
    """

    steps: tuple[LoopStep, ...]
    averaged: Array
    """float64[n], the model's averaged buffers after the last of them."""
    returns: bool
    """The model is the role's again: all lent steps are made, it was recalled, or there is no data.
    """
    is_dry: bool = False
    """The loop waits for data, and all that was delivered to it is in these steps or earlier ones.
    """
    gradient: Vector | None = None
    """float32[d], of the only step; valid until the next `LendModel`."""
    norm: float = math.inf
    """Euclidean, of the gradient."""


@record
class LoopLeft(Event):
    """The loop has ended on its own, before the run did."""

    reason: str
