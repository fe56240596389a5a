"""One step of a replica: from the gradient of its batches to its use.

    batches -> gradient (accumulated, in the job's precision) -> its norm -> clipped
            -> a step of the replica's own optimiser, a vector for the method, or both

A gradient that is not finite, or too large, is discarded as a whole. In float16 the loss is scaled
first, by torch.amp.GradScaler; a gradient that overflows because of the scale is skipped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daemons.worker.early_sum import BeginSum
from daemons.worker.inner_optimizer import InnerOptimizer
from daemons.worker.replica import Measured, TorchReplica
from dlctl.algorithms.engines import Operations
from dlctl.algorithms.needs import Pull
from dlctl.job.config import Gradients
from dlctl.job.inner import SAVED_AS
from dlctl.model.vector import Vector, euclidean_norm
from dlctl.wire.messages import Array

SCALER = f"{SAVED_AS}scaler"
"""Name in a checkpoint: the loss scale, and the number of good steps since it changed."""
CLOSE = 1e-3
"""A norm that is below the limit by more than this fraction needs no clipping, not even by torch's
float32 arithmetic.
"""
SCALE_MIN = 1.0
"""The least loss scale: at or below it an infinite gradient has another cause than the scale."""


class Stepped(NamedTuple):
    loss: float
    """The mean over the step's batches, by samples or by the weights that the task's loss returns;
    may be NaN or infinite."""
    gradient: Vector | None
    """float32[d], clipped; the next step overwrites it. None: it was not requested."""
    norm: float
    """Euclidean, before clipping; not finite if it overflows, or was not needed."""
    is_usable: bool
    """Whether the gradient was usable; if not, no step was made."""
    is_skipped: bool = False
    """The gradient is unusable because of the loss scale."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """The metrics that the task's loss returns: means of the same kind."""
    is_stopped: bool = False
    """It was stopped before its last batch."""
    computed: float = 1.0
    """The fraction of its samples that was computed until then."""


