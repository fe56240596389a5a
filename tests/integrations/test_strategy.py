"""Lightning's Trainer in a run: its steps are those of a plain loop over the same batches."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_run import RATE, Attached, FakeRun, Points, equal_after, line, trained
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from dlctl.errors import DlctlError
from dlctl.integrations.lightning import DlctlStrategy

SIZE = 4


class Regression(pl.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.line, self.count = line(), optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Any, index: int) -> Any:
        return torch.nn.functional.mse_loss(self.line(batch["x"]), batch["labels"])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=RATE) for _ in range(self.count)]


def trainer(path: Path, **options: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "strategy": DlctlStrategy(),
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": path,
        "max_epochs": 1,
    }
    return pl.Trainer(**given | options)


def data(points: int = 64) -> DataLoader:
    return DataLoader(Points(points), batch_size=SIZE)


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_steps_end_where_data_ends(
    tmp_path: Path, attached: Attached, takes_gradients: bool
) -> None:
    attached.run = run = FakeRun(2, 5, 1, 3, takes_gradients=takes_gradients)
    module = Regression()
    trainer(tmp_path, accumulate_grad_batches=3).fit(module, data())
    # Besides, Lightning ends a step at every third batch of an epoch.
    assert run.steps == [2, 1, 3, 1, 1, 1, 2]
    assert run.left == [""]


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_its_steps_are_those_of_a_plain_loop(
    tmp_path: Path, attached: Attached, takes_gradients: bool
) -> None:
    attached.run = run = FakeRun(4, 6, takes_gradients=takes_gradients)
    module, expected = Regression(), line()
    with equal_after(module.line, expected):
        trainer(tmp_path, accumulate_grad_batches=2).fit(module, data())
        losses = trained(expected, Points(64), SIZE, [2] * 5)
    assert run.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 2}])
def test_it_trains_until_the_run_is_over_whatever_the_script_says(
    tmp_path: Path, attached: Attached, limit: dict[str, int]
) -> None:
    attached.run = run = FakeRun(13, workers=4)
    mine = trainer(tmp_path, **limit)
    mine.fit(Regression(), data())
    assert run.steps == [1] * 13
    # A worker's share of 64 samples in batches of 4 is 4 batches.
    assert mine.current_epoch == 4
    assert mine.global_step == 13


@pytest.mark.parametrize("batches", [12, 13])
@pytest.mark.parametrize("limit", [{}, {"min_epochs": 100}, {"min_steps": 1000}])
def test_a_run_that_ends_while_data_is_waited_for_ends_the_training(
    tmp_path: Path, attached: Attached, batches: int, limit: dict[str, int]
) -> None:
    """Between two epochs of 4 batches, too."""
    attached.run = run = FakeRun(batches, workers=4, tells_end=False)
    module, begun = Regression(), []

    def begins() -> None:
        begun.append(len(begun))
        assert len(begun) < 9, "it goes on for ever"

    module.on_train_epoch_start = begins
    trainer(tmp_path, **limit).fit(module, data())
    assert run.steps == [1] * batches
    assert run.left == [""]


def test_the_run_validates_in_a_step(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(6, evaluates_at=(2, 6))
    module, expected = Regression(), line()
    with equal_after(module.line, expected):
        mine = trainer(tmp_path, check_val_every_n_epoch=100)
        mine.fit(module, data(), DataLoader(Points(8), batch_size=8))
        trained(expected, Points(64), SIZE, [1] * 6)
    assert [sorted(metrics) for metrics in run.evaluations] == [["val_loss"]] * 2
    assert run.evaluations[1] != run.evaluations[0]
    assert mine.global_step == 6


@pytest.mark.parametrize("worker", [0, 1])
def test_only_worker_0_writes_checkpoints(tmp_path: Path, attached: Attached, worker: int) -> None:
    attached.run = FakeRun(6, worker=worker, workers=2)
    saves = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, save_top_k=-1)
    mine = trainer(tmp_path, callbacks=[saves], enable_checkpointing=True)
    mine.fit(Regression(), data())
    mine.save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").exists() == (worker == 0)
    assert len([*tmp_path.glob("kept/*.ckpt")]) == (0 if worker else 2)


def test_the_rate_is_that_of_the_schedule_of_the_run(tmp_path: Path, attached: Attached) -> None:
    attached.run = FakeRun(3, lr_factor=0.25)
    module = Regression()
    mine = trainer(tmp_path)
    mine.fit(module, data())
    assert mine.optimizers[0].param_groups[0]["lr"] == pytest.approx(RATE / 4)


def test_the_workers_handler_of_sigterm_stays(tmp_path: Path, attached: Attached) -> None:
    attached.run = FakeRun(3)
    module, seen = Regression(), []
    module.on_train_batch_end = lambda *_: seen.append(signal.getsignal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    trainer(tmp_path).fit(module, data())
    assert seen == [before] * 3


def test_without_a_run_it_is_training_on_one_device(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(1, is_alone=True)
    mine, plain = Regression(), Regression()
    with equal_after(mine, plain):
        for module, how in ((mine, {}), (plain, {"strategy": "auto"})):
            trainer(tmp_path, max_epochs=2, **how).fit(module, data())
    assert not run.steps


def test_an_error_of_the_script_leaves_the_run(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(3)
    module = Regression()
    module.line.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path).fit(module, data())
    assert run.left == ["ZeroDivisionError"]


class Batches:
    def __iter__(self) -> Any:
        return iter(data())


REFUSED: dict[str, tuple[dict[str, Any], Any]] = {
    "reload_dataloaders_every_n_epochs": ({"reload_dataloaders_every_n_epochs": 1}, data()),
    "overfit_batches": ({"overfit_batches": 2}, data()),
    "max_time": ({"max_time": "00:00:10:00"}, data()),
    "EarlyStopping": ({"callbacks": [EarlyStopping("val_loss")]}, data()),
    "limit_train_batches=0": ({"limit_train_batches": 0}, data()),
    "batch_sampler": ({}, DataLoader(Points(8), batch_sampler=[[0, 1], [2, 3]])),
    "Batches": ({}, Batches()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_in_a_run_is_refused_by_name(
    tmp_path: Path, attached: Attached, name: str
) -> None:
    attached.run = run = FakeRun(3)
    options, loader = REFUSED[name]
    with pytest.raises(DlctlError, match=name) as raised:
        trainer(tmp_path, **options).fit(Regression(), loader)
    assert raised.value.hint
    assert not run.steps


@pytest.mark.parametrize("limit", [4, 0.25])
def test_with_a_limit_an_epoch_is_shorter_and_no_sample_is_left_out(
    tmp_path: Path, attached: Attached, limit: float
) -> None:
    attached.run = run = FakeRun(10)
    module, expected = Regression(), line()
    mine = trainer(tmp_path, limit_train_batches=limit)
    with equal_after(module.line, expected):
        mine.fit(module, data())
        trained(expected, Points(64), SIZE, [1] * 10)
    assert run.steps == [1] * 10
    # The last epoch ends with the run.
    assert mine.current_epoch == 3


def test_a_short_step_reports_the_mean_of_its_batches(tmp_path: Path, attached: Attached) -> None:
    """The last one of a limited epoch is short, as that of any epoch is."""
    attached.run = run = FakeRun(8)
    module = Regression()
    torch.nn.init.zeros_(module.line.weight)
    torch.nn.init.zeros_(module.line.bias)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    trainer(tmp_path, limit_train_batches=4, accumulate_grad_batches=3).fit(module, data())
    assert run.steps == [3, 1, 3, 1]
    batches = Points(64).y[: 8 * SIZE].view(8, SIZE).square().mean(1).tolist()
    means = [sum(batches[:3]) / 3, batches[3], sum(batches[4:7]) / 3, batches[7]]
    assert run.losses == pytest.approx(means, rel=1e-5)


def test_several_optimizers_are_refused_by_name(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(3)
    with pytest.raises(DlctlError, match="more than one optimizer"):
        trainer(tmp_path).fit(Regression(optimizers=2), data())
    assert not run.steps


def test_a_checkpoint_of_lightnings_is_refused_by_name(tmp_path: Path, attached: Attached) -> None:
    attached.run = FakeRun(1, is_alone=True)
    alone = trainer(tmp_path)
    alone.fit(Regression(), data())
    alone.save_checkpoint(tmp_path / "kept.ckpt")
    attached.run = run = FakeRun(3)
    with pytest.raises(DlctlError, match="ckpt_path"):
        trainer(tmp_path).fit(Regression(), data(), ckpt_path=str(tmp_path / "kept.ckpt"))
    assert not run.steps
