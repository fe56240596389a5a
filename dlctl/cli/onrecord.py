"""What the coordinator has agreed to while it could not write it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlctl.cli import console


def warn(result: Mapping[str, Any]) -> None:
    """Say so, if its answer does: whoever asked may have to ask again."""
    why = result.get("unwritten")
    if why:
        console.warn(
            f"the run's database cannot be written ({console.escape(str(why))}): if the "
            "coordinator dies before there is room, this is forgotten, and has to be asked again"
        )
