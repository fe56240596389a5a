"""transformers' Trainer as a worker of a run:

    from dlctl.integrations.transformers import DlctlTrainer as Trainer

The rest of the script stays as it is. A trainer of another package that is derived from Trainer is
extended by `class MyTrainer(DlctlTrainer, SFTTrainer)`. Without a run it is that trainer.

In a run
- the job file decides when the training ends, and neither num_train_epochs nor max_steps. An epoch
  is this worker's share of the dataset.
- the rate of the optimizer follows [schedule] of the job file, not lr_scheduler_type; a scheduler
  that you pass by `optimizers=` stays.
- for a method of gradients the optimizer is that of [servers], unless the method has own steps.
- evaluations that the run asks for ([evaluation]) call `evaluate()`; eval_strategy is followed by
  worker 0, with the values that its replica has then.
- worker 0 saves: checkpoints by save_strategy, `save_model`, and whatever asks
  `is_world_process_zero()`. The run continues from its own checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

import dlctl
from dlctl.integrations.epochs import EpochShare, of_step, refuse

try:
    from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "dlctl.integrations.transformers needs transformers: pip install 'dlctl[transformers]'",
        name="transformers",
    ) from error

__all__ = ["DlctlTrainer"]

EPOCHS_MAX = 10**6
"""The run ends sooner."""
NO_METRICS = ("epoch", "_runtime", "_per_second", "_time")
"""Endings of what `evaluate` returns about itself."""

_OWN = "the run restarts from its own checkpoints"
_ONE = "each worker is one process with one device"
_DATA = "which samples come, and in which order, is the run's"
REFUSED: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
    ("DeepSpeed", lambda t: t.is_deepspeed_enabled, "it owns the parameters", "remove deepspeed"),
    ("FSDP", lambda t: t.is_fsdp_enabled or t.args.fsdp, "it owns the parameters", "remove fsdp"),
    ("DistributedDataParallel", lambda t: t.args.world_size > 1, _ONE, "start it by dlctl alone"),
    ("DataParallel", lambda t: t.args.n_gpu > 1, _ONE, "set CUDA_VISIBLE_DEVICES to one GPU"),
    ("model_init=", lambda t: t.model_init, "the model is in the run already", "give model="),
    (
        "load_best_model_at_end",
        lambda t: t.args.load_best_model_at_end,
        "the run's parameters always win",
        "remove it; [stop] target can end the run by a metric",
    ),
    ("resume_from_checkpoint", lambda t: t.args.resume_from_checkpoint, _OWN, "remove it"),
    (
        "auto_find_batch_size",
        lambda t: t.args.auto_find_batch_size,
        "a failed step is not made again",
        "set per_device_train_batch_size",
    ),
    (
        "an IterableDataset",
        lambda t: isinstance(t.train_dataset, IterableDataset),
        "no range of its samples can be leased",
        "use a dataset with a length, or a loop of your own with run.step(samples=n)",
    ),
    ("group_by_length", lambda t: getattr(t.args, "group_by_length", False), _DATA, "remove it"),
    (
        "train_sampling_strategy",
        lambda t: getattr(t.args, "train_sampling_strategy", "random") != "random",
        _DATA,
        "remove it; [data] shuffle = false keeps the order of the dataset",
    ),
    (
        "dataloader_drop_last",
        lambda t: t.args.dataloader_drop_last,
        "every sample is trained",
        "remove it",
    ),
)
"""(option, whether the trainer has it, why it is refused, what to do)."""


class DlctlTrainer(Trainer):
    """A Trainer that is a worker of the run which has started it; else a Trainer."""

    args: Any
    optimizer: Any
    lr_scheduler: Any
    run: Any = None
    """What `dlctl.attach` has returned; None: it is not training in a run."""
    _loss: torch.Tensor | None = None
    """Of the batches since the last step."""
    _batches = 0
    """Of the step that is computed."""
    _is_asked = False
    """The run evaluates."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; in a run, until that is over. Raises DlctlError for options that do
        not work in one.
        """
        given = self.optimizer
        run = dlctl.attach(  # type: ignore[attr-defined]
            self.model,
            self.create_optimizer(),
            None if self.eval_dataset is None else self._evaluated,
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
        )
        if run.is_alone:
            self.optimizer = given
            return super().train(resume_from_checkpoint, *args, **kwargs)
        for what, has, why, instead in REFUSED:
            if has(self):
                raise refuse(what, why, instead)
        if resume_from_checkpoint:
            raise refuse("resume_from_checkpoint", _OWN, "remove it")
        self.run = run
        self.args = copy.copy(self.args)
        self.args.num_train_epochs, self.args.max_steps = EPOCHS_MAX, -1
        if run.takes_gradients:
            self.optimizer = run.optimizer(self.model, *[self.optimizer] * run.has_own_steps)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(PrinterCallback)  # There is no total to show the progress of.
        self.add_callback(_InRun(self))
        with run:
            return super().train(None, *args, **kwargs)

    # ------------------------------------------------------------ data and schedule

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.run is None:
            return loader
        return EpochShare(self.run, loader, self.args.train_batch_size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self.run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        group = of_step(epoch_iterator, self.run, num_batches)
        batches, *more = super().get_batch_samples(group, num_batches, *args, **kwargs)
        self._batches = len(batches)
        if not batches:
            self.control.should_training_stop = True
            return batches, *more
        # The Trainer makes its step at the last of so many.
        empty = _Empty(batches[-1])
        return batches + [empty] * (num_batches - len(batches)), *more

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        run = self.run
        if run is not None and self.lr_scheduler is None:
            steps = run.has_own_steps  # The servers' optimizer is scheduled by the servers.
            factor = (lambda _: run.lr_factor) if steps else (lambda _: 1.0)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        return super().create_scheduler(num_training_steps, optimizer)

    # ------------------------------------------------------------ steps

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(inputs, _Empty):
            return torch.zeros((), device=self.args.device)
        if self.run is not None:
            self.current_gradient_accumulation_steps = self._batches
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self.run is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def take_loss(self) -> torch.Tensor | None:
        """Of the batches since the last call."""
        loss, self._loss = self._loss, None
        return loss

    # ------------------------------------------------------------ evaluations and checkpoints

    def _evaluated(self, _: Any) -> dict[str, float]:
        self._is_asked = True
        try:
            return _metrics(self.evaluate())
        finally:
            self._is_asked = False

    def reports(self, metrics: Mapping[str, Any]) -> None:
        """Metrics that the run has not asked for."""
        if not self._is_asked:
            self.run.report(**_metrics(metrics))

    def is_world_process_zero(self) -> bool:
        return super().is_world_process_zero() and (self.run is None or self.run.worker == 0)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As `Trainer.save_model`; in a run, by worker 0 alone."""
        if self.run is None or self.run.worker == 0:
            super().save_model(*args, **kwargs)


class _Empty(dict[str, Any]):
    """A batch without samples: a step has less batches than the Trainer expects."""

    def __init__(self, like: Mapping[str, Any]) -> None:
        super().__init__({key: each[:0] for key, each in like.items() if torch.is_tensor(each)})


class _InRun(TrainerCallback):
    """Tells the run what the Trainer does, and the Trainer what the run wants."""

    def __init__(self, trainer: DlctlTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, run = self._trainer, self._trainer.run
        logs = control.should_log
        run.step(loss=trainer.take_loss(), skipped=trainer.accelerator.optimizer_step_was_skipped)
        control.should_log = logs  # An evaluation logs, too.
        control.should_training_stop |= run.wants_stop
        self._leave_to_first(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._leave_to_first(control)

    def _leave_to_first(self, control: Any) -> None:
        if self._trainer.run.worker:
            control.should_evaluate = control.should_save = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        known = ("grad_norm", "learning_rate")
        self._trainer.reports({key: logs[key] for key in known if key in (logs or {})})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        self._trainer.reports(metrics or {})


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not name.endswith(NO_METRICS)
    }
