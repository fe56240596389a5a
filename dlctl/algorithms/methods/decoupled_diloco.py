"""Decoupled DiLoCo. Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
2026 (arXiv 2604.21428).

Streaming DiLoCo that does not wait for stragglers and dead replicas. The exchange of a fragment is
made as soon as K replicas have pushed and a grace period is over; later pushes are in a later
exchange. In the paper's words, a replica is a learner, and the servers with the coordinator are the
syncer:

    replica m, every H / P steps:   push Delta_m = ref_p - theta_m,p, for the fragment p whose turn
                                    it is, with its tokens c and steps s since its p counted last
    lead, for fragment p:           K have pushed at t_K:  wait until t_K + grace, or for all;
                                    the pushes that have arrived by then count
    shard:                          Delta = merge(Delta_m, weights c * c / s)
                                    Theta_p = outer(Theta_p, Delta)     # Nesterov, of p alone
    replica, tau steps later:       ref_p = Theta_p
                                    theta_m,p = alpha theta_m,p + (1 - alpha) Theta_p

    merge, "radial":   (sum w |Delta_m| / sum w) * unit(sum w unit(Delta_m) / sum w)
           "mean":     sum w Delta_m / sum w
    grace, "auto":     gamma (tau t_step - (t_K - t_1)),  gamma = 0.5

K = `quorum`, H = `local_steps`, P = `fragments`, tau = `delay_steps`, alpha = `mix`. Tokens are
samples. The lengths and the directions of the Delta_m are averaged separately ("radial"), because
they are nearly orthogonal: the length of their mean would shrink with their number.

The paper itself was not available for this; quorum, weights, merge and grace follow descriptions of
other implementations, the outer rate and momentum are DiLoCo's. What differs, or was not described:

- "radial" is taken over a shard's part of a fragment; the paper takes it tensor by tensor, and the
  plain mean for embeddings.
- A replica whose push did not count adds its fragment to the result of the exchange, and pushes it
  in the fragment's next turn: nothing is lost. It reads all fragments that it has missed at once.
- A replica that lags behind reads just before it pushes, for the fragment whose turn it is then:
  so each of its pushes counts, and its steps since a push are not mixed but added to the result.
  The others read tau steps after their push, and then wait for the result: no replica gets further
  ahead than that.
- t_step is measured by the lead between two exchanges; it does not know the time of the exchange
  itself, which the paper also subtracts from the grace. t_1: the first push has arrived.
- A step counts as done when it is in all fragments. Where data ends, and before a checkpoint, the
  fragments are exchanged one after the other without steps between.
- A replica without data is not waited for. While fewer than K living replicas have data, an
  exchange waits for all of these.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from dlctl.algorithms import barrier
from dlctl.algorithms.base import Fault, Method, Needs, PushKind, ReplicaSide, Start
from dlctl.algorithms.means import mean_of
from dlctl.algorithms.methods import streaming_diloco
from dlctl.algorithms.methods.streaming_diloco import FragmentMean, Fragments
from dlctl.algorithms.needs import (
    Done,
    Gradient,
    NextData,
    Range,
    Read,
    Receipt,
    Settle,
    View,
    Write,
)
from dlctl.algorithms.quorum import Chosen, Counting
from dlctl.algorithms.rounds import StepsMade
from dlctl.compress.base import Delta
from dlctl.job.config import JobFile
from dlctl.model.vector import Vector, copy_into, copy_of
from dlctl.wire import messages
from dlctl.wire.messages import LATE, Array

GAMMA = 0.5
"""The fraction of a replica's slack for which "auto" waits for other replicas."""
CANCELLED = 1e-6
"""Directions whose mean is shorter than this cancel out."""


class Sent(NamedTuple):
    """A fragment before it was pushed."""

    made: Array
    """int64[2], (steps, samples) of the replica."""
    ref: Vector
    residual: Vector


Exchange = Generator[NextData | Read | Write | Settle | Done, Any, int]


@dataclass(slots=True, kw_only=True)
class Options(streaming_diloco.Options):
    delay_steps: Annotated[int, Ge(0)] = 8
    """Steps from the push of a fragment until the result replaces it, tau; less than local_steps /
    fragments. For half of that time other replicas may join the exchange."""
    quorum: Annotated[int, Ge(1)] = 1
    """Replicas that an exchange waits for, K."""
    grace_s: Annotated[float, Ge(0), Le(3600)] | Literal["auto"] = "auto"
    """Seconds for which an exchange waits for more replicas once it has a quorum. "auto": half of
    the time that delay_steps take, less the time to reach the quorum, so that no replica has to
    wait.
    """
    merge: Literal["radial", "mean"] = "radial"
    """radial: the mean length of the replicas' outer gradients, in their mean direction. mean:
    their mean."""


