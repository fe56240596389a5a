"""`fp16` and `bf16` send what `none` sends in 16 bits, and take nothing else for it."""

import numpy as np
import pytest

from dlctl import registry
from dlctl.compress.none import Dense
from dlctl.errors import RemoteProtocolError
from dlctl.wire.messages import Packed

HALVES = {"fp16": "float16", "bf16": "bfloat16"}
SIGNIFICANT_BITS = {"fp16": 11, "bf16": 8}
halves = pytest.mark.parametrize("name", HALVES)


def made(name):
    kind = registry.load("compressors", name)
    return kind(kind.Options())


@halves
def test_a_push_is_the_one_of_none_in_16_bits_under_a_name_of_its_own(name):
    u = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    same = u.copy()
    dense = Dense(Dense.Options(values=HALVES[name]))
    packed, expected = made(name).take(u), dense.take(same)
    assert (packed.kind, expected.kind) == (name, "none")
    assert packed.nbytes == 2 * 5000
    assert np.array_equal(packed.arrays[0], expected.arrays[0])
    assert np.array_equal(u, same)


@halves
def test_what_the_rounding_takes_away_waits_for_the_next_push(name):
    compressor = made(name)
    step = 2.0 ** -SIGNIFICANT_BITS[name]
    u = np.full(3, 1 + step / 2, np.float32)
    sent = []
    for _ in range(2):
        sent.append(compressor.expand(compressor.take(u), 3).values.tolist())
    assert sent == [[1.0] * 3, [step / 2] * 3]
    assert not u.any()


@halves
@pytest.mark.parametrize("dtype", ["<f2", "<u2", "<f4"])
def test_values_of_another_precision_than_the_name_says_are_refused(name, dtype):
    compressor = made(name)
    packed = Packed(name, 4, (np.ones(4, dtype),))
    if packed.arrays[0].dtype == compressor.WIRE_DTYPE:
        assert compressor.expand(packed, 4).values.dtype == np.float32
    else:
        with pytest.raises(RemoteProtocolError):
            compressor.expand(packed, 4)
