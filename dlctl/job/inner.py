"""The optimiser inside a replica, `[inner]`: all names and their options.

The worker creates torch's own object over the model's parameters
(`daemons/worker/inner_optimizer.py`). This module has only its options, so that a job file can be
checked without torch; a test compares them with torch's signatures. A third-party class is `name =
"package.module:Class"`: its options are checked when the worker builds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from dlctl.job.config import STRICT, Choice
from dlctl.job.settings import Setting, number_within
from dlctl.util.numeric_limits import LocalRate, WeightDecay

NONE = "none"
"""No steps of its own."""
OF_SCRIPT = "script"
"""A training loop of the user's own makes them, with its own optimizer."""
SAVED_AS = "inner."
"""Prefix of the names of its state, in the file of its replica."""
OF = f"{SAVED_AS}of"
"""The optimiser of the state: `identity`."""
Decay = Annotated[float, Ge(0), Lt(1)]
"""Decay of a running mean per step."""
Epsilon = Annotated[float, Ge(0)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Betas = tuple[Decay, Decay]
INNER_LR = Setting(help="rate of a replica's own steps, the peak of a schedule",
                   parse=number_within(LocalRate), option="lr")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NoInnerOptions:
    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerSGDOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-3
    """Rate of a replica's own steps; 0: it makes none. Live: `dlctl set inner_lr`."""
    momentum: NotNegative = 0.0
    dampening: float = 0.0
    weight_decay: WeightDecay = 0.0
    nesterov: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsOptions:
    """What all of Adam's kind have."""

    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-3
    """Rate of a replica's own steps. Live: `dlctl set inner_lr`."""
    betas: Betas = (0.9, 0.999)
    """How much of the mean gradient, and of the mean square, stays at each step."""
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerAdamOptions(MomentsOptions):
    amsgrad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerAdamWOptions(InnerAdamOptions):
    weight_decay: WeightDecay = 1e-2
    """Decoupled: a weight shrinks by lr times this at each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NAdamOptions(MomentsOptions):
    lr: LocalRate = 2e-3
    momentum_decay: NotNegative = 4e-3
    decoupled_weight_decay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RAdamOptions(MomentsOptions):
    decoupled_weight_decay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamaxOptions(MomentsOptions):
    lr: LocalRate = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAdamOptions:
    __pydantic_config__ = STRICT

    lr: Annotated[float, Gt(0)] = 1e-3
    """All gradients have to be sparse."""
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerAdagradOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-2
    lr_decay: NotNegative = 0.0
    weight_decay: WeightDecay = 0.0
    initial_accumulator_value: NotNegative = 0.0
    eps: Epsilon = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class AdadeltaOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1.0
    rho: Annotated[float, Ge(0), Lt(1)] = 0.9
    eps: Epsilon = 1e-6
    weight_decay: WeightDecay = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerRMSpropOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-2
    alpha: Annotated[float, Ge(0), Lt(1)] = 0.99
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.0
    momentum: NotNegative = 0.0
    centered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RpropOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-2
    etas: tuple[Annotated[float, Gt(0), Lt(1)], Annotated[float, Gt(1)]] = (0.5, 1.2)
    step_sizes: tuple[Positive, Positive] = (1e-6, 50.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASGDOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: WeightDecay = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-2
    beta2_decay: Annotated[float, Lt(0)] = -0.8
    d: Annotated[float, Ge(1)] = 1.0
    weight_decay: WeightDecay = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonOptions:
    __pydantic_config__ = STRICT

    lr: LocalRate = 1e-3
    """The learning rate of matrices. Live: `dlctl set inner_lr`; `adamw.lr` moves along."""
    weight_decay: WeightDecay = 0.1
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    nesterov: bool = True
    eps: Epsilon = 1e-7
    ns_steps: Annotated[int, Ge(1), Lt(100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """How lr depends on the shape of a matrix; "match_rms_adamw": rates as with AdamW."""
    adamw: InnerAdamWOptions = field(default_factory=InnerAdamWOptions)
    """Options of AdamW, for all parameters that are not two-dimensional."""


@dataclass(frozen=True, slots=True)
class Inner:
    """One entry of the registry."""

    Options: type[Any] | None
    """None: any."""
    torch: str = ""
    """The class of torch.optim; "": none, or a third party's."""
    sparse_but_for: tuple[str, ...] | None = None
    """The options with which it takes no sparse gradients; None: it never does, or is a third
    party's."""
    sparse_alone: bool = False
    """The optimiser takes no dense gradients."""
    live: Mapping[str, Setting] = field(default_factory=lambda: {"inner_lr": INNER_LR})


NO_STEPS = Inner(NoInnerOptions, live={})
SCRIPT = Inner(NoInnerOptions, live={})
FOREIGN = Inner(None)
SGD = Inner(InnerSGDOptions, "SGD", ("weight_decay", "nesterov"))
ADAM = Inner(InnerAdamOptions, "Adam")
ADAMW = Inner(InnerAdamWOptions, "AdamW")
NADAM = Inner(NAdamOptions, "NAdam")
RADAM = Inner(RAdamOptions, "RAdam")
ADAMAX = Inner(AdamaxOptions, "Adamax")
SPARSEADAM = Inner(SparseAdamOptions, "SparseAdam", (), sparse_alone=True)
ADAGRAD = Inner(InnerAdagradOptions, "Adagrad", ("weight_decay",))
ADADELTA = Inner(AdadeltaOptions, "Adadelta")
RMSPROP = Inner(InnerRMSpropOptions, "RMSprop")
RPROP = Inner(RpropOptions, "Rprop", live={})
ASGD = Inner(ASGDOptions, "ASGD")
ADAFACTOR = Inner(AdafactorOptions, "Adafactor")
MUON = Inner(MuonOptions, "Muon")


def identity(choice: Choice) -> bytes:
    """The optimiser's name, and the options that determine its state."""
    flags = {key: value for key, value in choice.options.items() if isinstance(value, bool)}
    flags["momentum"] = bool(choice.options.get("momentum"))
    return json.dumps([choice.name, flags], sort_keys=True).encode()


def keeps_nothing(choice: Choice) -> bool:
    """Whether no step depends on earlier ones, so that there is nothing to save."""
    return choice.name in (NONE, "sgd") and not choice.options.get("momentum")


def is_plain(choice: Choice) -> bool:
    """Whether an optimiser is stateless in torch, if known here: then a step is an addition."""
    return ":" in choice.name or keeps_nothing(choice)
