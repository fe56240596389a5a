"""A worker does not import torch's compiler for its optimiser: a CPU second and 70 MB."""

import subprocess
import sys

SCRIPT = """
import sys
import torch
from daemons.worker.inner_optimizer import InnerOptimizer
from dlctl.job.config import Choice

more = {"adamw": {}, "sgd": {"momentum": 0.9}, "muon": {"adamw": {"lr": 0.1}}}
for name, options in more.items():
    tensors = [torch.ones(4, 3), torch.ones(3)]
    inner = InnerOptimizer(Choice(name=name, options={"lr": 0.1, **options}), tensors)
    for _ in range(2):
        inner.step([torch.ones_like(tensor) for tensor in tensors], 0.1)
    inner.restore(inner.state())
    assert (tensors[0] < 1).all()
    print(name, "torch._dynamo" in sys.modules)
"""


def test_steps_and_saves_do_without_it() -> None:
    """All three in one process: whoever imports it first is the one with the first "True"."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["adamw False", "sgd False", "muon False"]
