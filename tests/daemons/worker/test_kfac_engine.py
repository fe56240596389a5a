"""K-FAC's engine: factors and steps of real layers, and what it leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from stepping import stepper_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from daemons.worker.kfac.engine import KfacEngine, packed, unpacked
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import TaskError, calling
from dlctl.algorithms.engines import EnginePlace, Operations, TwinPlace
from dlctl.algorithms.methods.kfac import Options
from dlctl.algorithms.methods.kfac_twin import KfacTwin
from dlctl.sim.objectives import Batch, LeastSquares

DAMPING = 0.05
NEW_ALONE = np.array([DAMPING, 0.0, 0.0], np.float32)
"""damping, factor_decay, kl_clip: the factors are those of the newest step, and nu is 1."""
TERMS = np.array([DAMPING, 0.0, 0.1])


class Guesses:
    """A task: a model, and the cross entropy of its outputs."""

    def __init__(self, build: Callable[[], nn.Module], *, weighs: bool = False) -> None:
        self._build, self._weighs = build, weighs

    def model(self) -> nn.Module:
        return self._build()

    def dataset(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        inputs, labels = batch
        loss = functional.cross_entropy(model(inputs), labels)
        return (loss, {"weight": float(len(labels))}) if self._weighs else loss


def made(
    build: Callable[[], nn.Module], *, weighs: bool = False, precision: str = "fp32", **options: Any
) -> tuple[Stepper, KfacEngine]:
    stepper = stepper_of(Guesses(build, weighs=weighs), precision=precision)
    engine = KfacEngine(EnginePlace(stepper.replica, Options(**options)))
    stepper.tell(Operations(engine, "kfac", calling))
    return stepper, engine


def drawn(*shape: int, classes: int = 3, seed: int = 5) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng), torch.randint(classes, shape[:1], generator=rng)


def recorded(
    stepper: Stepper, engine: KfacEngine, *batches: tuple[Tensor, Tensor]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The gradient of a step, and its factors."""
    samples = sum(len(labels) for _, labels in batches)
    engine.record()
    parts = [(batch, len(batch[1]) / samples) for batch in batches]
    gradient = stepper.step(parts, samples=samples).gradient
    (factors,) = engine.given_factors()
    return np.array(gradient), factors


def decomposed_with(engine: KfacEngine, factors: np.ndarray[Any, Any]) -> None:
    engine.fold(factors, NEW_ALONE)
    engine.renew()
    engine.take_eigens(engine.given_eigens(np.ones((len(engine.layers), 2), np.uint8))[0])


def matrices(engine: KfacEngine, factors: np.ndarray[Any, Any], layer: int) -> list[Tensor]:
    """(A, G)"""
    return [
        unpacked(torch.from_numpy(factors[each.factor]), each.side.size)
        if each.side.kind == "matrix"
        else torch.diag(torch.from_numpy(factors[each.factor]))
        for each in engine.packing.sides[layer]
    ]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3, bias=False))


