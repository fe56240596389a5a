"""The user's thread between two steps: what it has made, whether it has the model, and what the
role asks of it meanwhile.

Everything here runs in the user's thread. It blocks only while the role has the model; then it
performs what the role wants done with it: an evaluation, a copy of the optimiser's state, a step
along the mean of all replicas.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from daemons.attach.batch_source import BatchSource
from daemons.attach.group_steps import merged
from daemons.attach.model_vector import ModelVector
from daemons.attach.pace import EachStep, StepPace, Wish
from daemons.attach.ranks import OneRank, ReplicaRanks
from daemons.attach.run_optimizer import RunOptimizer
from daemons.attach.stock import LoopStock
from daemons.attach.user_optimizer import UserOptimizer
from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import EvaluationRun, RunEvaluation
from dlctl.roles.protocol.loop_effects import (
    DataWanted,
    KeepModel,
    LendModel,
    LoopLeft,
    LoopStep,
    LoopStepped,
    PortionPart,
)
from dlctl.wire.machine import Event
from dlctl.wire.messages import Array

RETURN = Wish(returns=True, reports=False)
REPORT_S = 1.0
"""Steps are reported at least so often, so that the run shows them."""


class Left(SystemExit):
    """This worker has to go: it is restarted, removed, or stopped by a signal. The run goes on.

    It ends the script with the exit code 0: this is no failure of the script's.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Over(NamedTuple):
    """The last that comes from the role."""

    ended: str
    """finished, stopped or failed; "": the run goes on without this worker."""
    reason: str


class InUserThread(NamedTuple):
    """Something to be done in the user's thread."""

    do: Callable[[], Event | None]


FromRole = LendModel | RunEvaluation | KeepModel | InUserThread | Over


class Inbox(Protocol):
    """What comes from the role, in order."""

    def get(self) -> FromRole: ...

    def empty(self) -> bool: ...


class Link(Protocol):
    """The role, as the user's thread sees it."""

    own: UserOptimizer | None
    """The script's own optimiser, which steps in each replica."""

    @property
    def stock(self) -> LoopStock: ...

    @property
    def inbox(self) -> Inbox: ...

    @property
    def recalled(self) -> bool:
        """The model that is lent is wanted back."""
        ...

    def offer(self, event: Event) -> None: ...


class Made(NamedTuple):
    """A step that is not reported yet."""

    samples: int
    loss: Any
    """A number, or a tensor, which may still be computed on a GPU."""
    metrics: Mapping[str, Any]
    pieces: tuple[PortionPart, ...]
    is_skipped: bool


