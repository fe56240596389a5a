"""Models with everything in them that real ones have, through workers and servers and back out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from workplace import Workplace

SAMPLES = """
    def dataset(self):
        generator = torch.Generator().manual_seed(5)
        label = torch.randint(0, 3, (96,), generator=generator)
        return TensorDataset({inputs}, label)

    def loss(self, model, batch):
        inputs, label = batch
        return functional.cross_entropy(model(inputs).float(), label)
"""
HEAD = """
import signal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

signal.signal(signal.SIGUSR1, lambda *_: None)  # The main thread alone may do that.
"""
PICTURES = (
    HEAD
    + '''

class Net(nn.Module):
    """Batch normalisation, dropout, a frozen layer, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.inside = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.inside.weight
        self.head = nn.Linear(4, 3)

    def forward(self, pictures):
        h = self.norm(self.filters(pictures)).relu().mean((2, 3))
        return self.head(self.dropout(self.again(self.inside(self.frozen(h)).tanh())))


class Pictures:
    def model(self):
        return Net()
'''
    + SAMPLES.format(
        inputs="torch.randn(96, 1, 6, 6, generator=generator) + label[:, None, None, None]"
    )
    + "\n\ntask = Pictures()\n"
)
WORDS = (
    HEAD
    + '''

class Net(nn.Module):
    """Sparse gradients, and parameters of another type than the masters on the servers."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(50, 6, sparse=True)
        self.hidden = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, words):
        h = self.hidden(self.words(words).to(torch.bfloat16)).tanh()
        return self.head(h.double())


class Words:
    def model(self):
        return Net()
'''
    + SAMPLES.format(
        inputs="torch.randint(0, 16, (96, 4), generator=generator) + 16 * label[:, None]"
    )
    + "\n\ntask = Words()\n"
)


def _model(place: Workplace) -> nn.Module:
    """The task's model as every worker built it."""
    names: dict[str, object] = {}
    exec((place.path / "train.py").read_text(), names)
    torch.manual_seed(0)
    model: nn.Module = names["task"].model()  # type: ignore[attr-defined]
    return model


def _exported(place: Workplace, name: str) -> dict[str, Tensor]:
    """The exported state, which the model takes without complaint."""
    ended = place.dlctl("checkpoint", "export", "-o", name)
    assert ended.code == 0, ended.err
    path = place.path / name
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    _model(place).load_state_dict(state, strict=True)
    return state


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.long
def test_buffers_are_averaged_frozen_layers_stay_and_tied_weights_stay_tied(
    place: Workplace,
) -> None:
    place.task(PICTURES)
    place.job(
        stop="{ steps = 24 }", workers=2, servers=2,
        more='[compression]\nname = "topk"\ndensity = 0.5\ndense_below = 0\n',
    )  # fmt: skip
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    before, after = _model(place).state_dict(), _exported(place, "m.pt")
    assert before.keys() == after.keys()
    assert set(before) - _changed(before, after) == {"frozen.weight", "frozen.bias"}
    assert after["norm.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(after["inside.weight"], after["again.weight"])
    place.nothing_left()


@pytest.mark.long
def test_sparse_gradients_and_other_types_are_trained_by_synchronous_steps(
    place: Workplace,
) -> None:
    place.task(WORDS)
    place.job(stop="{ steps = 24 }", workers=2, servers=2, algorithm='name = "sync"')
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    before, after = _model(place).state_dict(), _exported(place, "m.safetensors")
    assert _changed(before, after) == set(before)
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        "words.weight": torch.float32,
        "hidden.weight": torch.bfloat16,
        "hidden.bias": torch.bfloat16,
        "head.weight": torch.float64,
        "head.bias": torch.float64,
    }
    unseen = before["words.weight"][48:]
    assert torch.equal(after["words.weight"][48:], unseen), (
        "words that never occur stay as they are"
    )
    place.nothing_left()