def cnn() -> nn.Module:
    """Strides, dilation, and each mode of padding."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(),
        nn.Conv2d(4, 3, (3, 2), padding=(2, 1), dilation=2, padding_mode="circular", bias=False),
        nn.Tanh(), nn.Conv2d(3, 3, 3, padding="same", padding_mode="reflect"), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Flatten(), nn.Linear(12, 3))


def tokens() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randint(7, (20, 3), generator=rng), torch.randint(3, (20,), generator=rng)


MODELS = {
    "linear": (mlp, lambda: drawn(9, 6), {}),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)),
        lambda: drawn(9, 5, 6),
        {},
    ),
    "conv": (cnn, lambda: drawn(6, 2, 9, 8), {}),
    "embedding": (embedding, tokens, {"embeddings": True}),
}
every_model = pytest.mark.parametrize("name", MODELS)

# ---------------------------------------------------------------- factors and steps


@pytest.mark.oracle("kfac", "the dense inverse of G (x) A + gamma I")
@every_model
def test_a_step_is_the_dense_inverse_times_the_gradient(name, agree):
    build, batch, options = MODELS[name]
    stepper, engine = made(build, **options)
    gradient, factors = recorded(stepper, engine, batch())
    decomposed_with(engine, factors)
    along, nu = engine.along_opt(gradient, TERMS)
    assert nu == 1
    expected = torch.from_numpy(gradient.astype(np.float64))
    for number, layer in enumerate(engine.layers):
        a, g = (matrix.double() for matrix in matrices(engine, factors, number))
        fisher = torch.kron(g, a) + DAMPING * torch.eye(len(a) * len(g))
        v = layer.gradient(expected)
        layer.put(torch.linalg.solve(fisher, v.reshape(-1)).view(v.shape), expected)
    agree(along, expected.numpy(), atol=1e-6, rtol=1e-4)


@pytest.mark.oracle("kfac", "its factors, sample by sample")
@every_model
def test_factors_are_means_over_the_rows_of_single_samples(name, agree):
    """Each sample's own backward pass gives its a and g."""
    build, batch, options = MODELS[name]
    stepper, engine = made(build, **options)
    inputs, labels = batch()
    _, factors = recorded(stepper, engine, (inputs, labels))
    singles = []
    for row in range(len(labels)):
        singles.append(recorded(stepper, engine, (inputs[row : row + 1], labels[row : row + 1]))[1])
    mean = np.mean(singles, 0)
    for layer, (of_a, of_g) in enumerate(engine.packing.sides):
        assert factors[engine.packing.seen[layer]] == 1
        agree(factors[of_g.factor], mean[of_g.factor], atol=1e-6, rtol=1e-5)
        if name != "embedding":  # Padding is no row, so samples have different numbers of them.
            agree(factors[of_a.factor], mean[of_a.factor], atol=1e-6, rtol=1e-5)


@every_model
@pytest.mark.parametrize("weighs", [False, True])
def test_four_batches_of_a_step_are_one(name, weighs):
    """Also if their sizes differ, and if the weights come from the task's loss."""
    build, batch, options = MODELS[name]
    stepper, engine = made(build, weighs=weighs, **options)
    inputs, labels = batch()
    whole, factors = recorded(stepper, engine, (inputs, labels))
    cuts = (0, 1, 3, 4, len(labels))
    pieces = [(inputs[lo:hi], labels[lo:hi]) for lo, hi in pairwise(cuts)]
    gradient, of_pieces = recorded(stepper, engine, *pieces)
    np.testing.assert_allclose(gradient, whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_pieces, factors, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_changes_factors_by_its_rounding_alone(precision):
    batch = drawn(64, 6)
    _, factors = recorded(*made(mlp), batch)
    stepper, engine = made(mlp, precision=precision)
    _, halved = recorded(stepper, engine, batch)
    assert 0 < np.abs(halved - factors).max() < 0.03 * np.abs(factors).max()


def test_a_step_that_is_discarded_leaves_no_factors():
    stepper, engine = made(mlp)
    engine.record()
    inputs, labels = drawn(9, 6)
    bad = stepper.step([((inputs * torch.nan, labels), 1.0)], samples=9)
    assert not bad.is_usable
    (factors,) = engine.given_factors()
    assert not factors.any()


def test_only_the_step_after_record_is_recorded_and_no_evaluation():
    stepper, engine = made(mlp)
    batch = drawn(9, 6)
    stepper.step([(batch, 1.0)], samples=9)
    assert not engine.given_factors()[0].any()
    engine.record()
    stepper.replica.evaluate(np.array(stepper.replica.parameters), np.zeros(0))
    stepper.replica.model.eval()(batch[0])
    _, factors = recorded(stepper, engine, batch)
    assert factors.any()
    stepper.step([(batch, 1.0)], samples=9)
    assert not engine.given_factors()[0].any()


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.tanh(self.layer(input=x))))


