"""What two contents of a job file differ in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]


def differences(before: Json, after: Json) -> list[str]:
    """Keys that differ between two contents of a job file: "workers.count: 4 -> 8"."""
    old, new = dict(_flat(before)), dict(_flat(after))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}" for key in keys]


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        # "options" is our own level: in the job file those keys stand beside the name.
        here = path if key == "options" and path else f"{path}.{key}" if path else key
        if isinstance(item, Mapping):
            yield from _flat(item, here)
        else:
            yield here, item


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
