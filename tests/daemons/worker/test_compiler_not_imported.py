"""A worker does not import torch's compiler for its optimiser: a CPU second and 70 MB."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from daemons.worker.inner_optimizer import InnerOptimizer
from dlctl.job.config import Choice

tensors = [torch.ones(4, 3), torch.ones(3)]
inner = InnerOptimizer(Choice(name=sys.argv[1], options={{"lr": 0.1, {options}}}), tensors)
for _ in range(2):
    inner.step([torch.ones_like(tensor) for tensor in tensors], 0.1)
inner.restore(inner.state())
assert (tensors[0] < 1).all()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [("adamw", ""), ("sgd", '"momentum": 0.9'), ("muon", '"adamw": {"lr": 0.1}')],
)
def test_steps_and_saves_do_without_it(name: str, options: str) -> None:
    script = SCRIPT.format(options=options)
    done = subprocess.run(
        [sys.executable, "-c", script, name], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
