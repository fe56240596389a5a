"""The layers of a model that K-FAC preconditions, and why it leaves the others alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from daemons.worker.task.user_task import TaskError
from dlctl.algorithms.methods.kfac_shapes import LayerSides, Side, side_of
from dlctl.model.flat import TRAINED, Layout
from dlctl.model.parameter_groups import SHOWN_MAX

KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, nn.Embedding)
Span = tuple[int, int]
"""Elements [lo, hi) of the flat vector."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, and where its parameters are."""

    module: nn.Module
    sides: LayerSides
    weight: Span
    bias: Span | None

    def gradient(self, vector: Tensor) -> Tensor:
        """The gradient as a matrix [g, a], with that of the bias as its last column. vector:
        float32[d].
        """
        weight = vector[slice(*self.weight)]
        if isinstance(self.module, nn.Embedding):
            return weight.view(self.sides.a.size, self.sides.g.size).T
        matrix = weight.view(self.sides.g.size, -1)
        if self.bias is None:
            return matrix
        return torch.cat([matrix, vector[slice(*self.bias)].view(-1, 1)], dim=1)

    def put(self, matrix: Tensor, vector: Tensor) -> None:
        """Write such a matrix to the places of the layer in float32[d]."""
        if isinstance(self.module, nn.Embedding):
            matrix = matrix.T
        elif self.bias is not None:
            vector[slice(*self.bias)] = matrix[:, -1]
            matrix = matrix[:, :-1]
        vector[slice(*self.weight)] = matrix.reshape(-1)


@dataclass(frozen=True, slots=True)
class KfacLayers:
    layers: tuple[Layer, ...]
    plain: Mapping[str, str]
    """Module with trained parameters -> why these are stepped along their gradients as they are."""


def found_in(model: nn.Module, layout: Layout, options: Any) -> KfacLayers:
    """The layers of a model. Raises TaskError if there are none, or for a pattern of `skip` that
    matches no module.
    """
    spans = {
        name: (lo, hi)
        for entry, lo, hi in layout.slices(TRAINED)
        for name in (entry.name, *entry.aliases)
    }
    modules = dict(model.named_modules())
    _check_patterns(options.skip, modules)
    users = Counter(id(each) for module in modules.values() for each in _own(module).values())
    layers, plain = [], {}
    for name, module in modules.items():
        trained = {key: value for key, value in _own(module).items() if value.requires_grad}
        if not trained:
            continue
        why = _why_plain(name, module, trained, users, options)
        if why:
            plain[name or "the model"] = why
            continue
        prefix = f"{name}." if name else ""
        bias = spans[f"{prefix}bias"] if "bias" in trained else None
        sides = _sides(name, module, options.max_dim, has_bias=bias is not None)
        layers.append(Layer(module, sides, spans[f"{prefix}weight"], bias))
    if not layers:
        raise TaskError(_lacking(modules, plain), hint='use another method, such as "allreduce"')
    return KfacLayers(tuple(layers), plain)


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the module itself has."""
    return {key: value for key, value in module._parameters.items() if value is not None}


def _why_plain(
    name: str, module: nn.Module, trained: Mapping[str, Tensor], users: Counter[int], options: Any
) -> str:
    """Why a module is no layer; "" if it is one."""
    kind = next((kind for kind in KINDS if isinstance(module, kind)), None)
    if kind is None:
        return f"a {type(module).__name__} is no linear layer"
    if type(module).forward is not kind.forward:
        return "it has a forward of its own"
    if "weight" not in trained or not trained.keys() <= {"weight", "bias"}:
        return "its weight is frozen, or computed from others"
    if any(users[id(value)] > 1 for value in trained.values()):
        return "another module has the same weight"
    if any(fnmatchcase(name, pattern) for pattern in options.skip):
        return "skip names it"
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return f"it has {module.groups} groups"
    if isinstance(module, nn.Embedding):
        if not options.embeddings:
            return "embeddings = false"
        if module.scale_grad_by_freq or module.max_norm is not None:
            return "its gradient is scaled, or its rows"
    return ""


def _sides(name: str, module: nn.Module, max_dim: int, *, has_bias: bool) -> LayerSides:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if isinstance(module, nn.Embedding):
        return LayerSides(
            name, Side(weight.shape[0], "diagonal"), side_of(weight.shape[1], max_dim)
        )
    columns = math.prod(weight.shape[1:]) + has_bias
    return LayerSides(name, side_of(columns, max_dim), side_of(weight.shape[0], max_dim))


def _check_patterns(patterns: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    lost = [p for p in patterns if not any(fnmatchcase(name, p) for name in modules)]
    if lost:
        names = [name for name, module in modules.items() if isinstance(module, KINDS)]
        raise TaskError(
            f'no module of the model has a name like "{lost[0]:.100}"',
            where="skip in [algorithm] of the job file",
            hint=f"its layers are {', '.join(names[:SHOWN_MAX]) or 'none'}",
        )


def _lacking(modules: Mapping[str, nn.Module], plain: Mapping[str, str]) -> str:
    kinds = Counter(type(modules[name if name in modules else ""]).__name__ for name in plain)
    has = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    why = "; ".join(f"{name}: {why}" for name, why in [*plain.items()][:SHOWN_MAX])
    return f"kfac finds no layer to precondition: the model trains {has or 'nothing'} ({why})"


def described(found: KfacLayers) -> Iterator[str]:
    """Lines for the log."""
    yield f"kfac preconditions {len(found.layers)} layers"
    for layer in found.layers:
        large = [s for s in (layer.sides.a, layer.sides.g) if s.kind == "identity"]
        if large:
            sizes = " and ".join(str(side.size) for side in large)
            yield f"kfac: {layer.sides.name} has the identity for its side of {sizes}: max_dim"
    by_reason: dict[str, list[str]] = {}
    for name, why in found.plain.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        yield f"kfac leaves {', '.join(names[:SHOWN_MAX])}{more} alone: {why}"
