"""Saves and loads a daemon's arrays in a separate thread, so that the loop keeps running.

The coordinator names directories of its own machine. On another host a file is saved into a local
directory of the same name, from which the coordinator fetches it. Files to load are fetched first,
into a directory that no other daemon of the host uses:

    <host directory>/ckpt/<step>-<number>/shard-0.safetensors         saved here
    <host directory>/restore/server-0.1/ckpt/<step>-<number>/...      fetched; removed after loading
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from daemons.files.file_receiver import FileReceiver
from daemons.loop import Loop
from daemons.process import reason_of
from dlctl.errors import DlctlError, os_errors_as
from dlctl.job.inner import SAVED_AS
from dlctl.launch.base import HOST_FILE
from dlctl.records.manifest import MANIFEST, state_of
from dlctl.roles.protocol.effects import ArraysLoaded, ArraysSaved, LoadArrays, SaveArrays
from dlctl.roles.protocol.files import FilesMissing, WantedFile, checkpoint_file
from dlctl.runs import checkpoints
from dlctl.runs.checkpoints import SLOT
from dlctl.shards.base import KEPT, W
from dlctl.wire.messages import Json, Register


class Files:
    def __init__(self, loop: Loop, name: str, away: Away | None = None) -> None:
        """`away`: for a host other than the coordinator's; None on the coordinator's host."""
        self._loop = loop
        self._name = name
        self._away = away
        thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        loop.perform(SaveArrays, lambda effect: thread.submit(self._save, effect))
        loop.perform(LoadArrays, lambda effect: thread.submit(self._load, effect))

    def _load(self, effect: LoadArrays) -> None:
        """Answered by `ArraysLoaded`; an unreadable file ends the daemon with the error."""
        try:
            missing = self._away.missing(effect) if self._away is not None else ()
            if missing:
                self._loop.post(FilesMissing(missing))
                return
            loaded = self._loaded(effect)
            if self._away is not None:
                self._away.clear()
            self._loop.post(loaded)
        except Exception as error:
            self._loop.fail(error)

    def _loaded(self, effect: LoadArrays) -> ArraysLoaded:
        directory = Path(effect.directory)
        if self._away is not None:
            directory = self._away.fetched(directory)
        manifest = checkpoints.read_manifest(directory)
        if self._name.startswith("worker"):
            # The state of torch's optimisers is copied, part by part if a replica is cut.
            own = checkpoints.read_worker(directory, manifest, self._name)
            own = {k: a if k.startswith(SAVED_AS) else a.copy() for k, a in own.items()}
            return ArraysLoaded(own, {})
        slots = checkpoints.slots(directory, manifest, effect.lo)
        saved = {W, *(f"{SLOT}{slot}" for slot in slots)}
        arrays = {
            name: checkpoints.read_slice(directory, manifest, name, effect.lo, effect.hi)
            for name in effect.vectors
            if name in saved
        }
        for table in effect.tables:
            name = f"table.{table.name}"
            arrays[name] = checkpoints.read_table(directory, manifest, *table)
        for kept in effect.kept:
            if (found := checkpoints.read_kept(directory, manifest, *kept[:4])) is not None:
                arrays[f"{KEPT}{kept.name}"] = found
        for extra in effect.extras:
            arrays[extra] = checkpoints.read_averaged(directory, manifest)
        try:
            return ArraysLoaded(arrays, state_of(manifest, effect.lo, effect.hi, effect.own))
        except ValueError as error:
            raise DlctlError(str(error), where=effect.directory) from None

    def _save(self, effect: SaveArrays) -> None:
        sha256, nbytes, error = "", 0, ""
        try:
            directory = Path(effect.directory)
            if self._away is not None:
                directory = self._away.free_space(directory, effect.file)
            path = directory / effect.file
            sha256, nbytes = checkpoints.write_arrays(path, effect.arrays)
        except Exception as failure:
            error = reason_of(failure)
        self._loop.post(ArraysSaved(effect.checkpoint, sha256, nbytes, error))


class Away:
    """Checkpoints on a host that only has files which its own daemons have just saved."""

    def __init__(self, directory: Path, registration: Register) -> None:
        """`directory`: the host directory."""
        self.directory = directory
        self.name = registration.name
        self.root = directory / "restore" / f"{registration.name}.{registration.incarnation}"
        """The directory of fetched files."""

    def fetched(self, directory: Path) -> Path:
        """The local directory for fetched files of this checkpoint of the coordinator."""
        return self.root / checkpoints.FOLDER / directory.name

    def missing(self, effect: LoadArrays) -> tuple[WantedFile, ...]:
        """Needed files that are not fetched yet. Raises DlctlError for a damaged manifest."""
        directory = self.fetched(Path(effect.directory))
        if not (directory / MANIFEST).exists():
            self._clear_older()
            return (WantedFile(checkpoint_file(effect.directory, MANIFEST)),)
        parts = self._parts(checkpoints.read_manifest(directory), effect)
        return tuple(
            WantedFile(
                checkpoint_file(effect.directory, part["file"]), part["nbytes"], part["sha256"]
            )
            for part in parts
            if not (directory / part["file"]).exists()
        )

    def _parts(self, manifest: Json, effect: LoadArrays) -> list[Json]:
        """The files to load: a worker's own; of a server its slice's, and the first for extras."""
        if self.name.startswith("worker"):
            return [p for p in manifest["workers"] if p["name"] == self.name and p["file"]]
        shards: list[Json] = manifest["shards"]
        if effect.tables or effect.kept:
            return shards  # They are sharded differently from the parameters.
        first = shards[:1] if effect.extras else []
        own = [s for s in shards if max(s["lo"], effect.lo) < min(s["hi"], effect.hi)]
        return [*first, *(shard for shard in own if shard not in first)]

    def _clear_older(self) -> None:
        """Remove the fetched files of earlier incarnations."""
        for path in self.root.parent.glob(f"{self.name}.*"):
            if path != self.root:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def free_space(self, directory: Path, file: str) -> Path:
        """The local directory for a file of this checkpoint. Removes files of older ones: the
        coordinator has fetched them, or does not need them. Raises DlctlError.
        """
        here = self.directory / checkpoints.FOLDER / directory.name
        with os_errors_as("cannot make a checkpoint", here):
            here.mkdir(parents=True, exist_ok=True)
        for older in here.parent.iterdir():
            with suppress(OSError, ValueError):  # It is harmless, and may not be a checkpoint.
                if checkpoints.number(older) < checkpoints.number(here):
                    (older / file).unlink(missing_ok=True)
                    older.rmdir()
        return here


def serve_files(loop: Loop, directory: Path, registration: Register) -> None:
    """Save and load the arrays of a daemon; `directory` is that of the run, or of the host."""
    away = Away(directory, registration) if (directory / HOST_FILE).exists() else None
    if away is not None:
        FileReceiver(loop, away.root)
    Files(loop, registration.name, away)
