"""K-FAC's factors and steps next to those of another package, curvlinops. `make oracles` has it."""

from __future__ import annotations

import oracles
import pytest
import torch
from test_kfac_engine import DAMPING, TERMS, decomposed_with, drawn, made, matrices, recorded
from torch import nn

curvlinops = oracles.package("curvlinops")
MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: drawn(9, 6),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=(2, 1)),
            nn.Tanh(), nn.Flatten(), nn.LazyLinear(3),
        ),
        lambda: drawn(6, 2, 9, 8),
    ),
}  # fmt: skip


@pytest.mark.oracle("kfac", "curvlinops: KFACLinearOperator, its exact inverse")
@pytest.mark.parametrize("name", MODELS)
def test_factors_and_step_are_those_of_curvlinops(name, agree):
    build, batch = MODELS[name]
    inputs, labels = batch()

    def ready() -> nn.Module:
        model = build()
        model(inputs)  # Lazy layers get their sizes.
        return model

    stepper, engine = made(ready)
    gradient, factors = recorded(stepper, engine, (inputs, labels))
    model = stepper.replica.model
    # Never call its compute_kronecker_factors(): the first product does, and they would be doubled.
    theirs = curvlinops.KFACLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(inputs, labels)],
        fisher_type=curvlinops.FisherType.EMPIRICAL, separate_weight_and_bias=False,
        check_deterministic=False,
    )  # fmt: skip
    inverse = curvlinops.KFACInverseLinearOperator(theirs, damping=DAMPING, use_exact_damping=True)
    views = stepper.replica.views_of(gradient)
    expected = torch.cat([part.reshape(-1) for part in inverse @ [v.clone() for v in views]])
    decomposed_with(engine, factors)
    agree(engine.along_opt(gradient, TERMS)[0], expected.detach().numpy(), atol=1e-6, rtol=1e-4)
    for number, layer in enumerate(engine.layers):
        own_a, own_g = matrices(engine, factors, number)
        a = theirs._input_covariances[layer.sides.name]
        g = theirs._gradient_covariances[layer.sides.name]
        # Only the product of both means anything: with places, curvlinops has A/S and S G.
        scale = float(own_a.trace() / a.trace())
        for ours, asked in (
            (torch.kron(own_a, own_g), torch.kron(a, g)), (own_a / scale, a), (own_g * scale, g),
        ):  # fmt: skip
            largest = float(asked.abs().max())
            agree(ours / largest, asked / largest, atol=1e-6)