def test_a_layer_that_is_called_twice_has_the_rows_of_both_calls():
    stepper, engine = made(Twice)
    inputs, labels = drawn(9, 6)
    layer = copy.deepcopy(stepper.replica.model.layer)
    _, factors = recorded(stepper, engine, (inputs, labels))
    with torch.no_grad():
        second = torch.tanh(layer(inputs))
    rows = functional.pad(torch.cat([inputs, second]), (0, 1), value=1.0)
    a, _ = matrices(engine, factors, 0)
    np.testing.assert_allclose(a, rows.T @ rows / len(rows), rtol=1e-5, atol=1e-6)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(6, 5), mlp(), reentrant
        self.body = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_every_row_once(reentrant):
    batch = drawn(9, 6)
    _, plain = recorded(*made(lambda: Checkpointed(reentrant=None)), batch)
    _, factors = recorded(*made(lambda: Checkpointed(reentrant=reentrant)), batch)
    np.testing.assert_allclose(factors, plain, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- layers that are left alone


class Mixed(nn.Module):
    """One layer among all that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.grouped = nn.Conv2d(2, 2, 1, groups=2)
        self.layer, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.grouped(x[:, None].expand(-1, 2, -1, -1)).mean(1)
        x = self.weighted(self.frozen(torch.relu(self.layer(self.norm(x)))))
        return self.head(x.mean(1))[:, :3]


def test_what_is_no_layer_is_stepped_along_its_gradient(caplog):
    with caplog.at_level("INFO"):
        stepper, engine = made(Mixed, embeddings=True)
    assert [layer.sides.name for layer in engine.layers] == ["attention.out_proj", "layer"]
    assert all(
        name in caplog.text for name in ("head", "norm", "grouped", "weighted", "in_proj"[:2])
    )
    gradient, factors = recorded(stepper, engine, tokens())
    decomposed_with(engine, factors)
    along, _ = engine.along_opt(gradient, TERMS)
    of = {entry.name: slice(lo, hi) for entry, lo, hi in stepper.replica.layout.slices("trained")}
    moved = {
        name for name, place in of.items() if not np.array_equal(along[place], gradient[place])
    }
    # The attention never calls its `out_proj`.
    assert moved == {"layer.weight", "layer.bias"}


def test_layers_that_skip_names_are_left_alone_and_a_pattern_has_to_match():
    _, engine = made(mlp, skip=("2",))
    assert [layer.sides.name for layer in engine.layers] == ["0"]
    with pytest.raises(TaskError, match=r"blocks\.\*") as caught:
        made(mlp, skip=("blocks.*",))
    assert caught.value.hint is not None
    assert "0, 2" in caught.value.hint


def test_a_model_without_layers_is_refused_with_what_it_has():
    with pytest.raises(TaskError, match="1 Embedding, 1 LayerNorm"):
        made(lambda: nn.Sequential(nn.Embedding(7, 3), nn.LayerNorm(3)))


def test_a_side_that_is_too_large_has_the_identity(caplog):
    with caplog.at_level("INFO"):
        stepper, engine = made(mlp, max_dim=5)  # The first layer has 7 inputs, with the bias.
    assert "max_dim" in caplog.text
    gradient, factors = recorded(stepper, engine, drawn(9, 6))
    decomposed_with(engine, factors)
    along, _ = engine.along_opt(gradient, TERMS)
    _, of_g = engine.packing.sides[0]
    g = unpacked(torch.from_numpy(factors[of_g.factor]), 5)
    v = engine.layers[0].gradient(torch.from_numpy(gradient))
    expected = torch.linalg.solve(g + DAMPING * torch.eye(5), v)
    found = engine.layers[0].gradient(torch.from_numpy(along))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- replicas


def test_owners_together_have_what_one_has_alone_in_both_placements():
    build, batch, options = MODELS["conv"]
    stepper, engine = made(build, **options)
    gradient, factors = recorded(stepper, engine, batch())
    decomposed_with(engine, factors)
    terms = np.array([DAMPING, 1e-3, 0.1])
    alone, nu = engine.along_opt(gradient, terms)
    alone = alone.copy()
    assert 0 < nu < 1
    owners = np.array([[0, 1], [1, 1], [1, 0]])
    for placement in ("opt", "lw"):
        both = [made(build, **options)[1] for _ in range(2)]
        owners = owners if placement == "opt" else owners[:, :1].repeat(2, 1)
        for each in both:
            each.fold(factors, NEW_ALONE)
            each.renew()
        mine = [(owners == slot).astype(np.uint8) for slot in range(2)]
        if placement == "opt":
            given = sum(e.given_eigens(m)[0] for e, m in zip(both, mine, strict=True))
            for each in both:
                each.take_eigens(given)
            found = [each.along_opt(gradient, terms) for each in both]
        else:
            given = sum(e.updates(gradient, m, terms)[0] for e, m in zip(both, mine, strict=True))
            found = [each.along_lw(gradient, given, terms) for each in both]
        assert (given[: owners.size] == 1).all()
        for along, of_nu in found:
            np.testing.assert_allclose(along, alone, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(of_nu, nu, rtol=1e-5)


def test_what_an_engine_hands_on_and_saves_is_all_that_another_one_needs():
    build, batch, options = MODELS["embedding"]
    stepper, engine = made(build, **options)
    gradient, factors = recorded(stepper, engine, batch())
    decomposed_with(engine, factors)
    expected = engine.along_opt(gradient, TERMS)[0].copy()
    for how in ("take", "restore"):
        _, other = made(build, **options)
        other.take(*engine.give()) if how == "take" else other.restore(engine.state())
        assert np.array_equal(other.along_opt(gradient, TERMS)[0], expected)
        assert np.array_equal(other.give()[0], engine.give()[0])
    _, smaller = made(build)
    before = smaller.give()[0]
    smaller.restore(engine.state())
    assert np.array_equal(smaller.give()[0], before)


@pytest.mark.oracle("kfac", "its twin in numpy")
def test_engine_and_twin_agree(agree):
    problem = LeastSquares(samples=32, size=6)
    options = Options(damping=DAMPING, factor_decay=0.5)

    class Line(Guesses):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            x, y = batch
            return ((model(x)[:, 0] - y) ** 2).mean() / 2

    stepper = stepper_of(Line(lambda: nn.Linear(6, 1, bias=False)))
    engine = KfacEngine(EnginePlace(stepper.replica, options))
    stepper.tell(Operations(engine, "kfac", calling))
    parameters = np.array(stepper.replica.parameters)
    twin = KfacTwin(TwinPlace(problem, parameters, options))
    numbers, terms = np.array([DAMPING, 0.5, 1e-3], "f4"), np.array([DAMPING, 1e-3, 0.3])
    mine = np.ones((1, 2), np.uint8)
    for step in range(4):
        rows = np.arange(step * 8, step * 8 + 8)
        batch = torch.from_numpy(problem.x[rows]).float(), torch.from_numpy(problem.y[rows]).float()
        engine.record()
        twin.record()
        gradient = np.array(stepper.step([(batch, 1.0)], samples=8).gradient)
        twin.begin_step(8, 1.0)
        twin.see_batch(Batch(rows, 0, 1, step), 1.0)
        ours, theirs = engine.given_factors()[0], twin.given_factors()[0]
        agree(ours, theirs, rtol=1e-4, atol=1e-6)
        for each, factors in ((engine, ours), (twin, theirs)):
            each.fold(factors, numbers)
            each.renew()
            each.take_eigens(each.given_eigens(mine)[0])
        for ours, theirs in zip(
            engine.along_opt(gradient, terms), twin.along_opt(gradient, terms), strict=True
        ):
            agree(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_packed_factor_is_its_upper_triangle():
    matrix = torch.arange(9.0).view(3, 3)
    matrix = matrix + matrix.T
    assert packed(matrix).tolist() == [0, 4, 8, 8, 12, 16]
    assert torch.equal(unpacked(packed(matrix), 3), matrix)
