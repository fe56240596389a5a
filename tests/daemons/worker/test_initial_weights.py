"""Where training begins, and what is not trained: what is done to a model before it is laid out."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stepping import gradient_of
from torch import Tensor, nn

from daemons.worker import initial_weights
from daemons.worker.building import freeze
from daemons.worker.replica import TorchReplica
from daemons.worker.task.user_task import Task
from dlctl.errors import DlctlError
from dlctl.job.config import ParameterGroup
from dlctl.model.flat import CONSTANT, TRAINED


class Net(nn.Module):
    """A tied parameter, a buffer, and one that no state_dict has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(5, 4)
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def state() -> dict[str, Tensor]:
    return copied(Net(seed=1))


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", ["embed.weight", "head.weight", "both"])
def test_all_values_are_those_of_the_file(tmp_path: Path, state, tied: str) -> None:
    given = {n: t for n, t in state.items() if tied in (n, "both") or n not in
             ("embed.weight", "head.weight")}  # fmt: skip
    save_file(given, tmp_path / "start.safetensors")
    model = Net()
    initial_weights.load(model, tmp_path / "start.safetensors", strict=True)
    assert same(model, state)
    assert model.head.weight is model.embed.weight


def test_the_files_of_a_directory_are_one(tmp_path: Path, state) -> None:
    names = sorted(state)
    save_file({n: state[n] for n in names[:3]}, tmp_path / "model-1.safetensors")
    save_file({n: state[n] for n in names[3:]}, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    model = Net()
    initial_weights.load(model, tmp_path, strict=True)
    assert same(model, state)
    save_file({names[0]: state[names[0]]}, tmp_path / "more.safetensors")
    with pytest.raises(DlctlError, match=rf'"{names[0]}".*model-1'):
        initial_weights.load(model, tmp_path, strict=True)


def test_weights_that_are_a_fifo_are_named_and_not_waited_for(tmp_path: Path, state) -> None:
    save_file(state, tmp_path / "model-1.safetensors")
    os.mkfifo(tmp_path / "model-2.safetensors")
    with pytest.raises(DlctlError) as caught:
        initial_weights.load(Net(), tmp_path, strict=True)
    said = "cannot read the weights: it is a FIFO, not a regular file"
    assert (caught.value.message, caught.value.where) == (
        said, str(tmp_path / "model-2.safetensors"),
    )  # fmt: skip


def unfit(path: Path, state: dict[str, Tensor]) -> Path:
    del state["norm.bias"]
    state |= {f"old.{n}": torch.zeros(1) for n in range(12)} | {"head.bias": torch.zeros(4)}
    save_file(state, path / "start.safetensors")
    return path / "start.safetensors"


SAID = (
    "the weights do not fit the model: missing: norm.bias; not in the model: old.0, old.1, "
    "old.10, old.11, old.2, old.3, old.4, old.5, old.6, old.7 and 2 more; of another shape: "
    "head.bias [4], and not [5]"
)


def test_all_that_does_not_match_is_one_error_and_nothing_is_loaded(tmp_path: Path, state) -> None:
    model, before = Net(), copied(Net())
    with pytest.raises(DlctlError) as caught:
        initial_weights.load(model, unfit(tmp_path, state), strict=True)
    assert caught.value.message == SAID
    assert "strict = false" in str(caught.value.hint)
    assert same(model, before)


def test_without_strict_what_matches_is_loaded_and_the_rest_is_one_warning(
    tmp_path: Path, state, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = Net(), copied(Net())
    path = unfit(tmp_path, state)
    with caplog.at_level(logging.WARNING, "dlctl"):
        initial_weights.load(Net(), path, strict=False, warns=False)
        initial_weights.load(model, path, strict=False)
    (record,) = caplog.records
    assert SAID in record.getMessage()
    own = {name: before[name] for name in ("norm.bias", "head.bias")}
    assert same(model, {**state, **own})


def test_weights_of_which_nothing_fits_are_refused_in_any_case(tmp_path: Path, state) -> None:
    save_file({f"module.{n}": t for n, t in state.items()}, tmp_path / "start.safetensors")
    with pytest.raises(DlctlError, match="module") as caught:
        initial_weights.load(Net(), tmp_path, strict=False)
    assert "none" in str(caught.value.hint)


def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(DlctlError) as caught:
        initial_weights.load(Net(), tmp_path / "start.safetensors", strict=True)
    assert caught.value.hint
    (tmp_path / "start.safetensors").write_bytes(b"no such thing")
    with pytest.raises(DlctlError) as caught:
        initial_weights.load(Net(), tmp_path, strict=True)
    assert caught.value.where == str(tmp_path / "start.safetensors")


# ---------------------------------------------------------------- what is not trained


class Given:
    def model(self) -> nn.Module:
        return Net()

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model.head(model.norm(model.embed(batch))).square().sum()


def test_frozen_parameters_are_none_of_the_vector_and_stay_as_they_are() -> None:
    groups = (
        ParameterGroup(match=("head.bias",)),
        ParameterGroup(match=("head.*",), train=False),  # The tied one by its other name.
    )
    replica = TorchReplica(
        Task(Given()), device="cpu", seed=0, prepare=lambda model: freeze(model, groups)
    )
    kinds = {entry.name: entry.kind for entry in replica.layout.entries}
    assert kinds["embed.weight"] == CONSTANT
    assert [name for name, kind in kinds.items() if kind == TRAINED] == [
        "norm.weight", "norm.bias", "head.bias",
    ]  # fmt: skip
    step = gradient_of(replica, torch.tensor([1, 2, 3]))
    assert step.gradient.shape == (4 + 4 + 5,)
    assert step.gradient.any()


def test_patterns_for_no_parameter_are_one_error_with_the_names_that_are_close() -> None:
    groups = (
        ParameterGroup(match=("*.bias", "*.biases")),
        ParameterGroup(match=("nrom.*",), train=False),
    )
    with pytest.raises(DlctlError) as caught:
        freeze(Net(), groups)
    assert caught.value.message.endswith('"*.biases", "nrom.*"')
    assert "norm.weight, norm.bias, head.bias" in str(caught.value.hint)
    assert "[[parameters]]" in caught.value.where
