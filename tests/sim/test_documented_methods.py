"""The methods in the documents that a reader copies: they train, whoever dies."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from simulated import job_file

from dlctl import registry
from dlctl.algorithms.shapes import faults_of
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import LeastSquares
from dlctl.sim.simulation import Simulation

PAGE = Path(__file__).parents[2] / "docs/internals.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_a_method_of_the_documents_trains_whoever_dies(number, monkeypatch):
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    exec(compile(EXAMPLES[number], str(PAGE), "exec"), module.__dict__)
    entry = registry.Entry("documented:MINE", "an example")
    monkeypatch.setitem(registry.BUILT_IN["algorithms"], "mine", entry)
    assert faults_of(module.MINE) == []
    problem = LeastSquares(samples=64)
    is_local = module.MINE.inner.name != "none"
    options = {"local_steps": 4, "inner_lr": 0.03} if is_local else {}
    job = job_file(
        3, 2, algorithm=("mine", options), batch_size=4, portion_batches=2, epochs=32.0,
        optimizer=("sgd", {"lr": 1.0 if is_local else 0.03}), restarts_max=20,
    )  # fmt: skip
    faults = Faults(kills=1, server_kills=1, coordinator_kills=1, heal_at_s=4.0)
    outcome = Simulation(job, problem, faults=faults).run()
    assert outcome.state == "finished", outcome.reason
    loss, first = (problem.evaluate(w)["loss"] for w in (outcome.weights, problem.initial()))
    assert loss <= 0.1 * first


def test_there_are_two():
    assert len(EXAMPLES) == 2
