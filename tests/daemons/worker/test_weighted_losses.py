"""A loss may return the weight of its batch: a step of several is then the mean over their tokens,
not the mean of their means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stepping import choice, stepper_of
from torch import Tensor, nn
from torch.nn import functional

from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.early_sum import EarlySum
from daemons.worker.task.user_task import Task, TaskError

TOKENS, WORDS, LONGEST = [9, 1, 4, 2, 7, 3, 1, 8], 13, 9
IGNORED = -100


class Texts:
    """Texts of different lengths; the loss is the mean over the tokens of the batch."""

    def __init__(self, weight: Callable[[int], Any] = float, *, sparse: bool = False) -> None:
        self.weight, self.sparse = weight, sparse

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 6, sparse=self.sparse), nn.Linear(6, WORDS))

    def dataset(self) -> list[Tensor]:
        rng = torch.Generator().manual_seed(2)
        return [torch.randint(WORDS, (n + 1,), generator=rng) for n in TOKENS]

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, y = torch.zeros(len(samples), LONGEST, dtype=torch.int64), None
        y = torch.full_like(x, IGNORED)
        for row, text in enumerate(samples):
            x[row, : len(text) - 1], y[row, : len(text) - 1] = text[:-1], text[1:]
        return x, y

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        scores = model(x).flatten(0, 1)
        count = int((y != IGNORED).sum())
        loss = functional.cross_entropy(scores, y.flatten(), ignore_index=IGNORED)
        right = (scores.argmax(1) == y.flatten()).sum() / count
        return loss, {"right": right}, self.weight(count)


class Unweighted(Texts):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return super().loss(model, batch)[:2]


def batches(task: Texts, size: int, accumulate: int, number: int = 0) -> Any:
    data = PortionLoader(
        task.dataset(), batch_size=size, accumulate=accumulate, seed=0, shuffle=False, processes=0,
        collate=task.collate,
    )  # fmt: skip
    return data.step(0, 0, len(TOKENS), number).batches


WEIGHTS: dict[str, Callable[[int], Any]] = {
    "float": float,
    "int": int,
    "numpy": np.int64,
    "tensor": torch.tensor,
    "array": lambda count: torch.tensor([count]),
    "fraction": lambda count: count / 1e6,
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("size", "accumulate"), [(4, 2), (2, 4), (1, 8)])
def test_batches_of_unequal_tokens_are_one_step_of_all_their_tokens(
    kind: str, size: int, accumulate: int
) -> None:
    task = Texts(WEIGHTS[kind])
    whole = stepper_of(Unweighted()).step(batches(task, 8, 1))
    several = batches(task, size, accumulate)
    assert len(several) == accumulate
    step = stepper_of(task).step(several)
    assert step.loss == pytest.approx(whole.loss, rel=1e-6)
    assert step.metrics == pytest.approx(whole.metrics, rel=1e-6)
    np.testing.assert_allclose(step.gradient, whole.gradient, rtol=1e-6, atol=1e-7)
    of_means = stepper_of(Unweighted()).step(several)
    assert not np.allclose(of_means.gradient, whole.gradient, rtol=1e-2), "the mean of means"


def test_own_steps_are_those_of_one_large_batch() -> None:
    task, chosen = Texts(), choice("adamw")
    one, several = stepper_of(Unweighted(), chosen), stepper_of(task, chosen, clip_norm=0.1)
    one.clip_norm = 0.1
    for number in range(2):
        one.step(batches(task, 4, 1, number), own_lr=0.1, gather=False)
        several.step(batches(task, 2, 2, number), own_lr=0.1, gather=False)
    np.testing.assert_allclose(several.replica.parameters, one.replica.parameters, atol=1e-6)


def test_the_weight_of_a_step_s_only_batch_changes_nothing() -> None:
    step, plain = (stepper_of(task).step(batches(task, 8, 1)) for task in (Texts(), Unweighted()))
    assert step.loss == plain.loss
    assert step.metrics == plain.metrics
    assert np.array_equal(step.gradient, plain.gradient)


def test_sparse_gradients_are_weighed_too() -> None:
    whole = stepper_of(Unweighted()).step(batches(Texts(), 8, 1))
    step = stepper_of(Texts(sparse=True)).step(batches(Texts(), 2, 4))
    np.testing.assert_allclose(step.gradient, whole.gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_scale_of_the_loss_is_not_multiplied_by_tokens(precision: str) -> None:
    """With weights of thousands a scaled gradient in float16 would be infinite."""
    task = Texts(lambda count: 1000 * count)
    whole = stepper_of(Unweighted(), precision=precision).step(batches(task, 8, 1))
    step = stepper_of(task, precision=precision).step(batches(task, 2, 4))
    assert step.is_usable
    np.testing.assert_allclose(step.gradient, whole.gradient, rtol=0.1, atol=2e-3)


def test_a_batch_of_weight_0_does_not_count() -> None:
    """Wherever it is among the others."""
    task = Texts()
    plain = batches(task, 4, 2)
    expected = stepper_of(task).step(plain)
    empty = tuple(torch.ones(3, LONGEST, dtype=torch.int64) for _ in range(2))

    class HasEmpty(Texts):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
            loss, metrics, weight = super().loss(model, batch)
            return loss, metrics, 0 if len(batch[0]) == 3 else weight

    for at in range(3):
        with_empty = [*plain[:at], (empty, 0.5), *plain[at:]]
        step = stepper_of(HasEmpty()).step(with_empty)
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        assert step.metrics == pytest.approx(expected.metrics)
        np.testing.assert_allclose(step.gradient, expected.gradient, rtol=1e-5, atol=1e-8)
    nothing = stepper_of(HasEmpty()).step([(empty, 0.5), (empty, 0.5)])
    assert not nothing.is_usable
    assert np.isnan(nothing.loss)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_a_weight_that_is_none_is_an_error_of_the_task(weight: Any) -> None:
    with pytest.raises(TaskError, match=r"task\.loss\b"):
        stepper_of(Texts(lambda count: weight)).step(batches(Texts(), 4, 2))


@pytest.mark.parametrize("weight", ["3", {}, torch.ones(2)])
def test_a_weight_that_is_no_number_is_an_error_of_the_task(weight: Any) -> None:
    with pytest.raises(TaskError, match=r"task\.loss\[2\]"):
        stepper_of(Texts(lambda count: weight)).step(batches(Texts(), 4, 2))


def test_all_batches_have_a_weight_or_none_has() -> None:
    given = iter([3, None])
    with pytest.raises(TaskError, match="weight"):
        stepper_of(Texts(lambda count: next(given))).step(batches(Texts(), 4, 2))


def test_a_loss_of_rows_has_no_weight() -> None:
    class Rows(Texts):
        def tables(self) -> dict[str, Any]:
            return {"words": (10, 2, 0.0)}

        def rows(self, batch: Any) -> dict[str, Tensor]:
            return {}

    task = Task(Rows())
    with pytest.raises(TaskError, match="rows"):
        task.loss(task.model(), Texts().collate(Texts().dataset()))


def test_a_sum_over_a_group_begins_early_only_if_no_earlier_batch_is_to_be_weighed() -> None:
    begun: list[int] = []

    def begin(size: int, weight: float) -> EarlySum | None:
        begun.append(size)
        return None

    for task, size, expected in ((Texts(), 8, 1), (Texts(), 4, 0), (Unweighted(), 4, 1)):
        begun.clear()
        stepper_of(task).step(batches(task, size, 8 // size), begin_sum=begin)
        assert len(begun) == expected
