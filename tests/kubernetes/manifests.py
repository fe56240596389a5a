"""Manifests of the digits, made and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dlctl.ops import cases
from dlctl.ops.kubernetes.manifest import Options, manifest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits" / "joined.toml"
VOLATILE = 'durability = "disk"', 'durability = "none"'
EVERY = {
    "name": "other", "namespace": "lab", "workers": 2, "gpus": 1, "cpu": "500m", "memory": "1.5Gi",
    "storage": "5G", "storage_class": "fast.ssd", "env_from": "s3-keys", "path": "/work/digits",
}  # fmt: skip
"""Every option, with another value than the default."""


def text(file: Path = DIGITS, **options: Any) -> str:
    chosen = {"image": "registry.lab:5000/me/digits:1", **options}
    return manifest(cases.read(file), Options(**chosen))


def objects(printed: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name."""
    documents = list(yaml.safe_load_all(printed))
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    return found


def copied(to: Path, *changes: tuple[str, str]) -> Path:
    """The job file of the digits with its programs, changed, in another directory."""
    content = DIGITS.read_text()
    for old, new in changes:
        assert old in content
        content = content.replace(old, new)
    for name in ("train.py", "loop.py", "digits.npz"):
        (to / name).write_bytes((DIGITS.parent / name).read_bytes())
    file = to / "joined.toml"
    file.write_text(content)
    return file
