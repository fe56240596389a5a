"""A daemon's arrays in checkpoints, as `daemons/files/arrays.py` saves and loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlctl.records.manifest import state_of
from dlctl.roles.protocol.effects import ArraysLoaded, ArraysSaved, LoadArrays, SaveArrays
from dlctl.roles.protocol.files import FROZEN, FilesMissing, WantedFile, checkpoint_file
from dlctl.sim.disk import Disk
from dlctl.sim.hostfiles import HostDisks, IncomingDriver, sha256
from dlctl.sim.process import Process
from dlctl.sim.store import MANIFEST, Store, packed, unpacked
from dlctl.util.names import HOME_AGENT
from dlctl.wire.messages import Array

LOAD_S = 0.05


class FilesDriver:
    """Reads and writes checkpoints: the coordinator's host in the store, others on their disks."""

    def __init__(self, process: Process, store: Store, disk: Disk, hosts: HostDisks) -> None:
        self.process = process
        self.store = store
        self.disk = disk
        self.hosts = hosts
        self._fetched: dict[str, bytes] = {}
        process.perform(SaveArrays, self._save)
        process.perform(LoadArrays, self._load)
        IncomingDriver(process, disk, self._fetched.__setitem__)

    @property
    def _is_home(self) -> bool:
        return self.process.agent == HOME_AGENT

    def read(self, file: str) -> bytes | None:
        """The run's file of the frozen parameters; None: it has to be fetched first."""
        return self.store.frozen[file] if self._is_home else self._fetched.get(file)

    def _save(self, effect: SaveArrays) -> None:
        before = {name: array.copy() for name, array in effect.arrays.items()}

        def done() -> None:
            for name, array in effect.arrays.items():
                assert np.array_equal(before[name], array, equal_nan=True), f"{name} changed"
            error = self.disk.error()
            digest, nbytes = self._write(effect, before) if not error else ("", 0)
            self.process.post(ArraysSaved(effect.checkpoint, digest, nbytes, error))

        timeline = self.process.timeline
        takes_s = self.disk.takes_s(self.process.name)
        timeline.after(takes_s, lambda: done() if self.process.alive else None)

    def _write(self, effect: SaveArrays, arrays: Mapping[str, Array]) -> tuple[str, int]:
        if self._is_home:
            return self.store.write(effect.directory, effect.file, arrays)
        content = packed(arrays)
        here = self.hosts.of(self.process.agent)
        here[checkpoint_file(effect.directory, effect.file)] = content
        return sha256(content), len(content)

    def _load(self, effect: LoadArrays) -> None:
        store, missing = self.store, self._missing(effect) if not self._is_home else []
        if missing:
            self.process.post(FilesMissing(tuple(missing)), LOAD_S)
            return
        if not self._is_home:
            store = self._store_of_fetched(effect.directory)
        manifest, files = store.manifests[effect.directory], store.files[effect.directory]
        if self.process.name.startswith("worker"):
            part = self._own(manifest)
            arrays = dict(files[part["file"]]) if part else {}
            self.process.post(ArraysLoaded(arrays, {}), LOAD_S)
            return
        # A server of another host has fetched only the files that its slice lies in.
        saved = next(files[s["file"]] for s in manifest["shards"] if s["file"] in files).keys()
        arrays = {
            name: store.read_slice(effect.directory, name, effect.lo, effect.hi)
            for name in effect.vectors
            if name in saved
        }
        for table in effect.tables:
            arrays[f"table.{table.name}"] = store.read_table(effect.directory, *table)
        for kept in effect.kept:
            name, of_shards = (
                f"kept.{kept.name}",
                [s["state"].get("kept", {}) for s in manifest["shards"]],
            )
            cuts = [cut.get(kept.name) for cut in of_shards]
            if None not in cuts and cuts[-1]["hi"] == kept.size:
                parts = [files[s["file"]][name] for s in manifest["shards"]]
                arrays[name] = np.concatenate(parts)[kept.lo : kept.hi]
        first = min(manifest["shards"], key=lambda s: int(s["lo"]))
        for extra in effect.extras:
            arrays[extra] = files[first["file"]][extra]
        state = state_of(manifest, effect.lo, effect.hi, effect.own)
        self.process.post(ArraysLoaded(arrays, state), LOAD_S)

    def _own(self, manifest: Mapping[str, Any]) -> Any:
        """The manifest's entry for this worker's file; None if it has none."""
        return next((w for w in manifest["workers"] if w["name"] == self.process.name), None)

    def _missing(self, effect: LoadArrays) -> list[WantedFile]:
        """The files to fetch before these arrays can be loaded here."""
        file = checkpoint_file(effect.directory, MANIFEST)
        if file not in self._fetched:
            return [WantedFile(file)]
        manifest = json.loads(self._fetched[file])
        if self.process.name.startswith("worker"):
            own = self._own(manifest)
            parts = [own] if own else []
        else:
            parts = [
                shard
                for shard in manifest["shards"]
                if (shard["lo"] < effect.hi and effect.lo < shard["hi"])
                or effect.tables
                or effect.kept
                or (effect.extras and shard["lo"] == 0)
            ]
        wanted = [
            WantedFile(checkpoint_file(effect.directory, p["file"]), p["nbytes"], p["sha256"])
            for p in parts
        ]
        return [one for one in wanted if one.file not in self._fetched]

    def _store_of_fetched(self, directory: str) -> Store:
        store = Store()
        manifest_file = checkpoint_file(directory, MANIFEST)
        store.manifests[directory] = json.loads(self._fetched[manifest_file])
        store.files[directory] = {
            file.rpartition("/")[2]: unpacked(content)
            for file, content in self._fetched.items()
            if file != manifest_file and not file.startswith(FROZEN)
        }
        return store
