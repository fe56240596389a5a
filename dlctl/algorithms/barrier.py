"""How a replica keeps step with the barrier of the shards: generators for a method's `run`.

    clock = yield from join()                      # takes part from this step on
    while True:
        ...                                        # compute
        yield Write(..., clock=clock)              # for this step, once
        clock = yield from next_step(clock)        # all shards have made it: read, go on

Each returns the step that this replica pushes for next. `join_chosen` and `next_chosen` are the
same where the lead chooses which pushes count (`quorum.Chosen`).
"""

from __future__ import annotations

from collections.abc import Generator

from dlctl.algorithms.needs import NextData, Read, View, Write

Meeting = Generator[NextData | Read | Write, View, int]


def join() -> Meeting:
    """Take part without a gradient until all shards wait for this replica.

    In a run under way one shard may be a step ahead of another; a gradient is of one step.
    """
    yield NextData()  # A replica that has requested data is a member.
    view: View = yield Read(wait=True)
    return 0 if view.clock_max == 0 else (yield from meet(view.clock_max))


def next_step(clock: int) -> Meeting:
    """The step after this one. A shard that was notified late of the members may have skipped it
    without this replica, and be ahead of the others: then the replica meets all again.
    """
    view: View = yield Read(wait=True, at_least=clock + 1)
    newest = view.clock_max
    return newest if newest == clock + 1 else (yield from meet(newest))


def meet(clock: int) -> Meeting:
    """Take part without a gradient until the newest shard is exactly one step further. Then all
    shards are, as none is behind the requested step.
    """
    while True:
        yield Write(vector=None, clock=clock, holds_steps=False)
        view: View = yield Read(wait=True, at_least=clock + 1)
        before, clock = clock, view.clock_max
        if clock == before + 1:
            return clock


def join_chosen() -> Meeting:
    """Take part from the step on that all shards are at."""
    yield NextData()  # A replica that has requested data is a member.
    return (yield from meet_all(0))


def next_chosen(clock: int) -> Meeting:
    """The step that all shards are at after this one, whether this push counted or not."""
    return meet_all(clock + 1)


def meet_all(at_least: int) -> Meeting:
    """Read into the model until all shards are at the same step; returns it."""
    while True:
        view: View = yield Read(wait=True, at_least=at_least)
        if view.clock_min == view.clock_max:
            return view.clock_max
        at_least = view.clock_max
