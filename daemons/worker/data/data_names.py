"""What the user's data is called: the names of a stream's shards, the files of a dataset.

By them the run notices that the data of two workers, or of two starts, is not the same
(`dlctl/util/listing.py`). No sample is read for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from numbers import Number
from typing import Any

import numpy as np
from torch.utils.data import Subset

from dlctl.util import listing

LISTS = ("samples", "imgs", "files", "paths")
"""Attributes of datasets in which torchvision and its imitators list their files."""

PATH_CHARS_MAX = 4096
"""A longer text is a sample itself: no system opens a path of more characters."""


def name_of(shard: Any) -> str:
    """The name of a shard: of text, a path, a number, or a tuple of these. Raises TypeError."""
    if isinstance(shard, str | bytes | os.PathLike):
        return os.fsdecode(shard)
    if isinstance(shard, Number | np.bool_) or shard is None:
        return str(shard)
    if isinstance(shard, tuple | list):
        return "/".join(map(name_of, shard))
    raise TypeError(f"shards() returns a value of type {type(shard).__name__}")


def digest_of_files(dataset: Any) -> str:
    """A digest of the list of files of a map-style dataset, in their order; "": it lists none."""
    files = _files(dataset)
    found = sha256()
    for name in listing.names(files):
        found.update(f"{name}{listing.ROW}".encode())
    return found.hexdigest() if files else ""


def _files(dataset: Any) -> list[str]:
    """The path of each sample; []: unknown."""
    if isinstance(dataset, Subset):
        whole = _files(dataset.dataset)
        return [whole[row] for row in dataset.indices] if whole else []
    for name in LISTS:
        items = _items(getattr(dataset, "__dict__", {}).get(name))  # A property may do anything.
        if len(items) and len(items) == len(dataset) and _path_in(items[0]) is not None:
            paths = [path for item in items if (path := _path_in(item)) is not None]
            if len(paths) == len(items):
                return paths
    return []


def _items(found: Any) -> Sequence[Any]:
    """The items of a list that could be paths."""
    is_array = isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "OU"
    return found if is_array or isinstance(found, list | tuple) else ()


def _path_in(item: Any) -> str | None:
    """The path that is a sample, or begins it; None: there is none."""
    first = item[0] if isinstance(item, list | tuple) and item else item
    path = os.fsdecode(first) if isinstance(first, str | os.PathLike) else ""
    return path if 0 < len(path) <= PATH_CHARS_MAX else None
