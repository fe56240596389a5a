"""Text that may be shown: it neither steers a terminal nor looks like what it is not."""

from __future__ import annotations

import re

_HARMFUL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""C0 without the line feed, DEL, C1, marks of direction, what has no width, lone surrogates."""


def check_harmless(text: str) -> None:
    """Raises AssertionError naming the first character that must not be shown."""
    found = _HARMFUL.search(text)
    assert found is None, f"U+{ord(found[0]):04X} in {text[: found.end()][-60:]!a}"
