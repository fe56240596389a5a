"""What somebody probably meant by a word that is not known: the same thing's name here, or a typo.

Other names come first: by their letters alone "async" would be taken for `sync`, its opposite.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIASES: dict[str, str] = {
    # algorithms
    "allreduce": "sync", "asgd": "downpour", "async": "downpour", "async-sgd": "downpour",
    "asynchronous": "downpour", "bsp": "sync", "ddp": "sync", "diloco": "local-sgd",
    "fedavg": "local-sgd", "hogwild": "downpour",
    "localsgd": "local-sgd", "post-local-sgd": "local-sgd", "synchronous": "sync",
    # compressors
    "1-bit": "onebit", "1bit": "onebit", "bfloat16": "bf16", "dense": "none",
    "dgc": "topk-sampled", "float16": "fp16", "gaussiank": "gaussian", "qsgd": "int8",
    "quantize": "int8", "signsgd": "onebit",
    # optimisers
    "adamw": "adam", "nesterov": "momentum",
    # keys and their values
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "gpu": "cuda", "half": "float16",
    "learning-rate": "lr",
}  # fmt: skip
"""What other programs and papers say -> what it is called here. 16 bits have one name as a
compressor and another one as a value: each stands for the other where that is the known one."""


def closest(word: str, known: Iterable[str]) -> str:
    """One of the known words; "" if none is likely."""
    known = list(known)
    other_name = ALIASES.get(word.lower().replace("_", "-"), "")
    if other_name in known:
        return other_name
    return next(iter(difflib.get_close_matches(word.lower(), known, n=1)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'did you mean "x"?', or all there are: "known: x, y"."""
    known = list(known)
    if found := closest(word, known):
        return f'did you mean "{found}"?'
    return f"known: {', '.join(known)}"
