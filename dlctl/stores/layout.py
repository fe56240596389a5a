"""Which names a store of checkpoints has below its address, whatever the store is."""

from __future__ import annotations

import re

NAME = re.compile(r"\d{12,}-\d+", re.ASCII)
"""Of a checkpoint: its step and its number."""
OWNER = "run.json"


def has(path: str) -> bool:
    """Whether it can be an object of ours: a file of a checkpoint, or the owner's record. What else
    is below the address is another store's, at an address below this one, or somebody's.
    """
    folder, _, file = path.rpartition("/")
    return path == OWNER or (file != "" and NAME.fullmatch(folder) is not None)
