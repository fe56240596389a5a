"""What identifies the parts of a run's data: their names, not their places in a list.

Every worker lists the data on its own: perhaps in another order (`os.listdir`), perhaps below
another directory. So a name is a path without the directory that all of them share, and the parts
are numbered by their sorted names, which gives one part one number in every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

ROW = "\n"
"""The separator of names in the text of all; no name has one."""


def names(paths: Sequence[str]) -> Iterator[str]:
    """The names of these paths, in their order; any text is a path. They can be encoded."""
    trimmed = [path.rstrip("/") for path in paths]
    first, last = min(trimmed, default=""), max(trimmed, default="")
    pairs = zip(first, last, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    root = first.rfind("/", 0, shared) + 1
    for path in paths:
        yield path[root:].replace(ROW, "\\n").encode("utf-8", "backslashreplace").decode()


def of_text(text: str) -> list[str]:
    """The names that `ROW` joins."""
    return text.split(ROW) if text else []


def numbers(names: Sequence[str]) -> list[int]:
    """The number of each: its place among the sorted names. Parts of one name, which are alike,
    have the next numbers.
    """
    found = [0] * len(names)
    for number, place in enumerate(sorted(range(len(names)), key=names.__getitem__)):
        found[place] = number
    return found
