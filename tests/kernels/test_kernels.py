"""The loops in C give numpy's results to the bit, and refuse what they must not touch."""

from typing import Any

import numpy as np
import pytest

from dlctl import kernels, registry
from dlctl.compress import bfloat16, indices, values
from dlctl.compress.onebit import OneBit
from dlctl.errors import RemoteProtocolError
from dlctl.model import vector
from dlctl.optim import compiled
from dlctl.optim.adam import AdamOptions
from dlctl.optim.blocks import Block, BlockPlace
from dlctl.optim.plain import Accrue
from dlctl.util.threads import PART
from dlctl.wire.messages import Packed

pytestmark = pytest.mark.skipif(bool(kernels.missing()), reason=f"no kernels: {kernels.missing()}")
RULES = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("momentum", {}),
    ("momentum", {"weight_decay": 0.1}),
    ("momentum", {"nesterov": True}),
    ("momentum", {"nesterov": True, "weight_decay": 0.1}),
    ("adagrad", {}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.9}),
    ("adam", {}),
    ("adamw", {}),
    ("yogi", {}),
    ("lion", {}),
    ("lion", {"weight_decay": 0.1}),
    ("delayed-nesterov", {"every": 3}),
    ("delayed-nesterov", {"every": 2, "spread": 0.25}),
    ("accrue", {"lr": 0.875}),
]
SIZE = 10_007
"""Longer than a loop that holds the interpreter's lock, and no multiple of a vector's length."""


def gradients(scale: float) -> list[Any]:
    rng = np.random.default_rng(3)
    found = [(rng.standard_normal(SIZE) * scale).astype(np.float32) for _ in range(6)]
    for i, g in enumerate(found):
        g[i::7] = 0
        g[i::11] = -0.0
    return found


def made(name: str, options: dict[str, Any]) -> Any:
    if name == "accrue":  # Of tables only.
        accrue = Accrue()
        accrue.lr = options["lr"]
        return accrue
    kind = registry.load("optimizers", name)
    return kind(kind.Options(**options))


def updates(name: str, options: dict[str, Any], pushed: list[Any]) -> tuple[list[Any], list[bool]]:
    """(w and the slots after these pushes, whether numpy was told of each), in place and not."""
    optimizer = made(name, options)
    w = np.random.default_rng(4).standard_normal(SIZE).astype(np.float32)
    w[::13] = -0.0
    now = [w, *(np.full(SIZE, value, np.float32) for value in optimizer.slots.values())]
    told: list[bool] = []
    for i, g in enumerate(pushed):
        told.append(False)

        def hear(what: str, flag: int) -> None:
            told[-1] = True

        following = now if i % 2 else [np.empty_like(array) for array in now]
        block = Block(BlockPlace(0), now[0], g, tuple(now[1:]), following[0], tuple(following[1:]))
        with np.errstate(over="call", divide="call", invalid="call", call=hear):
            optimizer.begin_update()([block])
        now = following
    return now, told


