"""What keeps the weights finite: how large a rate, a decay and a push may be, in the job file as in
`dlctl set`.

In float32 a sum grows no more where a step is less than half of its last bit. So steps of at most s
take no weight beyond 2^25 s, however many there are, and none any further that is there already. It
is enough that no step reaches 2^103, about 1e31. With pushes g up to 1e12 and rates up to 1e6 the
longest are

    sgd       lr g                                      1e18
    momentum  lr m; m is a sum of g, up to 2^25 g       3e25
    adagrad   lr g / (sqrt(G) + eps); where g g is 0,   3e13    g < 2.7e-23, eps >= 1e-30
              G may be 0
    adam      lr m / (sqrt(v) + eps); where v is 0      1e30    eps >= 1e-12; yogi, too
              already, m may still be g
    lion      lr                                        1e6
    rmsprop   lr b; b is a sum of g / sqrt(v), each     3e21    1 - alpha >= 1e-16
              at most 1 / sqrt(1 - alpha)

and a sum of g g comes to 2^25 * 1e24. A weight decay only helps as long as it takes at most all of
a weight at once. Beyond twice that, weights grow with every update, whatever is pushed.

All the same a shard hears of what does not stay finite (`optim/alarm.py`): rules that are not ours
may do something else; momentum sums up the decay, too, which is too much for weights beyond 1e26;
and weights that swing may be pumped up by whoever sets a rate up and down in time with them.
"""

from __future__ import annotations

from decimal import ROUND_FLOOR, Context
from typing import Annotated

from annotated_types import Ge, Gt, Le

LearningRate = Annotated[float, Gt(0), Le(1e6)]
"""Of the servers' optimiser."""
LocalRate = Annotated[float, Ge(0), Le(1e9)]
"""Of a replica's own steps. Values that it makes infinite are never pushed."""
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