class Exchange:
    """A `batch_source.Feed` for the loaders."""

    def __init__(
        self,
        link: Link,
        model: ModelVector,
        evaluate: Callable[[], Mapping[str, Any]] | None,
        *,
        has_scaler: bool = False,
        ranks: ReplicaRanks | None = None,
        pace: StepPace | None = None,
    ) -> None:
        """evaluate: at the values of that time. has_scaler: a GradScaler may skip steps. ranks,
        pace: of a replica that is several processes.
        """
        self._has_scaler = has_scaler
        self.ranks: ReplicaRanks = OneRank() if ranks is None else ranks
        self._pace: StepPace = EachStep() if pace is None else pace
        self._link, self._model, self._evaluate = link, model, evaluate
        self.pushed: RunOptimizer | None = None
        """What takes the gradients, if the run makes the steps."""
        self.stock = link.stock
        self.source: BatchSource | None = None
        self.over: Over | None = None
        self.lent: LendModel | None = None
        self.is_evaluated_by_loop = False
        """The script has asked whether it has to evaluate."""
        self.evaluation: RunEvaluation | None = None
        """The script has to make it (`Run.wants_evaluation`)."""
        self._evaluated: RunEvaluation | None = None
        """The newest, if no step has followed."""
        self._last: KeepModel | None = None
        self._reported: dict[str, float] = {}
        """The metrics of that, if the loop has made it."""
        self.steps = self.samples = 0
        """That this process has made."""
        self._progress, self._replicas, self._since = 0, 1, 0
        """Samples of all workers when the model was lent; by how many they grow while this one
        trains one; its own since then."""
        self._left = 0
        self._mark = link.own.steps if link.own is not None else 0
        self._pieces: list[PortionPart] = []
        self.batches = 0
        """Delivered since the last step."""
        self._made: list[Made] = []
        self._reported_s = 0.0

    # ------------------------------------------------------------ what loaders use

    @property
    def is_over(self) -> bool:
        return self.over is not None

    @property
    def must_evaluate(self) -> bool:
        return self.evaluation is not None

    def want(self, *, now: bool) -> None:
        self._link.offer(DataWanted(now))

    def wait(self, timeout_s: float) -> bool:
        came = self.stock.wait(timeout_s)
        if not self._link.inbox.empty():  # While the model is here, nothing but the end comes.
            self._receive()
        return came

    def hand_back(self) -> None:
        self.give_up_evaluation()
        if self.lent is not None:
            self._report(returns=True, is_dry=True)
        self.await_model()

    def has_begun(self) -> bool:
        return bool(self._pieces)

    def delivered(self, pieces: tuple[PortionPart, ...]) -> None:
        self._steps_made()  # A loop without `run.step` would get no data at the end, and wait.
        # A gradient of this batch at older values could not be used.
        while self.lent is None and self.over is None:
            self.give_up_evaluation()
            self.await_model()
        self._pieces += pieces
        self.batches += 1

    # ------------------------------------------------------------ steps

    def step(self, loss: Any, samples: int | None, metrics: Mapping[str, Any], skips: bool) -> None:
        """The loop has made a step, or skipped it. Raises DlctlError."""
        if self.is_over:
            return
        if self.lent is None:  # An evaluation that the script was asked for and has not made.
            self.give_up_evaluation()
            self.await_model()
            skips = True
        if self.over is not None or self.lent is None:
            return
        pieces, self._pieces, self.batches = tuple(self._pieces), [], 0
        if self.stock.now().cuts and len({piece[:2] for piece in pieces}) > 1:
            raise DlctlError(
                "a step has batches of two clients",
                hint="write `if not run.micro(of=N): continue` before the step: it ends a step "
                "where the data of a client ends",
            )
        counted = sum(p.stop - p.start for p in pieces) if pieces else samples
        if counted is None and self.source is not None:
            raise DlctlError(
                "run.step() was called twice: no batch was delivered since the last call",
                hint="call run.step() once after each optimizer.step()",
            )
        if counted is None:
            raise DlctlError(
                "run.step() does not know the samples of the step",
                hint="take the batches from run.loader; with data of your own say how many samples "
                "a step had: run.step(loss=loss, samples=n)",
            )
        if self.pushed is None:
            gradient, skips = None, skips | self._is_skipped(skips=skips)
        else:
            gradient = self._use(self._pending(self.pushed, skips=skips))
            skips |= gradient is None
        loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._made.append(Made(counted, loss, metrics, pieces, skips))
        self._left -= 1
        if not skips:
            self.steps += 1
            if pieces or self.ranks.count == 1:  # Else each process knows only its own.
                self.samples += counted
                self._since += counted
        wish = self._pace.after_step(self._look) if self._left else RETURN
        if wish.returns:
            self._report(returns=True, gradient=gradient)
            self.await_model()
        elif wish.reports:
            self._report(returns=False)
        if self._evaluate is None and self.source is not None:
            self.source.await_behind_step()

    def _look(self) -> Wish:
        is_late = time.monotonic() - self._reported_s > REPORT_S
        return Wish(self._link.recalled, is_late)

    def _is_skipped(self, *, skips: bool) -> bool:
        """Whether the user's optimiser has made no step. Raises DlctlError if that is a mistake."""
        assert self.lent is not None
        if self.lent.gather:
            raise DlctlError(
                "the method of this run takes gradients, and the script steps on its own",
                hint="write optimizer = run.optimizer(model) in place of the optimizer, or take a "
                "method of parameters, such as diloco, in [algorithm]",
            )
        own = self._link.own
        if own is None:
            return False
        made, self._mark = self._steps_made(), own.steps
        if not made and not skips and not self._has_scaler:
            raise DlctlError(
                "run.step() was called, and the optimizer has made no step since the last one",
                hint="call it once after each optimizer.step(); where a GradScaler has skipped "
                "that, give dlctl.attach the scaler, or call run.step(skipped=True)",
            )
        return not made

    def _steps_made(self) -> int:
        """Of the user's optimiser, since the last step. Raises DlctlError if there are several."""
        made = self._link.own.steps_since(self._mark) if self._link.own is not None else 0
        if made > 1:
            raise DlctlError(
                f"the optimizer has made {made} steps since the last run.step()",
                hint="call run.step() once after each optimizer.step()",
            )
        return made

    def _pending(self, pushed: RunOptimizer, *, skips: bool) -> tuple[Array, float] | None:
        """The gradient of this step and its norm; None: there is none. Raises DlctlError if there
        has to be one, or its rate is none of the script's business.
        """
        pending = pushed.take()
        if pending is None and not skips and not self._has_scaler:
            raise DlctlError(
                "run.step() was called, and optimizer.step() was not since the last one",
                hint="call run.step() once after each optimizer.step(); where a GradScaler has "
                "skipped that, call run.step(skipped=True)",
            )
        if (factor := pushed.rate_factor) != 1.0:
            raise DlctlError(
                f"the rate of run.optimizer(model) was set to {factor:g}, and the servers have "
                "their own",
                hint="leave it at 1, and remove the script's learning rate scheduler: lr under "
                "[optimizer] of the job file is the rate, and [schedule] its course",
            )
        return pending

    def _use(self, pending: tuple[Array, float] | None) -> tuple[Array, float] | None:
        """Make the replica's own step along a gradient, if the method wants that. Raises
        DlctlError.
        """
        assert self.lent is not None
        if pending is None or not self.lent.steps_own:
            return pending
        if self._link.own is None:
            raise DlctlError(
                "the method of this run makes steps in the replica, and run.optimizer takes only "
                "gradients",
                hint="give your own optimizer: run.optimizer(model, optimizer)",
            )
        self._link.own.step_along(pending[0])
        return pending

    def _report(
        self, *, returns: bool, is_dry: bool = False, gradient: tuple[Array, float] | None = None
    ) -> None:
        steps = merged(self.ranks, tuple(_told(made) for made in self._made))
        if self.ranks.count > 1:
            told = sum(s.samples for s in steps if not (s.pieces or s.is_skipped))
            self.samples, self._since = self.samples + told, self._since + told
        self._made, self._reported_s = [], time.monotonic()
        is_wanted = gradient is not None and self.lent is not None and self.lent.gather
        vector, norm = gradient if gradient is not None and is_wanted else (None, math.inf)
        if returns:
            assert self.lent is not None
            self._model.check()
            if self.lent.steps_own:
                self._model.gather()
            self.lent = None
        averaged = self._model.averaged()
        self._link.offer(LoopStepped(steps, averaged, returns, is_dry, vector, norm))

    # ------------------------------------------------------------ while the role has the model

    def progress(self) -> int:
        """Samples that all workers have trained, as far as it is known here."""
        return self._progress + self._since * self._replicas

    def await_model(self) -> None:
        """Block until the model is lent, the script has to evaluate, or the run is over. Raises
        Left if it goes on without this worker.
        """
        while self.lent is None and self.over is None and self.evaluation is None:
            self._receive()

    def _receive(self) -> None:
        match self._link.inbox.get():
            case LendModel() as lent:
                self._begin(lent)
            case RunEvaluation() as evaluation:
                self._on_evaluation(evaluation)
            case InUserThread(do):
                if (event := do()) is not None:
                    self._link.offer(event)
            case KeepModel() as last:
                self._last = last
            case Over() as over:
                self.over = over
                if not over.ended:
                    raise Left(over.reason)
                self._take_last()

    def _take_last(self) -> None:
        """The run's values, for what the script does with the model when the run is over: those at
        its end if this worker has got them, or those of the last evaluation if it has made that,
        else the replica's own.
        """
        if (last := self._last or self._evaluated) is not None:
            self._model.take(last.parameters)
            self._model.load_averaged(np.array(last.averaged))
        self._model.scatter()

    def _begin(self, lent: LendModel) -> None:
        self._evaluated = None
        self._model.scatter()
        self.lent, self._left, self._reported_s = lent, lent.steps, time.monotonic()
        self._progress, self._replicas, self._since = lent.samples, lent.replicas, 0
        # What was done without the model is of no effect.
        if self.pushed is not None:
            self.pushed.take()
        elif self._link.own is not None:
            self._mark = self._link.own.steps
            self._link.own.pull = lent.pull
            if lent.fresh:
                self._link.own.forget()

    def _on_evaluation(self, evaluation: RunEvaluation) -> None:
        before, self._evaluated = self._evaluated, evaluation
        if self._evaluate is None:
            has_reported = before is not None and bool(self._reported)
            # Only rank 0 has the values.
            if self.ranks.of_rank_0(lambda: has_reported and _is_same(before, evaluation)):
                # The loop has just evaluated these values, and gets no turn between.
                self._link.offer(EvaluationRun(evaluation.evaluation, self._reported))
            elif self.is_evaluated_by_loop:
                self.evaluation = evaluation
            else:
                self._link.offer(EvaluationRun(evaluation.evaluation, {}))
            return
        with self._model.holding(evaluation.parameters, evaluation.averaged):
            metrics = _numbers(self._evaluate())
        self._link.offer(EvaluationRun(evaluation.evaluation, metrics))

    def report_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """The script has made the evaluation that it was asked for."""
        assert self.evaluation is not None
        number, self.evaluation = self.evaluation.evaluation, None
        self._reported = _numbers(metrics)
        self._link.offer(EvaluationRun(number, self._reported))

    def give_up_evaluation(self) -> None:
        if self.evaluation is not None:
            number, self.evaluation = self.evaluation.evaluation, None
            self._reported = {}
            error = (
                "the script has not evaluated: it goes on although run.wants_evaluation is True; "
                "write `while run.wants_evaluation:` behind run.step()"
            )
            self._link.offer(EvaluationRun(number, {}, "", error))

    def leave(self, reason: str) -> None:
        """Leave the run in order, and wait until that is done."""
        if self.over is not None:
            return
        self._link.offer(LoopLeft(reason))
        while self.over is None:
            self.give_up_evaluation()  # One may be asked for while it leaves.
            if self.lent is not None:
                self._report(returns=True, is_dry=True)
            try:
                self.await_model()
            except Left:
                return


def _told(made: Made) -> LoopStep:
    loss = None if made.loss is None else float(made.loss)
    return LoopStep(made.samples, loss, _numbers(made.metrics), made.pieces, made.is_skipped)


def _is_same(one: RunEvaluation | None, other: RunEvaluation) -> bool:
    """Whether both are of the same values."""
    if one is None:
        return False
    pairs = (one.parameters, other.parameters), (one.averaged, other.averaged)
    return all(np.array_equal(a, b) for a, b in pairs)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items()}
