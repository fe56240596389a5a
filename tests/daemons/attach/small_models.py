"""Models as users have them, small ones, and a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Image(nn.Module):
    """A convolution with batch normalisation, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(batch)).relu().mean((2, 3)))


class Tied(nn.Module):
    """The weight of the last layer is that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(batch)).tanh())


def image(**how: torch.memory_format | torch.dtype) -> Image:
    torch.manual_seed(3)
    return Image().to(**how)


def tied() -> Tied:
    torch.manual_seed(4)
    return Tied()


def backward(model: nn.Module, step: int) -> None:
    """The gradients of a batch that depends on the step."""
    draws = torch.Generator().manual_seed(step)
    if any(isinstance(each, nn.Embedding) for each in model.modules()):
        batch = torch.randint(5, (6,), generator=draws)
    else:
        like = next(model.parameters())
        batch = torch.randn(6, 3, 5, 5, generator=draws).to(like.dtype)
    target = torch.randint(5, (6,), generator=draws)
    nn.functional.cross_entropy(model(batch).float(), target).backward()


def values_of(model: nn.Module) -> list[bytes]:
    """The bytes of all parameters and buffers, in row-major order."""
    return [
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for tensor in model.state_dict().values()
    ]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "float32": image,
    "channels_last": lambda: image(memory_format=torch.channels_last),
    "tied": tied,
}
