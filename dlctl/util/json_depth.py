"""Plain data from outside: None, bool, int, float, str, lists and dicts of them."""

from __future__ import annotations

from typing import Any

LEVELS_MAX = 64


def is_deep(value: Any) -> bool:
    """Whether lists and dicts are nested more than `LEVELS_MAX` deep.

    JSON may be nested as deeply as the interpreter can just parse, and any later recursion over it
    would exceed that limit.
    """
    inside = [value]
    for _ in range(LEVELS_MAX):
        nodes = [node for node in inside if isinstance(node, dict | list)]
        if not nodes:
            return False
        inside = [item for n in nodes for item in (n.values() if isinstance(n, dict) else n)]
    return any(isinstance(node, dict | list) for node in inside)
