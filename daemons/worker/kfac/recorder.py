"""What the layers of a model are given in a step: the sums of a a^T and g g^T over its rows.

A forward hook on each layer puts a hook on its output, which gets the gradient there. Unlike a full
backward hook it allows an in-place operation behind the layer; and with checkpointing, whose first
or second forward pass has no such gradient, each row counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from daemons.worker.kfac.layers import Layer

CHUNK = 1 << 24
"""Elements of the unfolded input of a convolution at a time."""


class Sums:
    """Of one layer and one step."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.rows = 0
        self.a: Tensor | None = None
        """float32[a, a], or float32[a] if it is diagonal; None: not needed, or no row yet."""
        self.g: Tensor | None = None

    def add(self, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """inputs: of the layer. gradients: of the loss, times the scale, at its outputs."""
        sides = self.layer.sides
        if isinstance(self.layer.module, nn.Embedding):
            self._add_tokens(inputs, gradients.float() / scale)
            return
        has_bias = self.layer.bias is not None
        for a, g in pieces(self.layer.module, inputs, gradients):
            self.rows += len(a)
            if sides.a.kind == "matrix":
                a = a.float()
                a = functional.pad(a, (0, 1), value=1.0) if has_bias else a
                self.a = _with_gram(self.a, a)
            if sides.g.kind == "matrix":
                self.g = _with_gram(self.g, g.float() / scale)

    def _add_tokens(self, tokens: Tensor, gradients: Tensor) -> None:
        module, sides = self.layer.module, self.layer.sides
        tokens, g = tokens.reshape(-1), gradients.reshape(-1, sides.g.size)
        if (padding := module.padding_idx) is not None:  # Its row gets no gradient.
            kept = tokens != padding
            tokens, g = tokens[kept], g[kept]
        self.rows += len(tokens)
        counts = torch.bincount(tokens, minlength=sides.a.size).float()
        self.a = counts if self.a is None else self.a + counts
        if sides.g.kind == "matrix":
            self.g = _with_gram(self.g, g)


def _with_gram(total: Tensor | None, rows: Tensor) -> Tensor:
    return rows.T @ rows if total is None else total.addmm_(rows.T, rows)


def pieces(module: nn.Module, inputs: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(a[rows, a], g[rows, g]) of a Linear or a Conv2d, a part of the rows at a time."""
    if isinstance(module, nn.Linear):
        yield inputs.reshape(-1, inputs.shape[-1]), gradients.reshape(-1, gradients.shape[-1])
        return
    assert isinstance(module, nn.Conv2d)
    if inputs.dim() == 3:  # One image without a batch.
        inputs, gradients = inputs[None], gradients[None]
    places = gradients.shape[2] * gradients.shape[3]
    each = module.weight[0].numel() * places
    step = max(1, CHUNK // max(1, each))
    parts = zip(torch.split(inputs, step), torch.split(gradients, step), strict=True)
    for a, g in parts:
        patches = functional.unfold(
            padded(module, a), module.kernel_size, dilation=module.dilation, stride=module.stride
        )
        yield patches.transpose(1, 2).flatten(0, 1), g.flatten(2).transpose(1, 2).flatten(0, 1)


def padded(module: nn.Conv2d, images: Tensor) -> Tensor:
    """The images with the convolution's own padding, in its mode."""
    sides: list[int] = []
    for number in (1, 0):  # The last dimension comes first.
        if module.padding == "valid":
            before = after = 0
        elif module.padding == "same":
            total = module.dilation[number] * (module.kernel_size[number] - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = int(module.padding[number])
        sides += [before, after]
    if not any(sides):
        return images
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(images, sides, mode=mode)


class Recorder:
    """Records the steps that it is told to."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self._is_on = self._is_next = False
        self._samples, self._scale = 0, 1.0
        self._sums: list[Sums] = []
        for number, layer in enumerate(layers):
            layer.module.register_forward_hook(partial(self._on_forward, number), with_kwargs=True)

    def record_next(self) -> None:
        """Record the next step."""
        self._is_next = True

    def begin(self, samples: int, scale: float) -> None:
        """A step begins."""
        self._is_on, self._is_next = self._is_next, False
        self._samples, self._scale = samples, scale
        self._sums = [Sums(layer) for layer in self.layers] if self._is_on else []

    def reweigh(self, factor: Tensor) -> None:
        """All gradients of the step so far are multiplied by this."""
        for sums in self._sums:
            if sums.g is not None:
                sums.g *= factor**2

    def drop(self) -> None:
        """Forget the step."""
        self._is_on, self._sums = False, []

    def _on_forward(
        self, number: int, module: nn.Module, inputs: Any, named: Any, output: Tensor
    ) -> None:
        is_wanted = self._is_on and module.training and torch.is_grad_enabled()
        if is_wanted and output.requires_grad:
            given = inputs[0] if inputs else named["input"]
            hook = partial(self._on_gradient, self._sums[number], given.detach())
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, sums: Sums, inputs: Tensor, gradient: Tensor) -> None:
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            sums.add(inputs, gradient, self._scale)

    def factors(self) -> list[tuple[Tensor | None, Tensor | None, bool]]:
        """(A, G, whether it was seen) of each layer, of the newest step; forgets it."""
        found: list[tuple[Tensor | None, Tensor | None, bool]] = []
        for sums in self._sums or [Sums(layer) for layer in self.layers]:
            a = sums.a / sums.rows if sums.a is not None and sums.rows else None
            g = sums.g * self._samples if sums.g is not None else None
            found.append((a, g, sums.rows > 0))
        self.drop()
        return found