class Replica(ReplicaSide):
    keeps_position = True
    options: Options

    @classmethod
    def one_push(cls, options: Any) -> PushKind:
        return PushKind(options.local_steps, is_displacement=True, is_all=False)

    def begin(self, start: Start) -> None:
        self.fragments = self.arrival = Fragments(self, self.options.fragments)
        self._made = np.zeros(2, np.int64)
        """(steps, samples) of this replica."""
        self._counted = np.zeros((self.fragments.parts, 2), np.int64)
        """(steps, samples) that are in each fragment on the servers."""
        self._reported = self._done = 0
        """Samples reported by pushes that counted; steps that are done."""
        self._sent: Sent | None = None
        """The newest push; None: it was empty."""
        self._is_slow = self._was_late = False

    def state(self) -> dict[str, Vector]:
        return {"residual": self.residual, **self.fragments.state()}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.fragments.restore(state)

    def run(self) -> Needs:
        clock = yield from barrier.join_chosen()
        ahead = 0
        """Steps since the newest push."""
        while True:
            each = max(1, self.options.local_steps // self.fragments.parts)
            has_data = yield from self._steps(each - ahead)
            has_pushed = yield from self._push_turn(clock)
            ahead = 0
            if has_data and has_pushed:
                ahead = each if self._is_slow else min(self.options.delay_steps, each - 1)
                if ahead and not self._is_slow:
                    yield self.fragments.read(clock, wait=False)
                has_data = yield from self._steps(ahead)
            was_slow = self._is_slow
            clock = yield from self._end_turn(clock)
            while not has_data and self._has_unsent_steps():
                yield from self._push_turn(clock)
                clock = yield from self._end_turn(clock)
            if self._is_slow:
                ahead = each
            elif was_slow:
                ahead = 0

    # ------------------------------------------------------------ steps

    def _steps(self, count: int) -> Generator[NextData | Gradient, Any, bool]:
        """Make so many steps. Returns whether the data sufficed."""
        made: StepsMade = yield from self.fragments.steps(count)
        self._made += made.steps, made.samples
        return made.has_data

    def _has_unsent_steps(self) -> bool:
        """Whether some fragment on the servers lacks steps of this replica."""
        return bool((self._counted[:, 0] < self._made[0]).any())

    # ------------------------------------------------------------ fragments

    def _push_turn(self, clock: int) -> Generator[Write, Any, bool]:
        """Push the fragment whose turn it is. Returns whether this replica takes part: if it has
        nothing for it, but other fragments lack steps, it must not wait for other replicas.
        """
        lo, hi = self.fragments.at(clock)
        steps, tokens = self._made - self._counted[clock % self.fragments.parts]
        ref, residual = self.fragments.vector[lo:hi], self.residual[lo:hi]
        before = Sent(self._made.copy(), copy_of(ref), copy_of(residual))
        self._sent = None
        if not self._has_unsent_steps() or not self.fragments.take(lo, hi):
            if self.fragments.is_diverged:
                self._counted[:], self._done = self._made, int(self._made[0])
                self._reported = int(self._made[1])
            yield Write(vector=None, clock=clock, holds_steps=self.fragments.is_diverged)
            return False
        self._sent = before
        weight = float(tokens) * float(tokens) / max(float(steps), 1.0)
        yield Write(
            vector=self.residual[lo:hi], ranges=((lo, hi),), to_all=True, clock=clock,
            samples=int(self._made[1]) - self._reported, weight=weight,
        )  # fmt: skip
        return True

    def _end_turn(self, clock: int) -> Exchange:
        """Wait until the exchange is over, and place its result and those of missed exchanges.
        Returns the clock."""
        receipt: Receipt = yield Settle()
        is_late = set(receipt.outcomes.values()) == {LATE}
        view: View = yield self.fragments.read(clock, wait=True)
        if self.fragments.is_diverged:
            # Steps made after a push are reported with the next one, which follows at once.
            self.fragments.is_diverged = self._is_slow = self._sent is not None
            self.fragments.has_model, self._sent = False, None
            return (yield from barrier.meet_all(view.clock_max))
        self._place(clock, view, is_late)
        yield from self._report()
        at, newest = clock + 1, view.clock_max
        self._is_slow = newest > at or (is_late and self._was_late)
        self._was_late = is_late
        while at < newest:
            missed = self._missed(at, newest)
            view = yield Read(wait=True, at_least=newest, ranges=missed, into="beside")
            self._place_missed(missed, view)
            at, newest = newest, view.clock_max
        return newest

    def _place(self, clock: int, view: View, is_late: bool) -> None:
        """Place the result for the fragment of `clock`."""
        part = self.fragments.at(clock)
        sent, self._sent = self._sent, None
        if sent is not None and is_late:
            copy_into(self.fragments.vector[slice(*part)], sent.ref)
            copy_into(self.residual[slice(*part)], sent.residual)
        elif sent is not None:
            self._counted[clock % self.fragments.parts] = sent.made
            self._reported = int(sent.made[1])
        if sent is None or is_late or self._is_slow:
            self._place_missed((part,), view)
            return
        assert view.values is not None
        self.fragments.mix(clock, view.values, self.options.mix)

    def _place_missed(self, parts: Sequence[Range], view: View) -> None:
        """Place the results of fragments, and add this replica's unpushed steps to them."""
        assert view.values is not None
        at = 0
        for lo, hi in parts or ((0, len(self.parameters)),):
            ref, own = self.fragments.vector[lo:hi], self.parameters[lo:hi]
            own -= ref
            copy_into(ref, view.values[at : at + hi - lo])
            own += ref
            at += hi - lo

    def _missed(self, first: int, stop: int) -> tuple[Range, ...]:
        """The elements whose turns were from `first` to before `stop`; (): all."""
        if stop - first >= self.fragments.parts:
            return ()
        turns = sorted(clock % self.fragments.parts for clock in range(first, stop))
        parts: list[Range] = []
        for turn in turns:
            lo, hi = self.fragments.at(turn)
            if parts and parts[-1][1] == lo:
                lo = parts.pop()[0]
            parts.append((lo, hi))
        return tuple(parts)

    def _report(self) -> Generator[Done, Any, None]:
        """Report which steps are in all fragments now."""
        done = int(self._counted[:, 0].min())
        if done > self._done:
            self._done = done
            yield Done(but=int(self._made[0]) - done)


class Merge(FragmentMean):
    """The mean of the chosen fragments, by the weights of their replicas."""

    def brings(self, push: messages.Push) -> int:
        """A fragment without samples counts, too: another fragment has reported its steps."""
        return max(push.samples, int(push.is_part))

    def shares(self, pushes: Sequence[messages.Push]) -> list[np.float32]:
        weights = [push.weight for push in pushes]
        total = sum(weights)
        if not total:
            return super().shares(pushes)
        return [np.float32(weight / total) for weight in weights]

    def of(self, kept: Sequence[Delta], shares: Sequence[np.float32]) -> Delta:
        mean = super().of(kept, shares)
        if self.side.options.merge == "mean":
            return mean
        return radial(kept, shares, mean, self.side.shard.size)


def radial(deltas: Sequence[Delta], shares: Sequence[np.float32], mean: Delta, size: int) -> Delta:
    """The mean direction of the deltas with their mean length; `mean` where they cancel out."""
    norms = [float(np.linalg.norm(delta.values.astype(np.float64))) for delta in deltas]
    units = [
        Delta(d.values / np.float32(n or 1.0), d.indices)
        for d, n in zip(deltas, norms, strict=True)
    ]
    direction = mean_of(units, shares, size)
    length = float(np.linalg.norm(direction.values.astype(np.float64)))
    if length < CANCELLED:
        return mean
    radius = sum(float(share) * norm for share, norm in zip(shares, norms, strict=True))
    return Delta(direction.values * np.float32(radius / length), direction.indices)


class Syncer(Counting):
    """Which pushes count: those of a quorum, and all that arrive within the grace period."""

    live: ClassVar[tuple[str, ...]] = ("local_steps",)
    options: Options

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of = -1
        """The clock of the next two attributes."""
        self._first_s = self._quorum_s = math.inf
        """When the first push arrived, and the quorum was reached."""

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float | None:
        if clock != self._of:
            self._of, self._first_s, self._quorum_s = clock, math.inf, math.inf
        idle = frozenset(slot for slot, samples in came.items() if not samples)
        at_work = came.keys() - idle
        if at_work:
            self._first_s = min(self._first_s, waited_s)
        if len(at_work) < min(self.options.quorum, len(members - idle)):
            return None
        if at_work and not members <= came.keys():
            self._quorum_s = min(self._quorum_s, waited_s)
            until_s = self._quorum_s + self._grace_s()
            if waited_s < until_s:
                return until_s
        self.count(at_work)
        return frozenset(came)

    def _grace_s(self) -> float:
        options = self.options
        if not isinstance(options.grace_s, str):
            return options.grace_s
        each = max(1, options.local_steps // options.fragments)
        ahead = min(options.delay_steps, each - 1)
        step_s = self._quorum_s / (each - ahead)
        return max(0.0, GAMMA * (ahead * step_s - (self._quorum_s - self._first_s)))


def check(job: JobFile) -> list[Fault]:
    quorum = job.algorithm.options["quorum"]
    found = streaming_diloco.check(job)
    if quorum > job.workers.count:
        what = f"of {job.workers.count} workers {quorum} are waited for"
        found.append((("algorithm", "quorum"), what, f"use {job.workers.count} or less"))
    return found


DECOUPLED_DILOCO = Method(
    Options=Options,
    replica=Replica,
    shard=Chosen,
    mean=Merge,
    lead=Syncer,
    optimizer=streaming_diloco.STREAMING_DILOCO.optimizer,
    inner=streaming_diloco.STREAMING_DILOCO.inner,
    check=check,
)
