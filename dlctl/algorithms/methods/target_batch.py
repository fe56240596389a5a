"""Batches of a fixed size from replicas that come and go. Diskin et al., "Distributed Deep Learning
in Open Collaborations" (DeDLOC), NeurIPS 2021, section 3.1, and its implementation, hivemind.

The replicas add up gradients at the same parameters w_t until all of them together have B samples,
however many replicas there are and however fast each is. Then the servers make one step, which is
that of large-batch SGD. B = `target_samples`:

    replica i:  G_i = 0;  n_i = 0
                until sum_j n_j >= B:  G_i += n_b grad(w_t, next batch);  n_i += n_b
                push (G_i / n_i, n_i) for step t
    shard:      w_{t+1} = w_t - eta * sum_i n_i (G_i / n_i) / sum_i n_i

so that the rate fits one size of batch, whoever takes part. The mean is by the samples that were
computed, not by B: the sum over all replicas is at least B, and exceeds it by at most one batch of
each replica, which it was computing when the others had enough.

- After each batch a replica writes (t, n_i, samples/s) into its row of the table "progress" on the
  servers, and reads the rows of all replicas that take part now. This read is in flight during the
  next batch, so it is old by one: the replica adds what the others compute in two of its batches at
  their rates. Only if that comes to B does it wait for the newest rows, which decide.
- The first replica that finds enough samples says so in its row: all others push after the batch in
  progress, whatever they find.
- A replica that joins takes part from the step on that the shards are at; what it adds makes the
  step come sooner. One that dies or leaves is not counted any more: the others make up for it, and
  its batches are computed again. If it dies when the first replica has found enough, the step has
  fewer samples than B.
- The coordinator decides which pushes a step uses, for all shards (`quorum.py`): those of all
  replicas that take part; and `deadline_s` seconds after the first push with enough samples, those
  that have arrived. So nobody who is silent holds a step.
- A push that comes later is LATE: it is dropped, never mixed into a later step, and its samples do
  not count as trained. Its replica reads the newest parameters and goes on. In hivemind it first
  downloads the state of a peer: here the optimiser is on the servers.
- A replica whose data has ended pushes what it has, and the step waits for the others, without a
  deadline. When the data of all has ended, or all stop, the step is made with what there is.
- G_i is in no checkpoint: a run that resumes from one computes these batches again. The first step
  after that may have fewer samples than B.
- `dlctl set target_samples=...` takes effect in the step that is under way.
- hivemind begins to average when it expects B to be reached, and may have less; here at least B
  samples have been reported. Its averaging between peers is a push to the servers and a fetch.
  `[servers] layout` divides the model between them by the bandwidths of their hosts, which is what
  section 3.2 of the paper is about. They follow the measured bandwidths while the run is under way
  (`recut_s`): behind a step all servers pause, save a checkpoint and continue with other parts,
  which takes as long as a checkpoint. No acknowledged push is lost, whoever dies meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, Le

from dlctl.algorithms import barrier
from dlctl.algorithms.base import (
    MODEL,
    Fault,
    Method,
    Needs,
    PushKind,
    ReplicaSide,
    Shape,
    Start,
    Table,
)
from dlctl.algorithms.means import Mean
from dlctl.algorithms.needs import Gradient, Range, Read, Step, View, Write
from dlctl.algorithms.quorum import Chosen, Counting
from dlctl.job import batches
from dlctl.job.config import COUNT_MAX, JobFile
from dlctl.job.settings import Live
from dlctl.model.flat import Layout
from dlctl.model.vector import Vector, copy_of
from dlctl.util.text import plural
from dlctl.wire import messages
from dlctl.wire.messages import Json

PROGRESS = "progress"
ROW = 4
"""Elements of a replica's row: (clock, samples, samples/s, whether it has found enough)."""
EXACT = 2**24
"""Up to this number float32 has every integer: rows have the clock modulo this."""
BATCHES_AHEAD = 2.0
"""Batches of its own for which a replica extrapolates the progress of the others."""
FULL = 1.0
"""The weight of a push that was made because there are enough samples; 0: the data has ended."""


