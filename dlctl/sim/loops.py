"""A training loop of the user's own in virtual time: with a loader that fetches ahead, groups of
batches, and steps that are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlctl.algorithms.needs import Pull
from dlctl.model.vector import euclidean_norm
from dlctl.roles.protocol.loop_effects import (
    DataWanted,
    GiveData,
    KeepModel,
    LendModel,
    LoopStep,
    LoopStepped,
    PortionPart,
    RecallModel,
)
from dlctl.roles.worker.stock import Stock, samples_of
from dlctl.sim.objectives import batch_rows
from dlctl.sim.process import Process
from dlctl.util.record import record
from dlctl.wire.machine import Effect
from dlctl.wire.messages import Array

REPORT_S = 1.0
"""A loop reports its steps at least so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How the user has written the loop."""

    batch_size: int = 4
    accumulate: int = 1
    """Batches of a step; fewer where the data ends."""
    ahead: int = 2
    """Batches that the loader wants to have besides the one that is computed."""
    skips: float = 0.0
    """Fraction of steps that are skipped, as by a GradScaler."""
    own_samples: int = 0
    """The samples of a step on data of the loop's own; 0: the run's data."""
    lr: float = 0.01
    """Of the loop's own optimiser."""


@record
class Trained(Effect):
    """For checkers: a loop has made a step, or skipped it. Nobody performs it."""

    number: int
    """Of its gradient in this process."""
    pieces: tuple[PortionPart, ...]
    is_skipped: bool


class Replica(Protocol):
    """What a loop uses of its replica (`ComputeDriver`)."""

    parameters: Array
    computed: int

    @property
    def gradient(self) -> Array: ...

    @property
    def averaged(self) -> Array: ...

    def step_s(self) -> float: ...

    def measure(self, rows: Array, seen: Array) -> float: ...

    def own_step(self, lr: float, pull: Pull | None, *, fresh: bool) -> None: ...


class LoopDriver:
    """It checks that nothing else writes to the model while it has it."""

    def __init__(
        self,
        process: Process,
        replica: Replica,
        options: LoopOptions,
        *,
        samples: int,
        seed: int,
        rng: np.random.Generator,
        cuts: bool = False,
    ) -> None:
        """samples: of the dataset. seed: of the job. cuts: see `Stock`."""
        self.process, self.replica, self.options = process, replica, options
        self._samples, self._seed, self._rng = samples, seed, rng
        self._stock = Stock(cuts=cuts)
        self._lent: LendModel | None = None
        self._made = 0
        self._is_recalled = self._waits = False
        self._batches = 0
        """Of the step that has begun."""
        self._pieces: list[PortionPart] = []
        """Delivered since the last step."""
        self._steps: list[LoopStep] = []
        self._reported_at = 0.0
        self._seen = replica.parameters.copy()
        process.perform(LendModel, self._lend)
        process.perform(RecallModel, self._recall)
        process.perform(GiveData, self._give)
        process.perform(KeepModel, lambda _: None)  # For checkers: the script would save it.

    # ------------------------------------------------------------ the role's wishes

    def _lend(self, effect: LendModel) -> None:
        assert self._lent is None, "it has the model already"
        self._lent, self._made, self._is_recalled = effect, 0, False
        self._seen = self.replica.parameters.copy()
        self._reported_at = self.process.timeline.now
        self._go()

    def _recall(self, _: RecallModel) -> None:
        self._is_recalled = True

    def _give(self, effect: GiveData) -> None:
        self._stock.give(effect)
        if self._waits:
            self._waits = False
            self._go()

    # ------------------------------------------------------------ the loop

    def _go(self) -> None:
        """Take the next batch; wait for it with the model in hand if a step has begun."""
        if self.options.own_samples:
            self._after(self.replica.step_s(), self._batch_done)
            return
        wanted, stock = self.options.batch_size, self._stock
        if not stock.has_batch(wanted) and not (stock.none_now or stock.ends):
            self.process.post(DataWanted(now=True))
            self._waits = bool(self._batches)
            if not self._batches:
                self._return(is_dry=True)
            return
        taken = stock.take(wanted)
        stock.deliver(taken)
        self._pieces += taken
        if stock.asks_below(wanted * self.options.ahead):
            self.process.post(DataWanted())
        if taken:
            self._after(self.replica.step_s(), self._batch_done)
        elif self._batches:
            self._step()  # A group ends early where data does.
        else:
            stock.none_now = False
            self._return(is_dry=True)

    def _after(self, takes_s: float, do: Callable[[], None]) -> None:
        timeline = self.process.timeline
        timeline.after(takes_s, lambda: self._if_alive(do))

    def _if_alive(self, do: Callable[[], None]) -> None:
        """A frozen process computes nothing meanwhile."""
        if self.process.frozen:
            self._after(0.1, do)
        elif self.process.alive:
            do()

    def _batch_done(self) -> None:
        assert np.array_equal(self._seen, self.replica.parameters), "the model was changed"
        self._batches += 1
        has_more = not self._stock.cuts or self._stock.is_within_portion()
        if self._batches < self.options.accumulate and has_more:
            self._go()
        else:
            self._step()

    def _step(self) -> None:
        assert self._lent is not None
        lent, pieces = self._lent, tuple(self._pieces)
        self._batches, self._pieces = 0, []
        self._made += 1
        is_skipped = bool(self._rng.random() < self.options.skips)
        number, loss = self.replica.computed, 0.0
        if is_skipped:
            self.replica.computed += 1
        else:
            loss = self.replica.measure(self._rows(pieces), self.replica.parameters)
            if lent.steps_own:
                self.replica.own_step(self.options.lr, lent.pull, fresh=lent.fresh)
        self._seen = self.replica.parameters.copy()
        samples = samples_of(pieces) or self.options.own_samples
        self._steps.append(LoopStep(samples, loss, {}, pieces, is_skipped))
        trained = Trained(number, pieces, is_skipped)
        for observer in self.process.observers:
            observer.on_effect(self.process, trained)
        if self._made == lent.steps or self._is_recalled or lent.gather:
            self._return(is_dry=False)
            return
        if self.process.timeline.now - self._reported_at > REPORT_S:
            self._report(returns=False)
        self._go()

    def _rows(self, pieces: tuple[PortionPart, ...]) -> Array:
        if not pieces:
            return np.arange(self.options.own_samples) % self._samples
        whole = (0, self._samples)
        parts = ((p.data_epoch, (p.start, p.stop)) for p in pieces)
        rows = [batch_rows(self._samples, self._seed, *part, whole) for part in parts]
        return np.concatenate(rows)

    def _return(self, *, is_dry: bool) -> None:
        self._report(returns=True, is_dry=is_dry)

    def _report(self, *, returns: bool, is_dry: bool = False) -> None:
        assert self._lent is not None
        steps, self._steps = tuple(self._steps), []
        self._reported_at = self.process.timeline.now
        gradient, norm = None, math.inf
        if self._lent.gather and steps and not steps[-1].is_skipped:
            gradient = self.replica.gradient
            norm = euclidean_norm(gradient)
        if returns:
            self._lent = None
        event = LoopStepped(steps, self.replica.averaged, returns, is_dry, gradient, norm)
        self.process.post(event)