class Stepper:
    def __init__(
        self,
        replica: TorchReplica,
        options: Gradients | None = None,
        inner: InnerOptimizer | None = None,
    ) -> None:
        self.replica = replica
        options = options or Gradients()
        is_clipped_here = options.clip == "replica"
        self.clip_norm = options.clip_norm if is_clipped_here else 0.0
        """The limit for gradients that are computed here."""
        self.clip_norm_along = 0.0 if is_clipped_here else options.clip_norm
        """The limit for gradients from elsewhere (`along`)."""
        self.inner = inner
        self.steps = 0
        """The steps that this process has made so far."""
        self._engine: Operations | None = None
        """The method's engine, which is told of the steps."""
        self._along: tuple[int, list[Tensor]] | None = None
        """The address of the newest gradient from elsewhere, and its views, which keep its memory
        alive.
        """
        self._scaler: torch.amp.GradScaler | None = None
        if options.precision == "fp16":
            self._scaler = torch.amp.GradScaler(replica.device.type)
            self._scaler.scale(torch.zeros((), device=replica.device))  # Initialises its scale.
            # It unscales the gradients of an optimiser's parameters; this one makes no steps.
            self._holder = torch.optim.SGD(replica.values, lr=0.0)

    def tell(self, engine: Operations) -> None:
        """Tell this engine of all steps from now on."""
        self._engine = engine
        self.replica.on_reweighed = engine.reweigh

    def step(
        self,
        batches: Sequence[tuple[Any, float]],
        *,
        own_lr: float | None = None,
        gather: bool = True,
        norm_max: float = sys.float_info.max,
        epoch: int = 0,
        pull: Pull | None = None,
        fresh: bool = False,
        samples: int = 1,
        begin_sum: BeginSum | None = None,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> Stepped:
        """batches: each with its fraction of the step's samples. own_lr: the rate of a step of the
        own optimiser. gather: return the gradient. norm_max: of a usable gradient. epoch: of the
        data. pull: added to the gradient of the own step. fresh: reset the optimiser first.
        samples: of the step, for rows (`RowSteps.begin`) and as the weight in a sum. begin_sum:
        sums the returned gradient early, if it stays unchanged. is_stale: before each batch but the
        first, whether to stop. Raises TaskError.
        """
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        self._begin(samples, scale)
        rows = self.replica.rows
        if rows is not None:
            rows.next_step((own_lr or 0.0) * samples, scale)
        early = self._early(begin_sum, samples, own_lr)
        measured, vector = self._measured(batches, scale, epoch, own_lr or 0.0, early, is_stale)
        if len(measured) < len(batches):
            return self._stopped(sum(part for _, part in batches[: len(measured)]))
        parts = shares([part for _, part in batches], measured)
        loss = sum(part * each.loss for part, each in zip(parts, measured, strict=True))
        gradients = self.replica.gradients()
        if self._scaler is not None:
            self._unscale(gradients)
        if vector is None and gather and own_lr is None:
            vector = self.replica.gathered(gradients)
        needs_norm = vector is not None or bool(self.clip_norm) or self._scaler is not None
        needs_norm |= rows is not None
        is_sure = not needs_norm and math.isfinite(loss) and _is_below(gradients, norm_max)
        norm = math.inf
        if not is_sure:
            norm = euclidean_norm(vector) if vector is not None else norm_of(gradients)
        if rows is not None:
            norm = math.hypot(norm, norm_of(rows.gradients(summed=self.clip_norm > 0)))
        if self._scaler is not None:
            self._update_scale(loss, norm, scale)
        is_skipped = math.isfinite(loss) and not math.isfinite(norm) and scale > SCALE_MIN
        clipped = min(norm, self.clip_norm) if self.clip_norm and math.isfinite(norm) else norm
        if not (is_sure or (math.isfinite(loss) and clipped <= norm_max)):
            self._discard()
            return Stepped(loss, vector, norm, is_usable=False, is_skipped=is_skipped)
        self.steps += 1
        metrics = together([(p, m.metrics) for p, m in zip(parts, measured, strict=True)])
        if self.clip_norm and norm > self.clip_norm * (1 - CLOSE):
            self._clip_what_is_used(vector, gradients, norm, clipped)
        if rows is not None:
            rows.step(min(1.0, clipped / norm) if norm > 0 else 1.0)
        if own_lr is None:
            return Stepped(loss, vector, norm, is_usable=True, metrics=metrics)
        assert self.inner is not None
        vector = self.replica.gathered(gradients) if gather else None
        if fresh:
            self.inner.forget()
        if pull is not None:
            gradients = self._pulled(gradients, pull)
        self.inner.step(gradients, own_lr)
        self.replica.drop_gradients()
        return Stepped(loss, vector, norm, is_usable=True, metrics=metrics)

    def _begin(self, samples: int, scale: float) -> None:
        self.replica.forget_gradients()
        if self._engine is not None:
            self._engine.begin_step(samples, scale)

    def _stopped(self, computed: float) -> Stepped:
        self._discard()
        return Stepped(
            math.nan, None, math.inf, is_usable=False, is_stopped=True, computed=computed
        )  # fmt: skip

    def _discard(self) -> None:
        if self._engine is not None:
            self._engine.discard_step()

    def _clip_what_is_used(
        self, vector: Array | None, gradients: Sequence[Tensor | None], norm: float, clipped: float
    ) -> None:
        """Clip the returned gradient, or else those of the replica's own step."""
        if vector is not None:
            vector *= min(1.0, self.clip_norm / (norm + 1e-6))
            return
        has_rows = self.replica.rows is not None
        factor = clipped / norm if has_rows else _clip_factor(gradients, self.clip_norm)
        for gradient in (g for g in gradients if g is not None):
            gradient.mul_(factor)

    def _early(
        self, begin_sum: BeginSum | None, samples: int, own_lr: float | None
    ) -> Callable[[], bool] | None:
        """Begins the sum of the gradient, if that may begin before the last backward pass."""
        if begin_sum is None or not self._returns_unchanged(own_lr):
            return None
        return partial(self.replica.sum_early, begin_sum, samples)

    def _returns_unchanged(self, own_lr: float | None) -> bool:
        """Whether `step` returns autograd's gradient unchanged, in host memory."""
        is_whole = self._scaler is None and not self.clip_norm and self.replica.rows is None
        return is_whole and own_lr is None and self.replica.device.type == "cpu"

    def _measured(
        self,
        batches: Sequence[tuple[Any, float]],
        scale: float,
        epoch: int,
        lr: float,
        sum_early: Callable[[], bool] | None,
        is_stale: Callable[[], bool],
    ) -> tuple[list[Measured], Vector | None]:
        """The results of the backward passes of all batches; and the flat gradient, if its sum has
        been started by `sum_early`, before the last pass. Fewer results: it is stale.
        """
        found: list[Measured] = []
        is_early = False
        for number, (batch, part) in enumerate(batches, 1):
            if found and is_stale():
                return found, None
            # A loss with weights scales the gradient of the earlier batches before that pass.
            is_unscaled = not found or found[0].weight is None
            if sum_early is not None and number == len(batches) and is_unscaled:
                is_early = sum_early()
            if self._engine is not None:
                self._engine.see_batch(batch, part)
            found.append(self._measure(batch, part, scale, epoch, lr))
        return found, self.replica.gathered_early() if is_early else None

    def _measure(self, batch: Any, part: float, scale: float, epoch: int, lr: float) -> Measured:
        """The backward pass of one batch, or the task's own change of its rows."""
        replica = self.replica
        how: dict[str, Any] = {"scale": scale, "step": self.steps, "epoch": epoch}
        if replica.rows is None:
            return replica.backward(batch, part, **how)
        rows = replica.rows.of_next_batch()
        if not replica.task.has_change:
            return replica.backward(batch, part, rows=rows, **how)
        loss, changes, metrics = replica.task.change(replica.model, batch, rows, lr)
        replica.rows.add(changes)
        return Measured(loss, {n: value for n, value in metrics.items() if math.isfinite(value)})

    def along(self, gradient: Array, lr: float) -> None:
        """A step of the replica's own optimiser along a gradient from elsewhere, float32[d]; it may
        be clipped in place. Raises TaskError.
        """
        assert self.inner is not None
        whole = torch.from_numpy(gradient).to(self.replica.device)
        gradients = self._views_along(whole)
        close = self.clip_norm_along * (1 - CLOSE)
        if self.clip_norm_along and not _norm_of([whole]) < close:
            whole.mul_(_clip_factor(gradients, self.clip_norm_along))
        self.inner.step(gradients, lr)
        self.replica.drop_gradients()

    def _views_along(self, whole: Tensor) -> list[Tensor]:
        """The views, cached for memory that every step reuses, as that of a group's sums."""
        if whole.device.type != "cpu":
            return self.replica.views_of(whole)
        if self._along is None or self._along[0] != whole.data_ptr():
            self._along = whole.data_ptr(), self.replica.views_of(whole)
        return self._along[1]

    def _pulled(self, gradients: Sequence[Tensor | None], pull: Pull) -> list[Tensor | None]:
        """Add strength * (value - toward); a tensor without a gradient has not moved."""
        found: list[Tensor | None] = []
        aims = self.replica.views_of(pull.toward)
        for gradient, value, aim in zip(gradients, self.replica.values, aims, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = torch.add(dense, value - aim, alpha=pull.strength)
            found.append(gradient)
        return found

    def _unscale(self, gradients: Sequence[Tensor | None]) -> None:
        assert self._scaler is not None
        for value, gradient in zip(self.replica.values, gradients, strict=True):
            value.grad = gradient
        self._scaler.unscale_(self._holder)
        for value in self.replica.values:
            value.grad = None

    def _update_scale(self, loss: float, norm: float, scale: float) -> None:
        """Grow it after many good steps, and halve it after an infinite gradient, unless that has
        another cause than the scale.
        """
        assert self._scaler is not None
        may_change = math.isfinite(loss) and (math.isfinite(norm) or scale > SCALE_MIN)
        self._scaler.update(None if may_change else scale)

    # ------------------------------------------------------------ what is saved

    def state(self) -> dict[str, Array]:
        found = self.inner.state() if self.inner is not None else {}
        if self._scaler is not None:
            kept = self._scaler.state_dict()
            found[SCALER] = np.array([kept["scale"], kept["_growth_tracker"]], np.float64)
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load what `state` returned. Raises DlctlError if it is of another optimiser."""
        of_inner = {name: array for name, array in state.items() if name != SCALER}
        if self.inner is not None:
            self.inner.restore(of_inner)
        if self._scaler is not None and SCALER in state:
            scale, tracker = state[SCALER].tolist()
            kept = self._scaler.state_dict()
            self._scaler.load_state_dict(kept | {"scale": scale, "_growth_tracker": int(tracker)})


def weight_of(part: float, measured: Measured) -> float:
    """What a batch counts among those of its step. part: its fraction of the samples, 0 if it only
    fills up.
    """
    return part if measured.weight is None or not part else measured.weight


def shares(parts: Sequence[float], measured: Sequence[Measured]) -> list[float]:
    """`weight_of` each batch of a step, as fractions of their sum; NaN if that is 0."""
    found = [*map(weight_of, parts, measured)]
    if all(each.weight is None for each in measured):
        return found
    total = sum(found)
    return [each / total if total else math.nan for each in found]


def together(measured: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of each metric over the batches that have it, weighted by what these count."""
    sums: dict[str, tuple[float, float]] = {}
    for part, metrics in measured:
        for name, value in metrics.items():
            total, parts = sums.get(name, (0.0, 0.0))
            sums[name] = total + part * value, parts + part
    return {name: total / parts for name, (total, parts) in sums.items() if parts}


def _parts(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The values of all gradients that exist, as dense tensors."""
    found = [gradient for gradient in gradients if gradient is not None]
    return [g.coalesce().values() if g.is_sparse else g for g in found]


def _is_below(gradients: Sequence[Tensor | None], norm_max: float) -> bool:
    """Whether some gradients are sparse, and an upper bound shows that the norm of all is not above
    this. The norm itself needs the sums of duplicate rows, which take longer than many steps.
    """
    found = [gradient for gradient in gradients if gradient is not None]
    sparse = [gradient for gradient in found if gradient.is_sparse]
    if not sparse:
        return False
    parts = [gradient._values() if gradient.is_sparse else gradient for gradient in found]
    times = max(gradient._nnz() for gradient in sparse)
    return _norm_of(parts) * math.sqrt(max(times, 1)) <= norm_max


def norm_of(gradients: Sequence[Tensor | None]) -> float:
    """The norm of all gradients, on one device; not finite if squares overflow in float32."""
    parts = _parts(gradients)
    return _norm_of(parts) if parts else 0.0


def _norm_of(parts: list[Tensor]) -> float:
    if len(parts) == 1:
        return float(torch.linalg.vector_norm(parts[0]))
    return math.hypot(*torch.stack(torch._foreach_norm(parts)).tolist())


def _clip_factor(gradients: Sequence[Tensor | None], norm_max: float) -> Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_, to the bit."""
    total = torch.nn.utils.get_total_norm(_parts(gradients))
    return torch.clamp(norm_max / (total + 1e-6), max=1.0)
