"""What a tensor's own operations do on a GPU gives the same as the arrays' do on the host.

The way of a GPU is the one of every tensor that is not in host memory. Tensors on the CPU are sent
that way, too, so that it is walked on every machine; with a GPU the real ones are.
"""

import numpy as np
import pytest
import torch

from dlctl import registry
from dlctl.compress import blocks, dct, gaussian, magnitudes, plain, powersgd, values
from dlctl.roles.worker.received_slice import Basis, Slice

SIZES = (2, 1000, 1024, 5000, 70_001)
OPTIONS = [
    ("none", {"values": "bfloat16"}),
    ("fp16", {}),
    ("bf16", {}),
    ("topk", {"values": "bfloat16"}),
    ("topk-sampled", {}),
    ("topk-sampled", {"values": "bfloat16"}),
    ("topk-sampled", {"density": 0.5}),
    ("gaussian", {}),
    ("gaussian-ref", {}),
    ("randomk", {}),
    ("randomk", {"unbiased": True}),
    ("onebit", {}),
    ("onebit", {"means": "one"}),
    ("int8", {}),
    ("int8", {"rounding": "stochastic"}),
    ("powersgd", {}),
    ("dct", {}),
]
SAME_BYTES = (
    "none", "fp16", "bf16", "topk", "topk-sampled", "gaussian-ref", "gaussian", "randomk", "int8",
)  # fmt: skip
"""Those whose pushes depend on no sum, or only by a threshold that no element is so near to."""
cases = pytest.mark.parametrize(("name", "options"), OPTIONS)


@pytest.fixture
def elsewhere(monkeypatch):
    """Every tensor is taken for one that is not in host memory."""
    for module in (blocks, dct, gaussian, magnitudes, plain, powersgd, values):
        monkeypatch.setattr(module, "host_view", lambda u: u)


def made(name, options):
    kind = registry.load("compressors", name)
    least = {"dense_below": 0} if "dense_below" in kind.Options.__dataclass_fields__ else {}
    return kind(kind.Options(**options, **least))


def compare(name, options, device):
    rng = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        for size in SIZES:
            ours, theirs = made(name, options), made(name, options)
            u = np.zeros(size, dtype)
            tensor = torch.zeros(size, dtype=getattr(torch, u.dtype.name), device=device)
            for _ in range(3):
                # Values that float32 holds: torch rounds float64 to 16 bits by way of float32.
                gradient = rng.standard_normal(size).astype(np.float32).astype(dtype)
                u[:] = gradient
                tensor.copy_(torch.from_numpy(gradient))
                here, there = ours.take(u), theirs.take(tensor)
                one, other = ours.expand(here, size), theirs.expand(there, size)
                taken = np.zeros(size, dtype)
                taken[slice(None) if other.indices is None else other.indices] = other.values
                rest = tensor.cpu().numpy()
                if not options.get("unbiased"):
                    assert np.array_equal(rest, gradient - taken)
                if options.get("rounding") == "stochastic":  # with another generator
                    assert np.allclose(one.values, other.values, atol=2 * 5 / 127)
                elif name in SAME_BYTES:
                    for a, b in zip(here.arrays, there.arrays, strict=True):
                        assert np.array_equal(a, b)
                    assert np.array_equal(u, rest)
                else:
                    assert np.allclose(one.values, other.values, rtol=1e-3, atol=1e-3)


@cases
def test_the_operations_of_a_tensor_give_what_those_of_an_array_give(name, options, elsewhere):
    compare(name, options, "cpu")


@cases
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_in_a_tensor_is_sent_and_does_not_stay(name, options, poison, elsewhere):
    u = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    u[7] = poison
    compressor = made(name, options)
    delta = compressor.expand(compressor.take(u), 3000)
    assert not np.isfinite(delta.values).all()
    assert torch.isfinite(u).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gradient_on_a_gpu_is_compressed_there_to_the_same():
    for name, options in OPTIONS:
        compare(name, options, "cuda")


def test_what_has_changed_is_put_into_a_tensor_as_into_an_array():
    random = np.random.default_rng(0)
    whole, new = (random.standard_normal(50).astype(np.float32) for _ in range(2))
    where = np.array([3, 17, 49])
    values = np.frombuffer(new[where].tobytes(), np.float32)  # Read-only, as it comes.
    for keep in (False, True):
        models = [np.zeros(50, np.float32), torch.zeros(50)]
        for model in models:
            held = Basis()
            held.place(Slice(1, 4, whole, remembered=True), model, keep=keep)
            model += 1.0 if keep else 0.0
            held.place(Slice(1, 5, values, where, since=4, remembered=True), model, keep=keep)
        expected = whole.copy()
        expected[where] = values
        assert all(np.array_equal(model, expected) for model in models)
