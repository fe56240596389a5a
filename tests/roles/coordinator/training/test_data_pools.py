"""How many steps a dataset is good for, which is what its method is asked about."""

from __future__ import annotations

import pytest
from leased import BATCH, Leased

from dlctl.errors import DlctlError
from dlctl.roles.coordinator.training.dataset import Dataset

UNEVEN = Dataset(3 * BATCH + 1)
"""Two portions, of two batches each."""


def begins(target_samples: int, dataset: Dataset = UNEVEN, **stop: float) -> None:
    Leased(dataset, "target-batch", options={"target_samples": target_samples}, **stop)


@pytest.mark.parametrize(
    ("dataset", "epochs", "steps"),
    [(UNEVEN, 1.0, 4), (UNEVEN, 3.0, 12), (UNEVEN, 0.5, 2), (Dataset(BATCH), 3.0, 3)],
)
def test_a_target_batch_above_all_batches_of_the_run_is_refused(
    dataset: Dataset, epochs: float, steps: int
) -> None:
    """Also one between the batches and the portions, of which the last ones may be shorter."""
    begins(steps * BATCH, dataset, epochs=epochs)
    with pytest.raises(DlctlError, match=f"at most {steps * BATCH} samples") as refused:
        begins(steps * BATCH + 1, dataset, epochs=epochs)
    assert f"use {steps * BATCH} or less" in refused.value.hint


def test_a_run_without_an_end_by_data_may_have_any_target_batch() -> None:
    begins(2**24, seconds=60.0)
