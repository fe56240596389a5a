"""transformers' Trainer in a run: its steps are those of a plain loop over the same batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import RATE, Attached, FakeRun, Points, equal_after, line, trained
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from dlctl.errors import DlctlError
from dlctl.integrations.transformers import DlctlTrainer

SIZE = 4


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.line(x), labels)
        return {"loss": loss, "logits": self.line(x)}


def trainer(path: Path, kind: type = DlctlTrainer, **options: Any) -> Trainer:
    given = {key: options.pop(key) for key in ("train_dataset", "model_init") if key in options}
    arguments = {
        "output_dir": str(path / "out"),
        "per_device_train_batch_size": SIZE,
        "optim": "sgd",
        "learning_rate": RATE,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    made = {"train_dataset": Points(64), "eval_dataset": Points(8)}
    if "model_init" not in given:
        made["model"] = Regression()
    return kind(args=TrainingArguments(**arguments | options), **made | given)


@pytest.mark.parametrize("takes_gradients", [False, True])
def test_steps_end_where_data_ends_and_weigh_all_their_batches_alike(
    tmp_path: Path, attached: Attached, takes_gradients: bool
) -> None:
    attached.run = run = FakeRun(2, 5, 1, 3, takes_gradients=takes_gradients)
    mine = trainer(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    expected, steps = line(), [2, 2, 2, 1, 1, 2, 1]
    with equal_after(mine.model.line, expected):
        mine.train()
        losses = trained(expected, Points(64), SIZE, steps)
    assert run.steps == steps
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.left == [""]
    assert mine.state.global_step == len(steps)


@pytest.mark.parametrize("limit", [{"num_train_epochs": 1}, {"max_steps": 2}])
def test_it_trains_until_the_run_is_over_whatever_the_script_says(
    tmp_path: Path, attached: Attached, limit: dict[str, int]
) -> None:
    attached.run = run = FakeRun(13, workers=4)
    mine = trainer(tmp_path, **limit)
    mine.train()
    assert run.steps == [1] * 13
    # A worker's share of 64 samples in batches of 4 is 4 batches.
    assert mine.state.epoch == pytest.approx(13 / 4)


def test_the_run_evaluates_in_a_step_and_no_log_is_lost(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(6, evaluates_at=(2, 6))
    mine = trainer(tmp_path)
    mine.train()
    assert [sorted(metrics) for metrics in run.evaluations] == [["eval_loss"]] * 2
    assert run.evaluations[1] != run.evaluations[0]
    assert all("eval_loss" not in report for report in run.reports)
    assert [log["step"] for log in mine.state.log_history if "loss" in log] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("worker", [0, 1])
def test_only_worker_0_saves_and_evaluates_by_itself(
    tmp_path: Path, attached: Attached, worker: int
) -> None:
    attached.run = run = FakeRun(6, worker=worker, workers=2)
    mine = trainer(
        tmp_path, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=2
    )
    mine.train()
    mine.save_model()
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    evaluated = [report for report in run.reports if "eval_loss" in report]
    assert mine.is_world_process_zero() == (worker == 0)
    assert len(evaluated) == (0 if worker else 3)
    assert {name for name in saved if "checkpoint" in name} == (
        set() if worker else {"checkpoint-3", "checkpoint-6"}
    )
    assert ("model.safetensors" in saved) == (worker == 0)


def test_the_rate_is_that_of_the_schedule_of_the_run(tmp_path: Path, attached: Attached) -> None:
    attached.run = FakeRun(3, lr_factor=0.25)
    mine = trainer(tmp_path)
    mine.train()
    rates = [log["learning_rate"] for log in mine.state.log_history if "loss" in log]
    assert rates == pytest.approx([RATE / 4] * 3)


def test_without_a_run_it_is_the_trainer(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(1, is_alone=True)
    mine, plain = (trainer(tmp_path, kind, num_train_epochs=2) for kind in (DlctlTrainer, Trainer))
    with equal_after(mine.model, plain.model):
        assert mine.train().global_step == plain.train().global_step == 32
    assert not run.steps


def test_an_error_of_the_script_leaves_the_run(tmp_path: Path, attached: Attached) -> None:
    attached.run = run = FakeRun(3)
    mine = trainer(tmp_path)
    mine.model.line.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mine.train()
    assert run.left == ["ZeroDivisionError"]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return itertools.repeat(Points(1)[0])


REFUSED = {
    "load_best_model_at_end": {
        "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps",
    },
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "resume_from_checkpoint": {"resume_from_checkpoint": "there"},
    "model_init": {"model_init": Regression},
    "IterableDataset": {"train_dataset": Stream(), "max_steps": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_in_a_run_is_refused_by_name(
    tmp_path: Path, attached: Attached, name: str
) -> None:
    attached.run = run = FakeRun(3)
    mine = trainer(tmp_path, **REFUSED[name])
    with pytest.raises(DlctlError, match=name) as raised:
        mine.train()
    assert raised.value.hint
    assert not run.steps


@pytest.mark.parametrize("name", ["DeepSpeed", "FSDP"])
def test_other_owners_of_the_parameters_are_refused_by_name(
    tmp_path: Path, attached: Attached, name: str
) -> None:
    attached.run = run = FakeRun(3)
    mine = trainer(tmp_path)
    setattr(mine, f"is_{name.lower()}_enabled", True)  # They need several processes, or a GPU.
    with pytest.raises(DlctlError, match=name):
        mine.train()
    assert not run.steps
