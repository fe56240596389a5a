"""Limits that keep the weights finite: of rate, decay and push norm, in the job file and in `dlctl
set`.

In float32 a sum stops growing where a step is less than half of its last bit. So steps of at most s
move no weight beyond 2^25 s, however many there are, and do not increase a weight beyond that. It
is enough that no step reaches 2^103, about 1e31. With pushes g up to 1e12 and rates up to 1e6 the
longest steps are

    sgd       lr g                                      1e18
    momentum  lr m; m is a sum of g, up to 2^25 g       3e25
    adagrad   lr g / (sqrt(G) + eps); where g g is 0,   3e13    g < 2.7e-23, eps >= 1e-30
              G may be 0
    adam      lr m / (sqrt(v) + eps); where v is 0      1e30    eps >= 1e-12; yogi, too
              already, m may still be g
    lion      lr                                        1e6
    rmsprop   lr b; b is a sum of g / sqrt(v), each     3e21    1 - alpha >= 1e-16
              at most 1 / sqrt(1 - alpha)

and a sum of g g is at most 2^25 * 1e24. A weight decay only helps if it removes at most all of a
weight at once. Beyond twice that, weights grow with every update, whatever is pushed.

Nevertheless a shard detects values that are not finite (`optim/alarm.py`): third-party rules may
differ; momentum also sums up the decay, which is too much for weights beyond 1e26; and oscillating
weights may grow if the user changes the rate in phase with them.
"""

from __future__ import annotations

from decimal import ROUND_FLOOR, Context
from typing import Annotated

from annotated_types import Ge, Gt, Le

LearningRate = Annotated[float, Gt(0), Le(1e6)]
"""A learning rate of the servers' optimiser."""
LocalRate = Annotated[float, Ge(0), Le(1e9)]
"""A learning rate of a replica's own steps. Values that it makes infinite are never pushed."""
WeightDecay = Annotated[float, Ge(0), Le(1e6)]
PushNorm = Annotated[float, Gt(0), Le(1e12)]
DECAY_MAX = 1.0
"""Fraction of a weight that one update may remove."""


def decay_fault(lr: float, weight_decay: float) -> str:
    """Why these two conflict; "" if they do not."""
    if lr * weight_decay <= DECAY_MAX:
        return ""
    bound = f"lr * weight_decay must be <= {DECAY_MAX:g}, or weights grow without bound"
    return f"{bound} (got {lr:.9g} * {weight_decay:.9g})"


def most_with(other: float) -> str:
    """The largest rate with this decay, or decay with this rate, in three digits."""
    rounded = Context(prec=3, rounding=ROUND_FLOOR).create_decimal_from_float(DECAY_MAX / other)
    return f"{float(rounded):g}"
