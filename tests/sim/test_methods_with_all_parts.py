"""Every method learns with every compressor and optimiser that its shape allows, and each of its
live keys takes effect in the middle of a run. A new name gets these tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from simulated import job_file

from dlctl import registry
from dlctl.algorithms.base import Method, Shape
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Outcome, Simulation

METHODS = registry.names("algorithms")
COMPRESSORS, OPTIMIZERS = registry.names("compressors"), registry.names("optimizers")
FOR_GRADIENTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.04},
    "momentum": {"lr": 0.02, "momentum": 0.5},
    "adagrad": {"lr": 0.2},
    "adam": {"lr": 0.05},
    "adamw": {"lr": 0.05},
    "delayed-nesterov": {"lr": 0.02, "momentum": 0.5, "every": 1},
    "lion": {"lr": 0.06},
    "rmsprop": {"lr": 0.02},
    "muon": {"lr": 0.05, "adamw_lr_scale": 1.0},
    "soap": {"lr": 0.05},
    "shampoo": {"lr": 0.05},
    "lmo": {"lr": 0.04, "momentum": 0.5},
    "isotropic": {"lr": 0.02, "momentum": 0.5},
    "yogi": {"lr": 0.05},
}
FOR_WAYS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1.0},
    "momentum": {"lr": 0.5, "momentum": 0.5},
    "adagrad": {"lr": 0.3},
    "adam": {"lr": 0.1},
    "adamw": {"lr": 0.1},
    "delayed-nesterov": {"lr": 0.5, "momentum": 0.5, "every": 1},
    "lion": {"lr": 0.1},
    "rmsprop": {"lr": 0.03},
    "muon": {"lr": 0.1, "adamw_lr_scale": 1.0},
    "soap": {"lr": 0.1},
    "shampoo": {"lr": 0.1},
    "lmo": {"lr": 1.0, "momentum": 0.5},
    "isotropic": {"lr": 0.5, "momentum": 0.5},
    "yogi": {"lr": 0.05},
}
"""For what a method pushes that makes steps of its own."""


def has(method: Method, key: str) -> bool:
    return key in {field.name for field in dataclasses.fields(method.Options)}


def goes_with(shape: Shape, compressor: str, optimizer: str) -> bool:
    """Without servers nobody compresses for them, and one pair is as good as another."""
    if not shape.needs_servers:
        return (compressor, optimizer) == ("none", "sgd")
    if shape.exact and compressor != "none":
        return False
    is_known = shape.compressors is None or compressor in shape.compressors
    return is_known and (shape.optimizers is None or optimizer in shape.optimizers)


def matrix() -> list[Any]:
    """One example of each method is for every commit, and these go through all the parts."""
    rows = []
    for at, name in enumerate(METHODS):
        shape = registry.load("algorithms", name).shape
        parts = [(c, o) for c in COMPRESSORS for o in OPTIMIZERS if goes_with(shape, c, o)]
        chosen = parts[at * 5 % len(parts)]
        rows += [
            pytest.param(name, *pair, marks=() if pair == chosen else pytest.mark.long)
            for pair in parts
        ]
    return rows


@pytest.mark.parametrize(("name", "compressor", "optimizer"), matrix())
def test_it_learns_with_what_its_shape_allows(name: str, compressor: str, optimizer: str) -> None:
    method = registry.load("algorithms", name)
    wanted = {
        "local_steps": 4, "exchange_every_steps": 2, "buffer_pushes": 2, "density": 0.5,
        "quorum": 2, "target_samples": 16,
    }  # fmt: skip
    options: dict[str, Any] = {key: wanted[key] for key in wanted if has(method, key)}
    push = method.replica.one_push(method.Options(**options))
    if not push.is_all:
        options["inner_lr"] = 0.03
    rates = (FOR_WAYS if push.is_displacement else FOR_GRADIENTS).get(optimizer, {})
    kind = registry.load("compressors", compressor)
    half = {"density": 0.4, "side": 4, "keep": 8}
    less = {key: half[key] for key in half if has(kind, key)}
    problem = LeastSquares(samples=64, size=12)
    is_in_rounds = method.lead.cuts_epochs
    epochs = 16.0 if push.is_all and not is_in_rounds else 32.0
    # A run has few rounds, and of what each has come to a part is sent.
    epochs *= 2 if push.is_displacement and less else 1
    outcome = Simulation(
        job_file(
            2, 2 if method.shape.needs_servers else 0, algorithm=(name, options),
            epochs=epochs, compression=(compressor, less),
            optimizer=(optimizer, rates),
        ),
        problem,
    ).run()  # fmt: skip
    assert outcome.state == "finished", outcome.reason
    loss = problem.evaluate(outcome.weights)["loss"]
    assert loss <= 0.3 * problem.evaluate(problem.initial())["loss"]


# ---------------------------------------------------------------- what changes live

KEYS = [(name, key) for name in METHODS for key in registry.load("algorithms", name).live]


def other_value(method: Method, key: str) -> str:
    """One that differs from the default, as people write it."""
    default = getattr(method.Options(), key)
    for text in ("0.003", "3", "4"):
        try:
            if method.live[key].parse(text) != default:
                return text
        except ValueError:
            continue
    raise AssertionError(f"none of these is another value of {key} than {default}")


def changed(name: str, key: str, text: str) -> tuple[Outcome, list[tuple[Any, Any]]]:
    """A run whose key is set in its middle, and what it was and is on each worker."""
    method = registry.load("algorithms", name)
    options = {"buffer_pushes": 2} if has(method, "buffer_pushes") else {}
    servers = 2 if method.shape.needs_servers else 0
    epochs = 72.0 if has(method, "target_samples") else 24.0  # One step with its default.
    simulation = Simulation(
        job_file(2, servers, algorithm=(name, options), epochs=epochs),
        LeastSquares(samples=64),
        compute=ComputeOptions(step_s=0.05, spread=0.0, slow={1: 2.5}),
    )
    names = ["worker-0", "worker-1"]
    asked = simulation.request(1.5, "set", {"names": names, "settings": {key: text}})
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.reason
    assert asked.reply is not None
    assert asked.reply.result["missing"] == []
    rows = [(row["before"], row["after"]) for row in asked.reply.result["changes"]]
    return outcome, rows


@pytest.mark.long
@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_live_key_takes_effect_in_the_middle_of_a_run(name: str, key: str) -> None:
    """Of two runs, one has it set to what it is: but for the value they are the same."""
    method = registry.load("algorithms", name)
    default, text = getattr(method.Options(), key), other_value(method, key)
    same = default if isinstance(default, str) else method.live[key].format(default)
    as_before, _ = changed(name, key, same)
    otherwise, rows = changed(name, key, text)
    assert rows == [(default, method.live[key].parse(text))] * 2
    assert otherwise.weights.tolist() != as_before.weights.tolist()
