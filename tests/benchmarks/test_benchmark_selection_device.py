"""The selection on a GPU is measured with the same code on any device; here mostly on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import selection_device
from benchmarks.figures import table
from benchmarks.selection_device import (
    COPIED_ASKED,
    ELEMENTS,
    HostCopies,
    fitting,
    measure_devices,
    measure_on,
    selecting,
)
from dlctl.compress import magnitudes, plain, values
from dlctl.compress.magnitudes import Found, largest_of

SIZE = 20_000


@pytest.fixture(params=["host", "elsewhere"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tensors as the host's, or as those of a GPU are treated."""
    if request.param == "elsewhere":
        for module in (magnitudes, plain, values):
            monkeypatch.setattr(module, "host_view", lambda u: u)
    return str(request.param)


@pytest.mark.long
@pytest.mark.usefixtures("way")
def test_a_device_is_measured_against_reading_and_writing_the_same_vectors() -> None:
    speed, copied = measure_on("cpu", SIZE, rounds=2)
    assert speed.what == "cpu, 1.0% of 20,000 elements / read and write them"
    assert (speed.asked, speed.unit, len(speed.values)) == (2.0, "x", 2)
    assert min(speed.values) > 0
    assert copied.values == (0.0, 0.0, 0.0), "nothing is elsewhere"


@pytest.mark.usefixtures("way")
def test_every_round_selects_exactly_k_and_the_next_one_finds_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[tuple[int, int]] = []

    def noted(found: Found, k: int) -> Found:
        kept = largest_of(found, k)
        numbers.append((len(found.where), len(kept.where)))
        return kept

    monkeypatch.setattr(selection_device, "largest_of", noted)
    residual = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    before = residual.clone()
    select = selecting(residual, torch.zeros(SIZE), k := SIZE // 100)
    for _ in range(3):
        select()
    assert torch.equal(residual, before)
    assert len(set(numbers)) == 1
    found, kept = numbers[0]
    assert kept == k <= found <= 1.2 * k


def test_only_what_comes_to_the_host_from_elsewhere_is_counted() -> None:
    there = torch.empty(70, device="meta")
    with HostCopies() as copies:
        torch.ones(500).add(1).clone()
        there.add(1)
    assert copies.elements == 0
    with HostCopies() as copies:
        torch.empty_like(there, device="cpu")
        torch.empty_like(there[:5], device="cpu")
    assert copies.elements == 75


def test_without_a_gpu_the_table_says_so_and_what_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures = measure_devices(quick=False)
    assert [figure.skipped for figure in figures] == ["needs a CUDA device"] * 2
    assert [figure.asked for figure in figures] == [2.0, COPIED_ASKED]
    assert not any(figure.is_over() for figure in figures)
    first = table(figures).splitlines()[2]
    assert "cuda, 1.0% of 1,000,000,000 elements / read and write them" in first
    assert "skipped" in first


@pytest.mark.parametrize(
    ("gigabytes", "size"), [(140, ELEMENTS), (24, ELEMENTS), (16, ELEMENTS // 10), (0, 1)]
)
def test_a_card_with_less_memory_selects_from_as_many_tenths_as_fit(
    gigabytes: int, size: int
) -> None:
    assert fitting(ELEMENTS, gigabytes * 10**9) == size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_little_more_than_what_is_sent_is_copied_to_the_host() -> None:
    speed, copied = measure_on("cuda", 10_000_000, rounds=1)
    assert min(speed.values) > 0
    assert all(1 <= value <= COPIED_ASKED for value in copied.values)
