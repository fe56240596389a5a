"""What daemons say of themselves, cut so that an answer about several of them fits into one header.

A report may be as large as a header and nested as deeply as a message may be: in an answer beside
others it would be too much of both, nobody could read that answer, and so nobody would see which
daemon it is that talks like this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXT_BYTES_MAX = 400
LEVELS_MAX = 4
"""Of lists and objects within each other: what is deeper is shown as empty."""
VALUE_BYTES = 9
"""What a number, or the beginning of anything else, takes at most."""


def shortened(value: Any, room_bytes: int) -> Any:
    """The same JSON without the logs' last lines, in about `room_bytes` at most.

    Texts are cut to `TEXT_BYTES_MAX`; of lists and objects comes what there is room for, and what
    is simple comes first: the keys of our own, in their first level, are always there.
    """
    return _Room(room_bytes).fill(value, LEVELS_MAX)


@dataclass(slots=True)
class _Room:
    left_bytes: int

    def fill(self, value: Any, levels: int) -> Any:
        self.left_bytes -= VALUE_BYTES
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return self._object(value, levels) if levels else {}
        if isinstance(value, (list, tuple)):
            return self._list(value, levels) if levels else []
        return value

    def _text(self, text: str) -> str:
        data = text.encode(errors="backslashreplace")[:TEXT_BYTES_MAX]
        self.left_bytes -= len(data)
        return data.decode(errors="ignore")

    def _list(self, values: list[Any] | tuple[Any, ...], levels: int) -> list[Any]:
        found: list[Any] = []
        for value in values:
            if self.left_bytes <= 0:
                break
            found.append(self.fill(value, levels - 1))
        return found

    def _object(self, values: dict[str, Any], levels: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in sorted(values, key=lambda key: isinstance(values[key], (dict, list, tuple))):
            if self.left_bytes <= 0 and levels < LEVELS_MAX:
                break
            if key != "last_lines":
                found[self.fill(key, 0)] = self.fill(values[key], levels - 1)
        return found
