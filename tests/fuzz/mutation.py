"""Random changes of bytes, for what nobody takes apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

SIZE_MAX_BYTES = 64 * 1024
REPEATS = (2, 2, 2, 3, 3, 10, 10, 100, 1000, 5000)
BYTES = (0, 1, 0x0A, 0x0D, 0x1B, 0x20, 0x7F, 0x80, 0x9B, 0xC1, 0xFF)
NUMBERS = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)

_Change = Callable[[Random, bytes, bytes, Sequence[bytes]], bytes]


def few(random: Random) -> int:
    """1, seldom more: many changes at once are refused for the first of them."""
    count = 1
    while count < 8 and random.random() < 0.4:
        count += 1
    return count


def mutate(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    """`data` with a few changes. `other`: an input to take a piece of; `tokens`: to put in."""
    for _ in range(few(random)):
        data = random.choice(_CHANGES)(random, data, other, tokens)[:SIZE_MAX_BYTES]
    return data


def _range(random: Random, data: bytes, most: int = 64) -> tuple[int, int]:
    begin = random.randint(0, len(data))
    return begin, min(len(data), begin + random.randint(0, most))


def _flip(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    if not data:
        return b"\0"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _put(random: Random, data: bytes, new: bytes) -> bytes:
    """New bytes between the old ones, or in the place of some."""
    at = random.randint(0, len(data))
    return data[:at] + new + data[at + random.choice((0, len(new))) :]


def _byte(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    return _put(random, data, bytes([random.choice(BYTES)]))


def _noise(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    return _put(random, data, random.randbytes(random.randint(1, 16)))


def _number(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    width = random.choice((2, 4, 8))
    number = random.choice(NUMBERS) % 256**width
    return _put(random, data, number.to_bytes(width, random.choice(("little", "big"))))


def _token(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    return _put(random, data, random.choice(tokens)) if tokens else data


def _delete(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    begin, end = _range(random, data)
    return data[:begin] + data[end:]


def _cut(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    return data[: random.randint(0, len(data))]


def _repeat(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    begin, end = _range(random, data, random.choice((1, 4, 64)))
    return data[:end] + data[begin:end] * random.choice(REPEATS) + data[end:]


def _swap(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    a, b = sorted((_range(random, data), _range(random, data)))
    if a[1] > b[0]:
        return data
    return data[: a[0]] + data[slice(*b)] + data[a[1] : b[0]] + data[slice(*a)] + data[b[1] :]


def _splice(random: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    return _put(random, data, other[slice(*_range(random, other, 256))])


_CHANGES: tuple[_Change, ...] = (
    _flip, _byte, _noise, _number, _token, _token, _delete, _cut, _repeat, _swap, _splice,
)  # fmt: skip
