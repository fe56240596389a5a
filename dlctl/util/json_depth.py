"""Plain data from outside: None, bool, int, float, str, lists and dicts of them."""

from __future__ import annotations

from typing import Any


def is_deep(value: Any, levels: int) -> bool:
    """Whether lists and dicts are nested more than `levels` deep.

    JSON may be nested as deeply as the interpreter can just parse, and any later recursion over it
    would exceed that limit.
    """
    inside = [value]
    for _ in range(levels):
        nodes = [node for node in inside if isinstance(node, dict | list)]
        if not nodes:
            return False
        inside = [item for n in nodes for item in (n.values() if isinstance(n, dict) else n)]
    return any(isinstance(node, dict | list) for node in inside)
