"""Lightning's Trainer as a worker of a run:

    Trainer(strategy=DlctlStrategy(), ...)

The rest of the script stays as it is. Without a run it is Lightning's strategy for one device.

In a run
- the job file decides when the training ends, and neither max_epochs nor max_steps. An epoch is
  this worker's share of the dataset.
- the rate of the optimizer follows [schedule] of the job file, unless the module has a scheduler.
- for a method of gradients the optimizer is that of [servers], unless the method has own steps.
- evaluations that the run asks for ([evaluation]) are validation loops, also those that the Trainer
  makes by itself, with the values that this worker's replica has then.
- worker 0 writes checkpoints and logs. The run continues from its own checkpoints.
- where data ends, a step may have less batches than accumulate_grad_batches, as at the end of an
  epoch. limit_train_batches makes epochs shorter, and leaves no sample out.
- what ends the training of one worker alone is refused: max_time, EarlyStopping.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch

import dlctl
from dlctl.integrations.epochs import EpochShare, refuse

try:
    from lightning.pytorch.callbacks import EarlyStopping, Timer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_only
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "dlctl.integrations.lightning needs lightning: pip install 'dlctl[lightning]'",
        name="lightning",
    ) from error

__all__ = ["DlctlStrategy"]

REFUSED: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
    (
        "more than one optimizer",
        lambda trainer: len(trainer.optimizers) != 1,
        "the run counts the steps of one",
        "configure one optimizer, with a group for each part of the model",
    ),
    (
        "ckpt_path",
        lambda trainer: trainer.ckpt_path,
        "the run restarts from its own checkpoints",
        "call trainer.fit without it",
    ),
    (
        "reload_dataloaders_every_n_epochs",
        lambda trainer: trainer.reload_dataloaders_every_n_epochs,
        "the dataset is leased to workers once",
        "remove it",
    ),
    (
        "overfit_batches",
        lambda trainer: trainer.overfit_batches,
        "which samples come is the run's",
        "give a smaller dataset",
    ),
    (
        "limit_train_batches=0",
        lambda trainer: trainer.limit_train_batches == 0,
        "this worker would never train",
        "remove it",
    ),
    (
        "max_time",
        lambda trainer: any(
            isinstance(each, Timer) and each.time_remaining() is not None
            for each in trainer.callbacks
        ),
        "it would end the training of this worker, which the run starts again",
        "write stop = { seconds = 3600 } into [job] of the job file",
    ),
    (
        "EarlyStopping",
        lambda trainer: any(isinstance(each, EarlyStopping) for each in trainer.callbacks),
        "it would end the training of this worker, which the run starts again",
        'write stop = { target = "val_loss <= 0.1" } into [job] of the job file',
    ),
    (
        "barebones=True",
        lambda trainer: trainer.barebones,
        "it counts no losses",
        "remove it",
    ),
)
"""(option, whether the trainer has it, why it is refused, what to do)."""


class DlctlStrategy(SingleDeviceStrategy):
    """A worker of the run which has started the script; else training on one device.

    device: by default the current GPU if there is one.
    """

    strategy_name = "dlctl"
    optimizers: Any

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        if device is None:
            device = "cpu"
            if torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device=device, **kwargs)
        self.run: Any = None
        """What `dlctl.attach` has returned; None: it is not training in a run."""
        self._loss: torch.Tensor | None = None
        """Of the batches since the last step, summed as Lightning divides them."""
        self._batches = 0
        """That have a part in it."""
        self._ends_step = False
        """The batch that is computed is the last one of its step, as no more come for now."""
        self._rates: list[float] = []
        """Of the optimizer's groups, before [schedule]; []: there is nothing to schedule."""
        self._is_inside = False
        self._on_sigterm: Any = None

    # ------------------------------------------------------------ joining and leaving

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        run = dlctl.attach(  # type: ignore[attr-defined]
            self.lightning_module,
            self.optimizers[0] if self.optimizers else None,
            self._evaluated if trainer.enable_validation else None,
            scheduler=[config.scheduler for config in self.lr_scheduler_configs],
            scaler=getattr(self.precision_plugin, "scaler", None),
        )
        if run.is_alone:
            return
        for what, has, why, instead in REFUSED:
            if has(trainer):
                raise refuse(what, why, instead)
        self.run = run
        if run.has_own_steps and not self.lr_scheduler_configs:
            self._rates = [group["lr"] for group in self.optimizers[0].param_groups]
        if run.takes_gradients:
            own = self.optimizers if run.has_own_steps else []
            self.optimizers = [run.optimizer(self.lightning_module, *own)]
        loops = trainer.fit_loop, trainer.fit_loop.epoch_loop
        loops[0].max_epochs = loops[1].max_steps = -1
        loops[0].min_epochs = loops[1].min_steps = None  # The run's end is no early one.
        rank_zero_only.rank = run.worker
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()  # There is no total to show the progress of.
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._is_inside = True
        run.__enter__()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.run is not None:  # Lightning's handler would end the script with an error.
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._leave(exception)

    def teardown(self) -> None:
        self._leave(None)  # Before the model moves to another device.
        super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        if self._is_inside:
            self._is_inside = False
            self.run.__exit__(error and type(error), error, error and error.__traceback__)

    # ------------------------------------------------------------ data

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        if self.run is None or not self._trainer.training:
            return dataloader
        if not isinstance(dataloader, torch.utils.data.DataLoader):
            raise refuse(
                f"a {type(dataloader).__name__} as train_dataloader",
                "the run cuts the batches itself",
                "give a DataLoader of torch's with a dataset and a batch_size",
            )
        if dataloader.batch_size is None:
            raise refuse(
                "batch_sampler=", "the run cuts the batches", "give the DataLoader batch_size"
            )
        return EpochShare(self.run, dataloader, dataloader.batch_size, self._end)

    def _end(self) -> None:
        """The run is over: Lightning would begin empty epochs for ever."""
        self._trainer.should_stop = True

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        count = self._trainer.accumulate_grad_batches
        if self.run is not None and count > 1:
            self._ends_step = self.run.micro(of=count)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether to step now, though not all batches of the step are there."""
        return self._ends_step

    # ------------------------------------------------------------ steps

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.run is not None:
            loss = closure_loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss
            self._batches += 1
        computed: torch.Tensor = super().backward(closure_loss, *args, **kwargs)
        return computed

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().optimizer_step(*args, **kwargs)
        run = self.run
        if run is None:
            return returned
        loss, count = self._loss, self._batches
        self._loss, self._batches = None, 0
        if loss is not None and count:  # Of a short step Lightning has divided by more.
            loss = loss * (self._trainer.accumulate_grad_batches / count)
        run.step(loss=loss)
        self.optimizers[0].zero_grad()  # Lightning does it by the number of the batch.
        for group, rate in zip(self.optimizers[0].param_groups, self._rates, strict=False):
            group["lr"] = rate * run.lr_factor
        if run.wants_stop:
            self._end()
        return returned

    # ------------------------------------------------------------ evaluations and checkpoints

    def _evaluated(self, _: Any) -> dict[str, float]:
        """As Lightning validates within an epoch."""
        trainer = self._trainer
        connector = trainer._logger_connector
        is_first = connector._first_loop_iter
        trainer.validating = True
        try:
            found = trainer.fit_loop.epoch_loop.val_loop.run()
        finally:
            trainer.training = True
            connector._first_loop_iter = is_first
        return {name: float(value) for metrics in found for name, value in metrics.items()}

    @property
    def is_global_zero(self) -> bool:
        return self.run is None or self.run.worker == 0
