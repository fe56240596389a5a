"""The words of the standard library's source text.

It is the same wherever the same version of Python is: private modules are left out, some of which
are made when Python is built.
"""

import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
from torch.nn import functional

CHARACTERS = 5_000_000
"""At the beginning of the text."""
SENTENCE = 100
"""Words that windows do not reach out of. Those of a sentence make their steps at once: in one of
1,000 words, as word2vec.c has them, some are so often that their steps add up to far too long ones.
"""
LEAST = 5
"""Words that are rarer are no words."""
LEFT_OUT = {"encodings", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
"""Directories of the standard library: tables of characters, tests, and what is not everywhere."""


@cache
def vocabulary():
    """(words, how often each of them is there), the most frequent first."""
    counts = Counter(text()).most_common()
    return tuple(zip(*[(word, n) for word, n in counts if n >= LEAST], strict=True))


@cache
def sentences():
    """The numbers of all words, int64[at most SENTENCE] each, in the order of the text."""
    number = {word: n for n, word in enumerate(vocabulary()[0])}
    known = np.array([number[word] for word in text() if word in number])
    return [known[at : at + SENTENCE] for at in range(0, len(known), SENTENCE)]


@cache
def text():
    """The parts of all names and other words, in small letters."""
    directory, found, characters = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(directory.rglob("[a-z]*.py")):
        if LEFT_OUT & set(path.relative_to(directory).parts):
            continue
        source = path.read_text("utf-8", errors="replace")[: CHARACTERS - characters]
        characters += len(source)
        found += re.findall(r"[a-z]+|[A-Z][a-z]+|[A-Z]+(?![a-z])", source)
        if characters == CHARACTERS:
            return [word.lower() for word in found]
    raise ValueError(f"{directory} has {characters:,} characters of source: {CHARACTERS:,} needed")


def nearest(inputs, word, count=8):
    """The words whose vectors point in the most similar direction."""
    number = vocabulary()[0].index(word)
    directions = functional.normalize(inputs, dim=1)
    found = (directions @ directions[number]).topk(count + 1).indices.tolist()
    return [vocabulary()[0][n] for n in found if n != number][:count]
