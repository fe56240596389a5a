"""Two layouts in one run: the tensors of a run with parties (`dlctl/job/parties.py`).

Each worker builds the tensors of its own side, and lays them out. The layout of the run is that of
the clients and behind it that of the head. It has names and shapes, no values, and every server
knows it. The bounds of the shards are the ends of the sides.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlctl.model.cut import Bounds
from dlctl.model.flat import TRAINED, Layout

CLIENT_PREFIX, TOP_PREFIX, HEAD_PREFIX = "client.", "top.", "head."
"""How the names of the tensors begin: the layers up to the cut, the layers of a client behind those
of the head, and those of the head."""


def joined(parts: Sequence[Layout]) -> Layout:
    """The layout of the run, of the layouts of both sides."""
    return Layout(tuple(entry for part in parts for entry in part.entries))


def parts_of(layout: Layout) -> tuple[Layout, Layout]:
    """The layouts of both sides, the clients' first, of the layout of the run."""
    of_head = tuple(each for each in layout.entries if each.name.startswith(HEAD_PREFIX))
    return Layout(tuple(each for each in layout.entries if each not in of_head)), Layout(of_head)


def bounds_of(layout: Layout) -> Bounds:
    """The bounds of the two servers' shards."""
    mine, heads = (part.size(TRAINED) for part in parts_of(layout))
    return (0, mine, mine + heads)