@dataclass(slots=True, kw_only=True)
class Options:
    target_samples: Live[Annotated[int, Ge(1), Le(EXACT)]] = 4096
    """Samples of all replicas together that one step is made of, B. Choose the rate for a batch of
    this size."""
    deadline_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Seconds for which a step waits for more pushes once a replica has found that there are enough
    samples. A replica that takes longer is left out of the step."""


class StepProgress(NamedTuple):
    """What all replicas that take part have computed for one step."""

    samples: int
    """Reported so far, with this replica's."""
    ahead: float
    """The same in two batches of this replica; infinite if it cannot be known yet."""
    rate: float
    """Samples per second of all of them; 0: not known yet."""
    is_over: bool
    """Some replica has found enough, or is at a later step."""


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(1, target=options.target_samples)

    def begin(self, start: Start) -> None:
        self._sum: Vector | None = None
        """G_i, the sum of n_b * gradient; None: there is none."""
        self._samples = 0
        """n_i."""
        self._rate = 0.0
        """Samples per second of this replica; 0: not known yet."""
        self._seen = StepProgress(0, 0.0, 0.0, is_over=False)
        self._prefetched: tuple[Range, ...] = ()
        """The rows that are being read."""

    def changes_parameters(self) -> bool:
        return False

    def figures(self) -> Json:
        """update_s: seconds that a step takes at the present rates of all replicas."""
        found: Json = {"batch": self._seen.samples}
        if self._seen.rate:
            found["update_s"] = round(self.options.target_samples / self._seen.rate, 3)
        return found

    def run(self) -> Needs:
        clock = yield from barrier.join_chosen()
        while True:
            yield self._report(clock)  # Without samples: a row of an earlier process may be there.
            is_full = yield from self._fill(clock)
            if is_full:
                yield self._report(clock, is_full=True)
            yield self._push(clock, is_full=is_full)
            clock = yield from barrier.next_chosen(clock)

    # ------------------------------------------------------------ one step

    def _fill(self, clock: int) -> Generator[Gradient | Read | Write, Any, bool]:
        """Add up gradients until all replicas together have enough. False: the data has ended."""
        while True:
            step: Step | None = yield Gradient()
            if step is None:
                return False
            self._add(step)
            yield self._report(clock)
            if (yield from self._is_full(clock)):
                return True

    def _add(self, step: Step) -> None:
        gradient, samples = step.gradient, step.samples
        assert gradient is not None
        gradient *= samples
        if self._sum is None:
            self._sum = copy_of(gradient)
        else:
            self._sum += gradient
        self._samples += samples
        self._rate = samples / self.step_s if self.step_s else 0.0

    def _report(self, clock: int, *, is_full: bool = False) -> Write:
        row = [clock % EXACT, min(self._samples, EXACT), self._rate, is_full]
        at = ROW * self.slot
        return Write(
            table=PROGRESS, vector=np.array(row, np.float32), ranges=((at, at + ROW),),
            holds_steps=False,
        )  # fmt: skip

    def _push(self, clock: int, *, is_full: bool) -> Write:
        """The mean of all gradients since the last push, with the compressor's residual."""
        total, samples = self._sum, self._samples
        self._sum, self._samples = None, 0
        if total is None:
            return Write(vector=None, clock=clock)
        total /= samples
        if self.has_residual():
            self.residual += total
        else:
            self.residual = total
        write = self.write_residual(samples=samples, clock=clock)
        return replace(write, weight=FULL if is_full else 0.0)

    # ------------------------------------------------------------ the progress of all

    def _is_full(self, clock: int) -> Generator[Read, View, bool]:
        """Whether all replicas together have enough samples, or some replica has found so."""
        where, target = self._where(), self.options.target_samples
        if self._prefetched == where:
            view = yield Read(table=PROGRESS, wait=True, ranges=where, into="beside")
            seen = self._progress(clock, where, view)
            is_near = seen.is_over or seen.ahead >= target
        else:
            is_near = True
        if is_near:
            view = yield Read(table=PROGRESS, wait=True, ranges=where, into="beside")
            self._seen = seen = self._progress(clock, where, view)
            if seen.is_over or seen.samples >= target:
                self._prefetched = ()
                return True
        self._prefetched = where
        yield Read(table=PROGRESS, wait=False, ranges=where, into="beside")
        return False

    def _where(self) -> tuple[Range, ...]:
        """The rows of all replicas that take part, as one range."""
        slots = self.members | {self.slot}
        return ((ROW * min(slots), ROW * (max(slots) + 1)),)

    def _progress(self, clock: int, where: tuple[Range, ...], view: View) -> StepProgress:
        assert view.values is not None
        ((lo, _),) = where
        samples, ahead, rates, is_over = self._samples, float(self._samples), self._rate, False
        for slot in self.members - {self.slot}:
            at = ROW * slot - lo
            if not 0 <= at < len(view.values):
                continue  # It has joined since.
            of_clock, reported, rate, is_full = view.values[at : at + ROW].tolist()
            lead = (int(of_clock) - clock) % EXACT
            is_over |= 0 < lead < EXACT // 2 or (lead == 0 and is_full > 0)
            count = int(reported) if lead == 0 else 0
            samples += count
            ahead += count + (rate or self._rate) * BATCHES_AHEAD * self.step_s
            rates += rate
        return StepProgress(samples, ahead if self._rate else math.inf, rates, is_over)


