"""The example projects, which an installation has as well."""

from __future__ import annotations

from pathlib import Path

FOLDERS = (Path(__file__).parents[1] / "examples", Path(__file__).parents[2] / "examples")
"""Where they are: in a wheel, and in the source tree."""


def folders() -> dict[str, Path]:
    """Name -> folder, of all that have a job file."""
    root = next(folder for folder in FOLDERS if folder.is_dir())
    return {path.parent.name: path.parent for path in sorted(root.glob("*/*.toml"))}
