"""Files of simulated hosts: a file is on another host only after its transfer.

On the coordinator's host, files are in the run's `Store`. Every other host has its own disk, and
files are transferred as bytes, with the effects of `dlctl/roles/protocol/files.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from dlctl.roles.protocol import files as t
from dlctl.sim.disk import SAVE_S, Disk
from dlctl.sim.process import Process
from dlctl.sim.store import MANIFEST, Store, packed, unpacked
from dlctl.wire.messages import FileData

Find = Callable[[str], bytes | None]
"""The content of a file; None: there is none."""
LOG_PART = 1
"""Simulated logs are never rotated."""


class HostDisks:
    """The disks of hosts other than the coordinator's: agent -> file -> content."""

    def __init__(self) -> None:
        self._files: defaultdict[str, dict[str, bytes]] = defaultdict(dict)

    def remove(self, agent: str, file: str) -> None:
        self._files[agent].pop(file, None)

    def of(self, agent: str) -> dict[str, bytes]:
        return self._files[agent]


class OutgoingDriver:
    """Answers `ReadFile`, as `daemons/files/file_sender.py` does."""

    def __init__(self, process: Process, find: Find, remove: Callable[[str], None]) -> None:
        self.process = process
        self.find = find
        process.perform(t.ReadBytes, self._read)
        process.perform(t.RemoveCopy, lambda effect: remove(effect.file))

    def _read(self, effect: t.ReadBytes) -> None:
        question, content = effect.question, self.find(effect.question.file)
        offset, error = question.offset, ""
        if content is None:
            content, error = b"", t.NOT_THERE
        data = content[offset : offset + min(question.nbytes, t.BYTES_MAX)]
        answer = FileData(
            self.process.name, question.request, question.file, LOG_PART, offset, len(content),
            data, error,
        )  # fmt: skip
        self.process.post(t.BytesRead(effect.peer, answer))


class IncomingDriver:
    """Takes the bytes of whole files, as `daemons/files/file_receiver.py` does."""

    def __init__(self, process: Process, disk: Disk, keep: Callable[[str, bytes], None]) -> None:
        self.process = process
        self.disk = disk
        self.keep = keep
        self._taken: dict[str, bytearray] = {}
        process.perform(t.TakeBytes, self._take)
        process.perform(t.SealFile, self._seal)
        process.perform(t.DiscardFile, self._discard)

    def _take(self, effect: t.TakeBytes) -> None:
        if error := self.disk.error():
            self.process.post(t.FileSealed(effect.file, error))
        write(self._taken.setdefault(effect.file, bytearray()), effect.offset, effect.data)

    def _discard(self, effect: t.DiscardFile) -> None:
        self._taken.pop(effect.file, None)

    def _seal(self, effect: t.SealFile) -> None:
        content = bytes(self._taken.pop(effect.file, b""))
        error = self.disk.error()
        if len(content) != effect.nbytes or effect.sha256 not in ("", sha256(content)):
            error = "what has come is not what was saved there"
        if not error:
            self.keep(effect.file, content)
        self.process.post(t.FileSealed(effect.file, error), SAVE_S)


class MirrorDriver:
    """Keeps the logs and ack records of other hosts, as `daemons/files/log_mirror.py` does."""

    def __init__(self, process: Process, mirrored: dict[str, bytearray], disk: Disk) -> None:
        self.process = process
        self.mirrored = mirrored
        self.disk = disk
        process.perform(t.TakeLog, self._take)
        process.perform(t.ReplaceFile, self._replace)
        process.perform(t.RotateLog, self._rotate)

    def _take(self, effect: t.TakeLog) -> None:
        if error := self.disk.error():
            self.process.post(t.MirrorFailed(effect.file, effect.offset, error))
            return
        log = self.mirrored.setdefault(effect.file, bytearray())
        assert effect.offset <= len(log), f"{effect.file} would have a hole"
        write(log, effect.offset, effect.data)

    def _replace(self, effect: t.ReplaceFile) -> None:
        self.mirrored[effect.file] = bytearray(effect.data)

    def _rotate(self, effect: t.RotateLog) -> None:
        raise AssertionError(f"{effect.file} was not rotated at its origin")


def in_store(store: Store) -> Find:
    """The files of checkpoints beside the coordinator, for daemons on other hosts."""

    def find(file: str) -> bytes | None:
        directory, _, name = file.rpartition("/")
        if directory == t.FROZEN:
            return store.frozen.get(file)
        if name == MANIFEST and directory in store.manifests:
            return json.dumps(store.manifests[directory]).encode()
        arrays = store.files.get(directory, {}).get(name)
        return None if arrays is None else packed(arrays)

    return find


def into_store(store: Store) -> Callable[[str, bytes], None]:
    def keep(file: str, content: bytes) -> None:
        directory, _, name = file.rpartition("/")
        if directory == t.FROZEN:
            store.frozen[file] = content
        else:
            store.files.setdefault(directory, {})[name] = unpacked(content)

    return keep


def on_host(disk: dict[str, bytes], processes: list[Process]) -> Find:
    """The files of an agent's host: saved files, and the current output of its processes."""

    def find(file: str) -> bytes | None:
        folder, _, label = file.partition("/")
        label = label.removesuffix(".jsonl")
        writer = next((p for p in processes if str(p) == label), None)
        if folder == t.LOGS:
            return bytes(writer.log) if writer is not None else None
        if folder == t.ACKS:
            return writer.acks or None if writer is not None else None
        return disk.get(file)

    return find


def coordinate(process: Process, store: Store, disk: Disk) -> None:
    """Register the coordinator's effects on files of other hosts."""
    OutgoingDriver(process, in_store(store), lambda file: None)
    IncomingDriver(process, disk, into_store(store))
    process.perform(t.CheckFile, partial(_check, process, in_store(store)))
    MirrorDriver(process, store.mirrored, disk)


def _check(process: Process, find: Find, effect: t.CheckFile) -> None:
    content = find(effect.file) or b""
    is_right = (len(content), sha256(content)) == (effect.nbytes, effect.sha256)
    error = "" if is_right else f"{effect.file}: its SHA-256 is not the one that it should have"
    process.post(t.FileSealed(effect.file, error), SAVE_S)


def write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
