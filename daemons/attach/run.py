"""`Run`: what `dlctl.attach` returns. A facade: `exchange.py` has the steps, `session.py` the run.

Only the thread that has called `dlctl.attach` may use it, in the process that did.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from daemons.attach.batch_source import length_of
from daemons.attach.batches import Batches
from daemons.attach.exchange import Exchange, Link
from daemons.attach.loader import Loader
from daemons.attach.model_vector import ModelVector, unwrapped
from daemons.attach.run_optimizer import RunOptimizer
from daemons.attach.user_line import user_line
from daemons.attach.user_optimizer import UserOptimizer
from daemons.worker.data.data_names import digest_of_files
from daemons.worker.data.sample_order import SampleOrder
from dlctl import registry
from dlctl.errors import DlctlError
from dlctl.job import inner, schedule
from dlctl.job.config import JobFile
from dlctl.job.inner import OF_SCRIPT
from dlctl.wire.messages import ModelReady


class RunLink(Link, Protocol):
    """The run, or the run of one (`alone.py`)."""

    job: JobFile
    slot: int
    takes_gradients: bool
    """The script uses `run.optimizer`."""
    is_restart: bool
    """Whether an earlier process of this worker has died."""
    is_alone: bool
    """A run of one."""

    def join(self, ready: ModelReady) -> None:
        """From now on the role is there."""


class Run:
    """A worker of a run, with a training loop of the user's own."""

    def __init__(
        self, link: RunLink, model: nn.Module, vector: ModelVector, exchange: Exchange
    ) -> None:
        self._link, self._model, self._vector, self.exchange = link, model, vector, exchange
        self._process, self._thread = os.getpid(), threading.current_thread()
        self._is_joined = False
        self._factor: Callable[[int], float] | None = None
        self._loader: Loader | None = None
        self._holds = False
        """The model has the values of an evaluation."""
        self._pending: dict[str, Any] = {}
        """Metrics for the next step."""

    # ------------------------------------------------------------ joining and leaving

    def join(self) -> None:
        """Join the run now, and take its parameters; with data of the script's own."""
        with self._called():
            self._join(ModelReady("", b"", 0, has_own_data=True))

    def _join(self, ready: ModelReady) -> None:
        if self._is_joined:
            return
        self._is_joined = True
        self._link.join(ready)
        samples = ready.samples
        self._factor = schedule.factor(self._link.job, samples)
        self.exchange.await_model()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._loader is not None:
            self._loader.close()
        if self._is_joined and error is None:
            with self._called():
                line = user_line()
                self.exchange.leave(f"the script has left its training loop ({line})")

    @property
    def ended(self) -> str:
        """ "" while the run goes on; then "finished", "stopped" or "failed"."""
        over = self.exchange.over
        return "" if over is None else over.ended or "stopped"

    @property
    def wants_stop(self) -> bool:
        """Whether the run is over."""
        return self.exchange.over is not None

    # ------------------------------------------------------------ data

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Loader:
        """Batches of a map-style dataset until the run is over. options: of torch's DataLoader."""
        with self._called():
            order = self._lease(dataset)
            self._loader = Loader(dataset, batch_size, feed=self.exchange, order=order, **options)
            return self._loader

    def batches(self, dataset: Any, batch_size: int) -> Batches:
        """A batch sampler for a DataLoader of the script's own; a pass ends where data does."""
        with self._called():
            order = self._lease(dataset)
            return Batches(dataset, batch_size, feed=self.exchange, order=order)

    def _lease(self, dataset: Any) -> SampleOrder:
        job = self._link.job
        samples = length_of(dataset)
        self._join(ModelReady("", b"", samples, files=digest_of_files(dataset)))
        return SampleOrder(samples, seed=job.job.seed, shuffle=job.data.shuffle)

    def micro(self, of: int = 1) -> bool:
        """Whether the step has all of its batches, of which it accumulates the gradients: `of`, or
        fewer where data ends. May wait for data.
        """
        with self._called():
            exchange = self.exchange
            if exchange.source is None:  # Data of the script's own: each call is a batch.
                exchange.batches += 1
                return exchange.batches >= of
            return exchange.batches >= of or not exchange.source.has_more()

    # ------------------------------------------------------------ steps

    def optimizer(self, model: nn.Module, optimizer: Optimizer | None = None) -> RunOptimizer:
        """The optimizer of a method of gradients: its `step` takes them for the run. optimizer: the
        script's own, which makes steps along the mean of all workers.
        """
        with self._called():
            if unwrapped(model) is not unwrapped(self._model):
                raise DlctlError(
                    "run.optimizer was called with another model than dlctl.attach",
                    hint="give both the same model",
                )
            if (
                optimizer is None
                and self._link.own is None
                and self._link.job.inner.name == OF_SCRIPT
            ):
                raise DlctlError(
                    "the method of this run needs an optimizer that steps each replica, and "
                    "run.optimizer(model) has none",
                    hint="give it your own: run.optimizer(model, optimizer)",
                )
            if optimizer is not None and not self.is_alone and not self.has_own_steps:
                raise DlctlError(
                    "the servers make the steps of this run, and the optimizer that run.optimizer "
                    "was given would make none",
                    hint="write run.optimizer(model); kind and rate are in [optimizer] of the job",
                )
            if optimizer is not None and self._link.own is None:
                self._link.own = UserOptimizer(optimizer, self._vector)
            self._link.takes_gradients = True
            self.exchange.pushed = RunOptimizer(self._vector, optimizer)
            return self.exchange.pushed

    def step(
        self,
        loss: Any = None,
        *,
        samples: int | None = None,
        skipped: bool = False,
        **metrics: Any,
    ) -> None:
        """Once after each `optimizer.step()`: counts it, and exchanges with the run when the method
        wants that. loss, metrics: for the curves; numbers or tensors. samples: of this step, with
        data of the script's own. skipped: the optimizer has made no step.
        """
        with self._called():
            if not self._is_joined:
                # The step was made before the run's parameters were there: it does not count.
                self._join(ModelReady("", b"", 0, has_own_data=True))
                return
            more, self._pending = self._pending, {}
            self.exchange.step(loss, samples, {**more, **metrics}, skipped)

    @property
    def steps(self) -> int:
        """Steps that this process has made."""
        return self.exchange.steps

    @property
    def samples(self) -> int:
        """Samples that this process has trained."""
        return self.exchange.samples

    @property
    def lr_factor(self) -> float:
        """[schedule] of the job: the fraction of the peak rate, by the samples of all workers."""
        exchange = self.exchange
        return self._factor(exchange.progress()) if self._factor is not None else 1.0

    # ------------------------------------------------------------ evaluations and checkpoints

    @property
    def wants_evaluation(self) -> bool:
        """Whether the run waits for this worker to evaluate; only without `evaluate=`."""
        self.exchange.is_evaluated_by_loop = True
        return self.exchange.evaluation is not None

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Within this the model has the values that are to be evaluated: the run's."""
        evaluation = self.exchange.evaluation
        if evaluation is None:
            yield
            return
        self._holds = True
        try:
            with self._vector.holding(evaluation.parameters, evaluation.averaged):
                yield
        finally:
            self._holds = False
        with self._called():
            self.exchange.await_model()

    def report(self, **metrics: Any) -> None:
        """What the evaluation has come to; at any other time, metrics of the next step."""
        if self.exchange.evaluation is not None:
            self.exchange.report_evaluation(metrics)
            if not self._holds:
                with self._called():
                    self.exchange.await_model()
        else:
            self._pending |= metrics

    def state_dict(self) -> dict[str, int]:
        """For scripts with checkpoints of their own. The run's parameters are in the run's."""
        return {"steps": self.steps, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.exchange.steps, self.exchange.samples = state["steps"], state["samples"]

    def save(self, path: str | Path) -> None:
        """Save the model's state_dict, by worker 0 alone: others do nothing. A path that ends in
        .safetensors is written in that format.
        """
        if self.worker:
            return
        tensors = self._vector.whole_state()
        if self.exchange.ranks.rank:
            return
        partial = Path(path).with_name(f".{Path(path).name}.part")
        if str(path).endswith(".safetensors"):
            from safetensors.torch import save_file

            save_file({name: each.contiguous() for name, each in tensors.items()}, partial)
        else:
            torch.save(tensors, partial)
        partial.replace(path)

    # ------------------------------------------------------------ this worker

    @property
    def worker(self) -> int:
        """The number of this worker, from 0."""
        return self._link.slot

    @property
    def workers(self) -> int:
        """The number of workers of the job."""
        return self._link.job.workers.count

    @property
    def seed(self) -> int:
        """[job] seed: the same in all workers."""
        return self._link.job.job.seed

    @property
    def is_restart(self) -> bool:
        """Whether an earlier process of this worker has died."""
        return self._link.is_restart

    @property
    def is_alone(self) -> bool:
        """Whether this is a run of one, as nobody has started the script as a worker."""
        return self._link.is_alone

    @property
    def takes_gradients(self) -> bool:
        """Whether the method takes gradients: then the loop needs `run.optimizer`."""
        job = self._link.job
        shape = registry.load("algorithms", job.algorithm.name).shape
        return job.inner.name == inner.NONE or shape.model == "replica"

    @property
    def has_own_steps(self) -> bool:
        """Whether the script's own optimizer makes the steps, in its loop or, for a method that
        takes gradients, along their mean. Else that of [servers] does.
        """
        return self._link.job.inner.name == inner.OF_SCRIPT

    # ------------------------------------------------------------ misuse

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Around each call: errors name the line of the user's code. Raises DlctlError."""
        if os.getpid() != self._process:
            raise self._misused("a process that was forked from the one that has attached")
        if threading.current_thread() is not self._thread:
            raise self._misused("another thread than the one that has attached")
        try:
            yield
        except DlctlError as error:
            error.where = error.where or user_line()
            raise

    def _misused(self, by: str) -> DlctlError:
        hint = "use it where dlctl.attach was called"
        return DlctlError(f"run was used in {by}", where=user_line(), hint=hint)
