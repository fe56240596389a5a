"""Saving and loading a daemon's arrays in a thread of its own, so that messages go on meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from daemons.loop import Loop
from dlctl import checkpoints
from dlctl.errors import DlctlError
from dlctl.roles.effects import ArraysLoaded, ArraysSaved, LoadArrays, SaveArrays


class Files:
    def __init__(self, loop: Loop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")

    def save(self, effect: SaveArrays) -> None:
        self._thread.submit(self._save, effect)

    def load(self, effect: LoadArrays) -> None:
        """Answered by `ArraysLoaded`; what cannot be read ends the daemon with the error."""
        self._thread.submit(self._load, effect)

    def _load(self, effect: LoadArrays) -> None:
        try:
            self._loop.post(self._loaded(effect))
        except Exception as error:
            self._loop.fail(error)

    def _loaded(self, effect: LoadArrays) -> ArraysLoaded:
        directory = Path(effect.directory)
        manifest = checkpoints.read_manifest(directory)
        if self._name.startswith("worker"):
            return ArraysLoaded(checkpoints.read_worker(directory, manifest, self._name), {})
        arrays = {
            name: checkpoints.read_slice(directory, manifest, name, effect.lo, effect.hi)
            for name in effect.vectors
        }
        for extra in effect.extras:
            arrays[extra] = checkpoints.read_extra(directory, manifest, extra)
        return ArraysLoaded(arrays, _state_of(manifest, effect.lo, effect.hi))

    def _save(self, effect: SaveArrays) -> None:
        sha256, nbytes, error = "", 0, ""
        try:
            path = Path(effect.directory) / effect.file
            sha256, nbytes = checkpoints.write_arrays(path, effect.arrays)
        except DlctlError as failure:
            error = f"{failure.message} ({failure.where})"
        except Exception as failure:
            error = f"a bug in dlctl: {type(failure).__name__}: {failure}"
        self._loop.post(ArraysSaved(effect.checkpoint, sha256, nbytes, error))


def _state_of(manifest: dict[str, Any], lo: int, hi: int) -> dict[str, Any]:
    """What was kept besides the vectors: of the same slice, or of the first one if it was cut
    otherwise; the optimiser's counters are the same in all.
    """
    shards = manifest["shards"]
    same = [shard for shard in shards if (shard["lo"], shard["hi"]) == (lo, hi)]
    state: dict[str, Any] = (same or shards)[0]["state"]
    return state
