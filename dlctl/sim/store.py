"""The contents of a run directory, in memory: terms, events, metrics, checkpoints.

It outlives a simulation, so that the next one can resume from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlctl.model.frozen import FOLDER
from dlctl.records.memory import Memory
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.runs.terms import in_lines
from dlctl.util.names import LINKS
from dlctl.wire.messages import Array, Json

MANIFEST = "manifest.json"


@dataclass(slots=True)
class TermsFile:
    data: bytes = b""
    _synced: bytes = b""

    def read(self) -> bytes:
        return self.data

    def write(self, at: int, data: bytes) -> None:
        self.data = self.data[:at] + data

    def write_again(self, at: int, data: bytes) -> None:
        self.data = self.data[:at] + data + self.data[at + len(data) :]

    def sync(self) -> None:
        self._synced = self.data

    def lose(self) -> None:
        """The power of its host was lost."""
        self.data = self._synced


@dataclass(slots=True)
class Store:
    terms_file: TermsFile = field(default_factory=TermsFile)
    issued: list[tuple[str, int]] = field(default_factory=list)
    """Every term, in the order in which they were issued."""
    resume: str = ""
    """Directory of the checkpoint that the current execution resumed from, or ""."""
    run: Json = field(default_factory=dict)
    daemons: dict[str, Json] = field(default_factory=dict)
    events: list[tuple[float, str, str, str]] = field(default_factory=list)
    """(seconds, kind, daemon, text)."""
    stamps: list[float] = field(default_factory=list)
    """Wall clock time of each event, seconds since 1970; it may jump."""
    key_number: int = 0
    """How often the run's key has been renewed."""
    memory: dict[str, Json] = field(default_factory=dict)
    """State that a coordinator persists for its replacement."""
    states: dict[int | str, Any] = field(default_factory=dict)
    """Shard -> the persisted state of its server, `states.Kept`."""
    metrics: list[tuple[float, str, int, Json]] = field(default_factory=list)
    checkpoints: dict[int, Json] = field(default_factory=dict)
    files: dict[str, dict[str, Mapping[str, Array]]] = field(default_factory=dict)
    """Directory -> file -> its arrays."""
    manifests: dict[str, Json] = field(default_factory=dict)
    frozen: dict[str, bytes] = field(default_factory=dict)
    """The file of the frozen parameters, by its name in the run directory."""
    mirrored: dict[str, bytearray] = field(default_factory=dict)
    """Logs and ack records of other hosts, as far as they were transferred."""

    @property
    def terms(self) -> dict[str, int]:
        return in_lines(self.terms_file.data)[0]

    def texts(self, kind: str) -> list[str]:
        return [text for _, k, _, text in self.events if k == kind]

    # ------------------------------------------------------------ checkpoints

    def write(self, directory: str, file: str, arrays: Mapping[str, Array]) -> tuple[str, int]:
        """Store a file; returns its SHA-256 and size in bytes, as `dlctl.checkpoints` does."""
        self.files.setdefault(directory, {})[file] = arrays
        return _digest(arrays), len(packed(arrays))

    def verify(self, directory: str) -> list[str]:
        """Errors of the files that a manifest names."""
        manifest, files = self.manifests[directory], self.files[directory]
        parts = [*manifest["shards"], *manifest["workers"]]
        wrong = [
            part
            for part in parts
            if part["file"] not in files or _digest(files[part["file"]]) != part["sha256"]
        ]
        if shared := manifest.get("frozen"):
            content = self.frozen.get(f"{FOLDER}/{shared['file']}", b"")
            wrong += [shared] if hashlib.sha256(content).hexdigest() != shared["sha256"] else []
        return [f"{directory}/{part['file']} is not what the manifest says" for part in wrong]

    def read_slice(self, directory: str, name: str, lo: int, hi: int) -> Array:
        """Elements [lo, hi) of a vector, however it was sharded when it was written."""
        shards = self.manifests[directory]["shards"]
        parts = [
            self.files[directory][s["file"]][name][max(lo - s["lo"], 0) : max(hi - s["lo"], 0)]
            for s in sorted(shards, key=lambda s: int(s["lo"]))
            if s["lo"] < hi and lo < s["hi"]
        ]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def read_table(
        self, directory: str, name: str, size: int, lo: int, hi: int, dtype: str = "float32"
    ) -> Array:
        """Elements [lo, hi) of a table beside the parameters."""
        whole = np.full(size, np.nan, dtype)
        for shard in self.manifests[directory]["shards"]:
            cut = shard["state"]["tables"][name]
            file = self.files[directory][shard["file"]]
            assert cut["dtype"] == dtype
            whole[cut["lo"] : cut["hi"]] = file[f"table.{name}"]
        return whole[lo:hi]

    def newest(self) -> str:
        """Directory of the newest complete checkpoint, or ""."""
        return max(self.manifests, key=lambda d: int(self.manifests[d]["number"]), default="")

    def past(self, *, resume: bool = True, agents: Mapping[str, int] | None = None) -> Past:
        """What the next coordinator of this run finds: a new execution, unless it is given the
        living `agents`.
        """
        # The strictest disk has nothing that was not synced. Terms that only the memory has do not
        # count here: it may be that of an old database.
        self.terms_file.lose()
        memory = json.loads(json.dumps(self.memory)) if agents is not None else {}
        if not memory:
            self.resume = self.newest() if resume else ""
        restore = "" if Memory(memory).has_released else self.resume
        return Past(
            terms=self.terms,
            incarnations={name: row["incarnation"] for name, row in self.daemons.items()},
            checkpoints=max([*self.checkpoints, *self._numbers(), memory.get("checkpoints", 0)]),
            restore=restore,
            manifest=json.loads(json.dumps(self.manifests[restore])) if restore else {},
            settings=json.loads(json.dumps(self.run.get("settings", {}))) if resume else {},
            memory=memory,
            logs={
                file.removeprefix("logs/").removesuffix(".jsonl"): len(content)
                for file, content in self.mirrored.items()
            },
            agents=dict(agents or {}),
            totals=dict(self.run.get("totals", {})),
            links=dict(self.run.get(LINKS, {})),
            daemons=dict(self.daemons),
        )

    def _numbers(self) -> list[int]:
        """The numbers of the checkpoints that have a directory."""
        return [int(directory.rpartition("-")[2]) for directory in self.files]


def packed(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a file, as sent from host to host."""
    ordered = [(name, np.ascontiguousarray(arrays[name])) for name in sorted(arrays)]
    header = json.dumps([(name, str(array.dtype), array.size) for name, array in ordered])
    return b"\n".join([header.encode(), b"".join(array.tobytes() for _, array in ordered)])


def unpacked(content: bytes) -> dict[str, Array]:
    """The arrays that `packed` has serialised."""
    header, _, data = content.partition(b"\n")
    arrays, at = {}, 0
    for name, dtype, size in json.loads(header):
        arrays[name] = np.frombuffer(data, dtype, size, at).copy()
        at += arrays[name].nbytes
    return arrays


def _digest(arrays: Mapping[str, Array]) -> str:
    return hashlib.sha256(packed(arrays)).hexdigest()
