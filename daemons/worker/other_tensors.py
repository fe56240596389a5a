"""The tensors of a model that are in no flat vector: buffers and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from daemons.worker.task.model_tensors import describe, find
from daemons.worker.task.user_task import TaskError
from dlctl.model.flat import AVERAGED, Layout, TensorEntry
from dlctl.model.frozen import entries
from dlctl.wire.messages import Array


class OtherTensors:
    """place: file:line of the code that may have changed a tensor's shape."""

    def __init__(
        self, model: nn.Module, layout: Layout, place: Callable[[], str | None] = lambda: None
    ) -> None:
        self._model, self._layout, self._place = model, layout, place

    def averaged(self) -> Array:
        """All persistent buffers, float64[n]; integers are exact."""
        parts = [
            self._tensor(entry).detach().reshape(-1).to(torch.float64)
            for entry, _, _ in self._layout.slices(AVERAGED)
        ]
        gathered = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device="cpu")
        return gathered.cpu().numpy()

    def load_averaged(self, values: Array) -> None:
        """Load values of `averaged()`; integer buffers are rounded."""
        assert values.shape == (self._layout.size(AVERAGED),)
        for entry, lo, hi in self._layout.slices(AVERAGED):
            source = torch.tensor(values[lo:hi], device="cpu").view(entry.shape)
            for tensor in self._tensors(entry):
                rounded = source if tensor.is_floating_point() else source.round()
                tensor.detach().copy_(rounded)

    def frozen(self) -> list[Tensor]:
        """The frozen parameters, in the order of `dlctl.model.frozen.entries`."""
        return [self._tensor(entry).detach() for entry in entries(self._layout)]

    def load_frozen(self, values: Mapping[int, Tensor]) -> None:
        """Replace some of `frozen()`, by position."""
        for entry, source in ((entries(self._layout)[n], value) for n, value in values.items()):
            for tensor in self._tensors(entry):
                tensor.detach().copy_(source.view(entry.shape))

    def _tensors(self, entry: TensorEntry) -> Iterator[Tensor]:
        """The tensor under each of its names: a move to a GPU separates shared buffers."""
        tensor = self._tensor(entry)
        yield tensor
        for alias in entry.aliases:
            other = find(self._model, alias)
            if other is not tensor:
                yield other

    def _tensor(self, entry: TensorEntry) -> Tensor:
        tensor = find(self._model, entry.name)
        if tuple(tensor.shape) != entry.shape:
            raise TaskError(
                f'{describe(tensor)} "{entry.name}" had the shape {list(entry.shape)} and now has '
                f"{list(tensor.shape)}",
                where=self._place(),
                hint="register it with persistent=False if it need not be saved",
            )
        return tensor


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put all buffers back at the end: the tensors, and their values."""
    kept = [
        (module, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, key, buffer, values in kept:
            buffer.detach().copy_(values)
            setattr(module, key, buffer)
