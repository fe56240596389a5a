"""The frozen parameters of a replica: their digests, and the run's file of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from daemons.files.arrays import Away
from daemons.process import reason_of
from dlctl.errors import DlctlError, os_errors_as
from dlctl.launch.base import HOST_FILE
from dlctl.model import frozen
from dlctl.model.flat import Layout
from dlctl.roles.protocol.effects import FrozenLoaded, FrozenWritten, LoadFrozen
from dlctl.roles.protocol.files import FilesMissing, WantedFile
from dlctl.runs import checkpoints
from dlctl.runs.tensorfile import CHUNK_BYTES
from dlctl.util import cores, regular
from dlctl.wire.messages import Register


class FrozenHolder(Protocol):
    """A model with frozen parameters, as `TorchReplica` is."""

    layout: Layout

    def frozen(self) -> list[Tensor]: ...

    def load_frozen(self, values: Mapping[int, Tensor]) -> None: ...


def digests(replica: FrozenHolder) -> bytes:
    """16 bytes for each frozen parameter, hashed on all cores."""
    with ThreadPoolExecutor(cores.usable()) as pool:
        return b"".join(pool.map(lambda tensor: frozen.digest(_bytes(tensor)), replica.frozen()))


def write(replica: FrozenHolder, path: Path) -> tuple[str, int]:
    """Write the frozen parameters; returns the file's SHA-256 and bytes. Raises DlctlError."""
    path.parent.mkdir(exist_ok=True)
    return checkpoints.write_chunks(path, _chunks(replica))


def load(replica: FrozenHolder, path: Path, theirs: bytes, mine: bytes = b"") -> list[int]:
    """Load the values with the digests `theirs` into the replica; only differing ones are read.
    Returns their positions. Raises DlctlError if the file does not have them. mine: the replica's
    own digests, if known.
    """
    plan, described = frozen.plan(replica.layout), frozen.entries(replica.layout)
    others = frozen.differing(mine or digests(replica), theirs)
    values = {}
    with os_errors_as("cannot read the frozen parameters", path), regular.opened(path) as file:
        for n in others:
            lo, hi = plan.places[n]
            file.seek(lo)
            data = bytearray(file.read(hi - lo))
            at = n * frozen.DIGEST_BYTES
            if frozen.digest(data) != theirs[at : at + frozen.DIGEST_BYTES]:
                what = f'frozen parameter "{described[n].name}" is corrupted'
                raise DlctlError(what, where=str(path))
            kind = getattr(torch, described[n].dtype)
            flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
            values[n] = flat
    replica.load_frozen(values)
    return others


def _chunks(replica: FrozenHolder) -> Iterator[bytes | memoryview]:
    plan, tensors = frozen.plan(replica.layout), replica.frozen()
    yield plan.head
    for n in plan.order:
        data = _bytes(tensors[n])
        yield from (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))


def _bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order; a contiguous tensor on the CPU is not copied."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class FrozenFile:
    """The run's file of frozen parameters, written and read by a worker on its host."""

    def __init__(self, directory: Path, registration: Register) -> None:
        """`directory`: the run directory, or the host directory."""
        self._writes_to = directory
        self._built = b""
        self._away = Away(directory, registration) if (directory / HOST_FILE).exists() else None

    def digests(self, replica: FrozenHolder) -> bytes:
        """The digests of the parameters that the worker has built."""
        self._built = digests(replica)
        return self._built

    def write(self, replica: FrozenHolder, file: str) -> FrozenWritten:
        try:
            return FrozenWritten(file, *write(replica, self._writes_to / file), "")
        except (DlctlError, OSError) as error:
            return FrozenWritten(file, "", 0, reason_of(error))

    def load(self, replica: FrozenHolder, effect: LoadFrozen) -> FrozenLoaded | FilesMissing:
        """Load the run's frozen parameters, or report missing files. Raises DlctlError."""
        layout = replica.layout
        file = frozen.run_file(layout, effect.digests)
        root = self._away.root if self._away is not None else self._writes_to
        if self._away is not None and not (root / file).exists():
            plan = frozen.plan(layout)
            others = frozen.differing(self._built or digests(replica), effect.digests)
            return FilesMissing((WantedFile(file, plan.nbytes, "", plan.ranges(others)),))
        load(replica, root / file, effect.digests, self._built)
        if self._away is not None:
            self._away.clear()
        return FrozenLoaded()
