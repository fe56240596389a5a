"""How many samples a dataset is good for, which is what its method is asked about."""

from __future__ import annotations

import pytest
from leased import BATCH, Leased

from dlctl.errors import DlctlError
from dlctl.roles.coordinator.training.dataset import Dataset

UNEVEN = Dataset(3 * BATCH + 1)
"""Two portions, of 12 and 13 samples."""


def begins(target_samples: int, dataset: Dataset = UNEVEN, **stop: float) -> None:
    Leased(dataset, "target-batch", options={"target_samples": target_samples}, **stop)


@pytest.mark.parametrize(
    ("dataset", "epochs", "samples"),
    [
        (UNEVEN, 1.0, 25), (UNEVEN, 3.0, 75), (UNEVEN, 0.5, 12), (Dataset(BATCH), 3.0, 24),
        (Dataset(BATCH + 1), 1.0, 9),
    ],
)  # fmt: skip
def test_a_target_batch_above_all_samples_of_the_run_is_refused(
    dataset: Dataset, epochs: float, samples: int
) -> None:
    """Also where full batches would hold it: the last one of each portion may be smaller."""
    begins(samples, dataset, epochs=epochs)
    with pytest.raises(DlctlError, match=f"at most {samples} samples") as refused:
        begins(samples + 1, dataset, epochs=epochs)
    assert f"use {samples} or less" in refused.value.hint


def test_a_run_without_an_end_by_data_may_have_any_target_batch() -> None:
    begins(2**24, seconds=60.0)
