"""A model that cannot become one flat vector is refused, with the tensor's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stepping import gradient_of
from torch import Tensor, nn

from daemons.worker.replica import TorchReplica
from daemons.worker.task.model_tensors import layout_of
from daemons.worker.task.user_task import TaskError
from dlctl.model.flat import ROWS, TensorEntry


def parameter_of(tensor: Tensor) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_parameter("odd", nn.Parameter(tensor))
        return module

    return model


def sharing_memory() -> nn.Module:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    return model


def with_large_integers() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("hashes", torch.tensor([2**60 + 1]))
    return model


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (parameter_of(torch.ones(2, dtype=torch.complex64)), 'parameter "odd" is complex64'),
        (parameter_of(torch.ones(2, 2).to_sparse()), 'parameter "odd" is float32 .sparse_coo.'),
        (lambda: nn.LazyLinear(3), 'parameter "weight" has no shape yet'),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "the model has nothing to train"),
        (nn.ReLU, "the model has nothing to train"),
        (sharing_memory, 'parameters "0.weight" and "1.weight" share memory'),
        (with_large_integers, 'buffer "hashes" holds 1152921504606846977'),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_named(task_of, model, complaint):
    with pytest.raises(TaskError, match=complaint) as caught:
        TorchReplica(task_of(model=model), device="cpu", seed=0)
    assert caught.value.where is not None
    assert caught.value.hint or "dense" in caught.value.message


def test_a_table_with_the_name_of_a_tensor_is_named():
    """An export has both, by their names."""
    tables = (TensorEntry("bias", ROWS, (4, 2), "float32", init=("constant", 0.0, 0.0)),)
    with pytest.raises(TaskError, match='"bias"'):
        layout_of(nn.Linear(2, 2), tables)


def test_a_buffer_that_changes_its_shape_is_named(task_of):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("history", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.history = torch.cat([self.history, x.new_ones(1)])
            return self.layer(x)

    replica = TorchReplica(task_of(model=Growing), device="cpu", seed=0)
    gradient_of(replica, torch.ones(2, 6))
    with pytest.raises(TaskError, match=r'"history".*\[1\].*\[2\]'):
        replica.averaged()
