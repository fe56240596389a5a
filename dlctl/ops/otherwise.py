"""A checkpoint on disk that a job goes on from with another method or optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.algorithms import translation
from dlctl.algorithms.translation import Translation
from dlctl.flat import AVERAGED
from dlctl.messages import Array
from dlctl.runs import checkpoints, manifest, tensorfile
from dlctl.runs.manifest import Manifest

if TYPE_CHECKING:
    from dlctl.config import JobFile
    from dlctl.ops.decide import Good


def translated(good: Good, job: JobFile) -> Translation | None:
    """None: the job goes on with it as it is. Raises UsageError or DlctlError."""
    if not manifest.otherwise(good[1], job):
        return None
    return translation.translated(_Source(*good), job)


def write(told: Translation, source: Path, directory: Path) -> None:
    """All of its files into an empty directory. Raises DlctlError."""
    written = {}
    for part in told.parts:
        sha256, nbytes = checkpoints.write_arrays(directory / part.file, part.arrays())
        written[part.file] = {"sha256": sha256, "nbytes": nbytes}
    checkpoints.share_frozen(source, directory, told.manifest)
    checkpoints.write_manifest(directory, told.completed(written))


def in_words(good: Good, told: Translation, job: JobFile) -> str:
    """What goes on and what does not."""
    kept = f", its progress and what {told.keeps} keeps" if told.keeps else " and its progress"
    text = f"{manifest.otherwise(good[1], job)}: the model{kept} go on"
    if not told.afresh:
        return text
    return f"{text}; {' and '.join(told.afresh)} begin{'s' * (len(told.afresh) == 1)} afresh"


class _Source:
    def __init__(self, directory: Path, told: Manifest) -> None:
        self.manifest = told
        self._directory = directory

    def read(self, tensor: str, lo: int, hi: int) -> Array:
        return checkpoints.read_slice(self._directory, self.manifest, tensor, lo, hi)

    def averaged(self) -> Array:
        return checkpoints.read_extra(self._directory, self.manifest, AVERAGED)

    def worker(self, name: str) -> Mapping[str, Array]:
        files = [p["file"] for p in self.manifest["workers"] if p["name"] == name and p["file"]]
        return _Tensors(self._directory / files[0]) if files else {}


class _Tensors(Mapping[str, Any]):
    """Those of a file, which are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with tensorfile.opened(path) as file:
            self._names = frozenset(file.keys())

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        with tensorfile.opened(self._path) as file:
            return tensorfile.read(self._path, file, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
