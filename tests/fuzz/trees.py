"""Random changes of plain values: what msgpack and JSON are taken apart to."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from .mutation import few

DEEP = "a very deep value stands here"
"""Whoever packs a tree replaces this text by lists in lists: no packer makes them."""
DEPTHS = (9, 60, 400, *range(800, 1030, 16), 1010, 1023, 5000)
"""Recursion ends at 1000 levels in Python and at 1024 in msgpack; what was read must be used, too.
"""
TEXTS = (
    "", "a", "\0", "\n", "\x1b]0;x\a", "\x9b31m", "\u202e", "\u2028", "\ud800", "\U0010ffff", "-",
    "..", "../x", "/", "manifest.json", "x" * 300, "9" * 5000, "1e999", "NaN", DEEP,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 255, 256, 4095, 4097, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**31), -(2**63), 0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan,
)  # fmt: skip
LENGTHS = (2, 15, 16, 17, 1000, 4096, 5000)
PLACES_MAX = 20_000
"""A tree does not grow any further."""

Place = tuple[Any, Any]
"""A list or map, and an index or key in it."""


def mutate(random: Random, tree: Any, other: Any) -> Any:
    """A tree of lists, maps and plain values with a few changes; it is changed in place.

    `other`: a tree to take a branch of.
    """
    root = [tree]
    for _ in range(few(random)):
        _change(random, root, other)
    return root[0] if root else None


def places(tree: Any) -> list[Place]:
    """Every place in a tree, as far as it has not too many: branches that occur in several places
    are gone through for each of them.
    """
    found: list[Place] = []
    pending = [tree]
    while pending and len(found) <= PLACES_MAX:
        node = pending.pop()
        here = [(node, key) for key in (node if isinstance(node, dict) else range(len(node)))]
        found += here
        pending += [node[key] for node, key in here if isinstance(node[key], list | dict)]
    return found


def _change(random: Random, root: list[Any], other: Any) -> None:
    all_places = places(root)
    if not 0 < len(all_places) <= PLACES_MAX:
        return
    node, key = random.choice(all_places)
    choice = random.randrange(11)
    if choice < 4:
        node[key] = _new(random, node[key])
    elif choice == 10:
        node[key] = DEEP
    elif choice == 4:
        del node[key]
    elif choice == 5:
        source, at = random.choice(all_places)
        node[key] = _copy(source.get(at) if isinstance(source, dict) else source[at])
    elif choice == 6 and (elsewhere := places([other])):
        source, at = random.choice(elsewhere)
        node[key] = _copy(source[at])
    elif choice == 7:
        node[key] = random.choice(([node[key]], {"a": node[key]}, [node[key], node[key]]))
    elif choice == 8 and isinstance(node[key], list):
        size = len(places([node[key]]))
        node[key] = (node[key] or [0]) * min(random.choice(LENGTHS), PLACES_MAX // size)
    elif isinstance(node, dict):
        node[_key(random, list(node))] = node.pop(key)
    else:
        node.insert(key, _copy(node[key]))


def _new(random: Random, old: Any) -> Any:
    """Another value, often one of the same kind."""
    kind = random.randrange(6)
    if type(old) is int and kind < 4:
        drawn = random.getrandbits(random.choice((4, 63, 64)))
        return random.choice((old + 1, old - 1, -old, old * 2, drawn))
    if type(old) is str and kind < 2 and old:
        at = random.randrange(len(old))
        new = random.choice((*TEXTS[:12], chr(random.randrange(0x3000))))
        return old[:at] + new + old[at + 1 :]
    if kind == 5:
        return random.choice((None, True, False, [], {}, [[]], {"": None}, [{}] * 40))
    return random.choice(random.choice((TEXTS, NUMBERS)))


def _key(random: Random, old: list[Any]) -> Any:
    """A new key: a text, or one that no JSON has."""
    if random.randrange(3):
        return random.choice((*TEXTS, *(key for key in old if isinstance(key, str))))
    return random.choice((1, -1, True, None, 1.5, math.nan))


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


def deep_json(random: Random, text: str) -> str:
    """JSON with `DEEP` replaced."""
    if DEEP not in text:
        return text
    depth = random.choice(DEPTHS)
    begin, end = random.choice((("[", "]"), ('{"a":', "}")))
    return text.replace(f'"{DEEP}"', begin * depth + "1" + end * depth, 1)


def deep_msgpack(random: Random, packed: bytes) -> bytes:
    """msgpack with `DEEP` replaced."""
    mark = bytes([0xA0 + len(DEEP)]) + DEEP.encode()
    if mark not in packed:
        return packed
    depth = random.choice(DEPTHS)
    begin = random.choice((b"\x91", b"\x81\xa1a", b"\xdc\x10\x00", b"\xdc\x00\x01"))
    return packed.replace(mark, begin * depth + b"\x01", 1)
