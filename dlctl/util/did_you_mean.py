"""What somebody probably meant by a word that is not known: the same thing's name here, or a typo.

Other names come first: by their letters alone "async" would be taken for `sync`, its opposite.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def closest(word: str, known: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """One of the known words; "" if none is likely. `aliases`: what others say for them."""
    known = list(known)
    other_name = aliases.get(word.lower().replace("_", "-"), "")
    if other_name and other_name in known:
        return other_name
    return next(iter(difflib.get_close_matches(word.lower(), known, n=1)), "")


def meant(word: str, known: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """As the end of an error: '; did you mean "x"?', or "" if nothing is likely."""
    found = closest(word, known, aliases)
    return f'; did you mean "{found}"?' if found else ""


def did_you_mean(word: str, known: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """'did you mean "x"?', or all there are: "known: x, y"."""
    known = list(known)
    if found := closest(word, known, aliases):
        return f'did you mean "{found}"?'
    return f"known: {', '.join(known)}"