class ByActualSamples(Mean):
    """The mean by samples. For the lead only those pushes bring samples that end the step."""

    def brings(self, push: messages.Push) -> int:
        return push.samples if push.weight else 0


class FullBatch(Counting):
    """Which pushes a step uses: all; after the deadline those that have arrived."""

    allows_cuts = True

    options: Options

    def __post_init__(self) -> None:
        super().__post_init__()
        self._full = (-1, math.inf)
        """(clock, when the first push arrived that was made because there are enough samples)."""

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | float | None:
        full = frozenset(slot for slot, samples in came.items() if samples)
        of, since_s = self._full
        if full and (of != clock or waited_s < since_s):
            self._full = of, since_s = clock, waited_s
        if not members <= came.keys():
            if not full:
                return None
            until_s = since_s + self.options.deadline_s
            if waited_s < until_s:
                return until_s
        self.count(full)
        return frozenset(came)


def cells(layout: Layout) -> int:
    """A row for every slot that a run may have."""
    return ROW * COUNT_MAX


def check(job: JobFile) -> list[Fault]:
    target = Options(**job.algorithm.options).target_samples
    where = ("algorithm", "target_samples")
    if batches.is_open(job) or job.has_loop:
        return []
    if target < (most := batches.largest(job)):
        what = f"less than one step of a worker, which has {plural(most, 'sample')}"
        return [(where, what, f"use {most} or more, or a smaller batch_size")]
    samples = job.job.stop.samples
    if samples is not None and samples < target:
        what = f"the run ends after {samples} samples, which is before its first step"
        return [(where, what, f"use {samples} or less, or a longer run")]
    return []


def check_samples(job: JobFile, samples: float) -> list[Fault]:
    target = Options(**job.algorithm.options).target_samples
    if batches.is_open(job) or job.has_loop or samples >= target:
        return []
    what = f"the run has at most {samples:.0f} samples, which is less than one step needs"
    return [(("algorithm", "target_samples"), what, f"use {samples:.0f} or less, or a longer run")]


TARGET_BATCH = Method(
    Options=Options,
    shape=Shape(tables=(MODEL, Table(name=PROGRESS, rule="set", size=cells))),
    replica=Replica,
    shard=Chosen,
    mean=ByActualSamples,
    lead=FullBatch,
    check=check,
    check_samples=check_samples,
)
