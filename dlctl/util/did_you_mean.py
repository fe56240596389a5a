"""The probable meaning of an unknown word: an alias of a known name, or a typo.

Aliases come first: by its letters alone "async" would match `sync`, its opposite.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

NO_ALIASES: Mapping[str, str] = MappingProxyType({})
ALIKE = 0.6


def closest(
    word: str,
    known: Iterable[str],
    aliases: Mapping[str, str] = NO_ALIASES,
    *,
    alike: float = ALIKE,
) -> str:
    """One of the known words; "" if none is likely. `aliases`: other names for them. alike: from 0
    to 1, how similar a typing error is.
    """
    return next(iter(_closest(word, list(known), aliases, alike)), "")


def meant(word: str, known: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """The end of an error: '; did you mean "x"?', or "" if nothing is likely."""
    found = _closest(word, list(known), aliases)
    return f"; {_question(found)}" if found else ""


def did_you_mean(word: str, known: Iterable[str], aliases: Mapping[str, str] = NO_ALIASES) -> str:
    """'did you mean "x"?', or all there are: "known: x, y"."""
    known = list(known)
    found = _closest(word, known, aliases)
    return _question(found) if found else f"known: {', '.join(known)}"


def _question(words: list[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return f"did you mean {' or '.join(quoted)}?"


def _closest(
    word: str, known: list[str], aliases: Mapping[str, str], alike: float = ALIKE
) -> list[str]:
    """One, or two that are equally likely: "betas" may be "beta1" or "beta2"."""
    word = word.lower()
    other_name = aliases.get(word.replace("_", "-"), "")
    if other_name and other_name in known:
        return [other_name]
    spelled = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word, spelled, n=2, cutoff=alike)
    ratios = [difflib.SequenceMatcher(None, one, word).ratio() for one in found]
    return sorted(
        {spelled[one] for one, ratio in zip(found, ratios, strict=True) if ratio == ratios[0]}
    )