def bits(array: Any) -> Any:
    """Of each value; every NaN has the same."""
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e17, 1e30])
@pytest.mark.parametrize(("name", "options"), RULES)
def test_every_rule_equals_numpys_to_the_bit(
    name: str, options: dict[str, Any], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With values that become denormal, or overflow: then numpy is told, in the same updates."""
    pushed = gradients(scale)
    in_c, told = updates(name, options, pushed)
    monkeypatch.setattr(kernels, "step", lambda name: None)
    by_numpy, told_by_numpy = updates(name, options, pushed)
    for one, other in zip(in_c, by_numpy, strict=True):
        assert np.array_equal(bits(one), bits(other))
    assert told == told_by_numpy
    assert any(told) == any(not np.isfinite(array).all() for array in in_c) or scale == 1e30


def test_of_a_constant_beyond_float32_numpy_is_told_in_the_same_way() -> None:
    """Adam's first rate is ten times its lr."""
    w, g = np.ones(10, np.float32), np.ones(10, np.float32)
    optimizer = registry.load("optimizers", "adam")(AdamOptions(lr=1e38))
    heard = []
    slots = np.zeros(10, np.float32), np.zeros(10, np.float32)
    with np.errstate(all="call", call=lambda *of: heard.append(of)):
        optimizer.begin_update()([Block.in_place(BlockPlace(0), w, g, slots)])
    assert heard
    assert not np.isfinite(w).any()


def test_there_is_a_test_of_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    monkeypatch.setattr(kernels, "step", asked.add)
    for name, options in RULES:
        updates(name, options, gradients(1.0))
    assert set(kernels._steps()) <= asked


@pytest.mark.parametrize("positions", [np.int64, np.uint32])
@pytest.mark.parametrize("values", [np.float32, np.float64])
def test_elements_at_positions_are_copied_out_and_in(positions: Any, values: Any) -> None:
    rng = np.random.default_rng(5)
    array = rng.standard_normal(50_000).astype(values)
    where = np.flatnonzero(rng.random(array.size) < 0.2).astype(positions)
    out = np.empty(where.size, values)
    kernels.gather(array, where, out)
    assert np.array_equal(out, array[where])
    wanted = array.copy()
    wanted[where] = -out
    kernels.scatter(array, where, -out)
    assert np.array_equal(array, wanted)


@pytest.mark.parametrize("position", [-1, 100, 2**40])
def test_a_position_outside_is_an_error_and_touches_nothing_else(position: int) -> None:
    array, some = np.zeros(100, np.float32), np.ones(1, np.float32)
    where = np.array([position], np.int64)
    with pytest.raises(IndexError):
        kernels.scatter(array, where, some)
    with pytest.raises(IndexError):
        kernels.gather(array, where, some)
    assert not array.any()


def unaligned(array: Any) -> Any:
    """The same values in memory that begins at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    found = memory.view(array.dtype)
    found[:] = array
    assert not found.flags.aligned
    return found


def test_what_begins_at_an_odd_address_is_left_to_numpy() -> None:
    seen = []

    def by_numpy(blocks: Any) -> None:
        seen.extend(blocks)

    rule = compiled.rule("sgd", by_numpy, 0.5, 0.0)
    w, g = np.ones(100, np.float32), np.ones(100, np.float32)
    rule([Block.in_place(BlockPlace(0), w, g, ())])
    assert not seen
    assert (w == 0.5).all()
    rule([Block.in_place(BlockPlace(0), w, unaligned(g), ())])
    assert len(seen) == 1


def test_positions_at_odd_addresses_are_copied_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    array, where = np.arange(10, dtype=np.float32), np.array([1, 7], np.int64)
    out = np.empty(2, np.float32)
    monkeypatch.setattr(kernels, "_loaded", lambda: (Untouched(), ""))
    kernels.gather(array, unaligned(where), out)
    assert out.tolist() == [1, 7]
    kernels.scatter(array, unaligned(where), -out)
    kernels.scatter(array, np.array([2, 3]), unaligned(out))
    assert array[[1, 2, 3, 7]].tolist() == [-1, 1, 7, -7]


class Untouched:
    """A library that nothing may call."""


def test_arrays_of_other_lengths_are_refused() -> None:
    step = kernels.step("adagrad")
    assert step is not None
    a, b = np.zeros(10, np.float32), np.zeros(11, np.float32)
    with pytest.raises(ValueError, match="bytes"):
        step((0.1, 1e-10), a, b, a, (a,), (a,))
    with pytest.raises(ValueError, match="bytes"):
        step((0.1, 1e-10), a, a, a, (a,), (b,))
    with pytest.raises(ValueError, match="slots"):
        step((0.1, 1e-10), a, a, a, (), ())
    with pytest.raises(ValueError, match="constants"):
        step((0.1,), a, a, a, (a,), (a,))
    with pytest.raises(ValueError, match="contiguous"):
        step((0.1, 1e-10), a[::2], a[:5], a[:5], (a[:5],), (a[:5],))
    a.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        step((0.1, 1e-10), a, a, a, (a,), (a,))


def unpacked(packed: Any, count: int, size: int) -> Any:
    try:
        return indices.unpack(packed, count, size).tolist()
    except RemoteProtocolError as error:
        return str(error)


@pytest.mark.parametrize(
    ("count", "size"), [(1, 2), (7, 20), (100, 10_000), (5000, 600_000), (3, 2**62)]
)
def test_positions_are_numpys(count: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes, what comes of them, and of damaged ones the same refusal."""
    rng = np.random.default_rng(count)
    where = np.unique(rng.integers(0, size, count))
    packed, found = indices.pack(where, size), []
    damaged = [packed.copy() for _ in range(40)]
    for i, some in enumerate(damaged):
        some[rng.integers(some.size) if i else -1] ^= 1 << rng.integers(8)
    in_c = kernels._loaded()
    for loaded in (in_c, (None, "")):
        monkeypatch.setattr(kernels, "_loaded", lambda loaded=loaded: loaded)
        found.append([indices.pack(where, size).tolist()])
        found[-1] += [unpacked(some, where.size, size) for some in (packed, *damaged)]
    assert found[0] == found[1]
    assert found[0][1] == where.tolist()


def test_positions_that_do_not_fit_are_refused() -> None:
    room = np.zeros(4, np.uint8)
    for where in ([3, 3], [-1], [0, 2**62]):
        with pytest.raises(ValueError, match="ascend"):
            kernels.pack_positions(np.array(where), 0, room[:0], room)
    for bits in (-1, 57):
        with pytest.raises(ValueError, match="low bits"):
            kernels.pack_positions(np.array([1]), bits, room, room)
    with pytest.raises(ValueError, match="bytes"):
        kernels.pack_positions(np.array([1]), 3, room, room)
    out = np.zeros(2, np.int64)
    for marked in (0b1, 0b111):  # Fewer positions, and more.
        mask = np.array([marked], np.uint8)
        assert not kernels.unpack_positions(out, 0, room[:0], mask, 8)
    assert not kernels.unpack_positions(out, 0, room[:0], np.array([0b1001], np.uint8), 3)
    assert kernels.unpack_positions(out, 0, room[:0], np.array([0b1001], np.uint8), 4)
    assert out.tolist() == [0, 3]


LENGTHS = [0, 1, 63, 64, 65, 4097, (1 << 16) - 1, (1 << 16) + 65]


@pytest.mark.parametrize("size", LENGTHS)
def test_the_norm_is_checked_as_by_numpy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit of the limit, and for everything that is refused."""
    u = (np.random.default_rng(size).standard_normal(size) * 1e6).astype(np.float32)
    poisons = [(i, poison) for i in (0, size // 2, size - 1) for poison in (np.nan, -np.inf, 3e19)]
    found = []
    for squares in (kernels.squares, lambda u: None):
        monkeypatch.setattr(kernels, "squares", squares)
        norm = vector.euclidean_norm(u)
        limits = (0.0, norm / 2, np.nextafter(norm, 0), norm, norm * 1.001, 1e12, np.inf)
        found.append([vector.is_shorter(u, limit) for limit in limits])
        for at, poison in poisons if size else ():
            bad = u.copy()
            bad[at] = poison
            found[-1] += [vector.is_shorter(bad, limit) for limit in (1e12, 1e18, np.inf)]
    assert found[0] == found[1]
    assert found[0][3:7] == [True] * 4
    assert not any(found[0][7:])


@pytest.mark.parametrize("size", LENGTHS)
def test_what_is_not_finite_is_found_as_by_numpy(size: int) -> None:
    u = np.random.default_rng(size).integers(0, 255 << 23, size, np.uint32, endpoint=False)
    u |= np.random.default_rng(1).integers(0, 2, size, np.uint32) << 31
    assert kernels.are_finite(u.view(np.float32)) is True
    for at in {0, size // 2, size - 1} if size else ():
        for bits in (0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF):
            bad = u.copy()
            bad[at] = bits
            assert kernels.are_finite(bad.view(np.float32)) is False
            assert not vector.all_finite(unaligned(bad.view(np.float32)))


def test_only_what_c_may_read_is_checked_there() -> None:
    u = np.ones(10, np.float32)
    for other in (u[::2], unaligned(u), u.astype(np.float64), u.astype(np.float16)):
        assert kernels.squares(other) is None
        assert kernels.are_finite(other) is None
        assert vector.all_finite(other)
        assert vector.is_shorter(other, 4.0)


ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
AROUND = (-1, 0, 1)


def between_halves(precision: str) -> Any:
    """float32: of 16 bits, half way between two of these, and next to both; and random bits."""
    wide = ALL_HALVES.view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    last = 12
    if precision == "bfloat16":
        wide, last = ALL_HALVES.astype(np.int64) << 16, 15
    found = [wide + half + around for half in (0, 1 << last) for around in AROUND]
    found.append(np.random.default_rng(6).integers(0, 1 << 32, 100_000))
    return (np.concatenate(found) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_values_of_16_bits_are_numpys(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = ALL_HALVES.view(np.float16 if precision == "float16" else np.uint16)
    everything = between_halves(precision)
    small = np.abs(everything) <= values.LARGEST[precision]  # Not NaN.
    found = []
    for loops in (kernels.halves, lambda kind: None):
        monkeypatch.setattr(kernels, "halves", loops)
        wide = values.as_float32(narrow)
        found.append([bits(wide)])
        for pushed in (everything[small], everything, wide):
            rest = pushed.copy()
            taken = values.take_values(rest, precision)
            assert taken.dtype == narrow.dtype
            found[-1] += [bits(values.as_float32(taken)), bits(rest)]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_a_large_vector_is_converted_in_parts() -> None:
    u = np.random.default_rng(7).standard_normal(2 * PART + 5).astype(np.float32)
    rest = u.copy()
    taken = values.take_values(rest, "bfloat16")
    assert np.array_equal(taken, bfloat16.encode(u))
    assert np.array_equal(values.as_float32(taken) + rest, u)
    assert np.array_equal(values.as_float32(unaligned(taken)), bfloat16.decode(taken))


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_conversions_refuse_other_lengths(kind: Any) -> None:
    loops = kernels.halves(kind)
    assert loops is not None
    wide, narrow = np.zeros(11, np.float32), np.zeros(10, np.uint16)
    for call, of in ((loops.narrow, (wide, narrow)), (loops.widen, (narrow, wide)),
                     (loops.rest, (narrow, wide))):  # fmt: skip
        with pytest.raises(ValueError, match="bytes"):
            call(*of)
        with pytest.raises(TypeError):
            call(of[0])
    narrow.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        loops.narrow(wide[:10], narrow)
    assert not wide.any()


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 10_007])
def test_signs_are_decoded_as_by_numpy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    means = rng.standard_normal(2 * -(-size // 1024)).astype(np.float32)
    means[::3] = np.nan
    packed = Packed("onebit", size, (rng.integers(0, 256, -(-size // 8), np.uint8), means))
    by_loop = {}
    for loop in (kernels.from_signs, lambda: None):
        monkeypatch.setattr(kernels, "from_signs", loop)
        by_loop[loop] = OneBit.expand(packed, size).values.view(np.uint32)
    one, other = by_loop.values()
    assert np.array_equal(one, other)


def test_signs_of_another_length_are_refused() -> None:
    loop = kernels.from_signs()
    assert loop is not None
    bits, means, out = np.zeros(2, np.uint8), np.zeros(2, np.float32), np.ones(17, np.float32)
    for of in ((bits, means, out), (bits, means[:1], out[:16]), (bits[:1], means, out[:16])):
        with pytest.raises(ValueError, match="bytes"):
            loop(*of)
    assert out.all()
    with pytest.raises(TypeError):
        loop(bits, means)
