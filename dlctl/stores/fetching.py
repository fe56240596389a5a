"""A file, or the files of a folder, from an address: downloaded once, whoever asks for it."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from dlctl.errors import DlctlError, NotFound
from dlctl.runs import checkpoints
from dlctl.stores import addresses, checkpoint_store
from dlctl.stores.objects import Objects
from dlctl.util import regular
from dlctl.util.flock import is_locked_within

WEIGHTS = ".safetensors"
LOCKED_S = 3600.0
"""How long a process waits for another one of the host that downloads the same."""


def sizes(text: str, suffix: str = "") -> dict[str, int]:
    """The file at an address, by its name, or those below it. suffix: what their names end with.
    Raises NotFound if there is none, and DlctlError.
    """
    return _found(text, suffix)[1]


def _found(text: str, suffix: str) -> tuple[Objects, dict[str, int]]:
    address = addresses.parse(text)
    above, name = address.split()
    if name:
        objects = checkpoint_store.objects_at(above)
        if name.endswith(suffix) and (nbytes := objects.size(name)) is not None:
            return objects, {name: nbytes}
    objects = checkpoint_store.objects_at(address)
    found = {
        file: nbytes
        for file, nbytes in objects.sizes().items()
        if file.endswith(suffix) and not file.endswith("/")  # Consoles make such for folders.
    }
    if suffix:  # As in a directory of weights.
        found = {file: nbytes for file, nbytes in found.items() if "/" not in file}
    if not found:
        what = f"there is no {suffix} file" if suffix else "there is nothing"
        raise NotFound(f"{what} at {text}")
    return objects, found


def fetched_into(text: str, folder: Path, suffix: str = "") -> Path:
    """The local path of the file at an address, or of a directory with those below it, which is
    downloaded into `folder` unless it is there. Raises DlctlError.
    """
    name = text.rstrip("/").rpartition("/")[2]
    place = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    target = place / name
    folder.mkdir(parents=True, exist_ok=True)
    lock = regular.descriptor(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not is_locked_within(LOCKED_S, lock):
            raise DlctlError(
                f"another process downloads it for more than {LOCKED_S:g} s", where=text
            )
        if not target.exists():
            _download(text, place, suffix)
    finally:
        os.close(lock)
    return target


def fetched(address: str, suffix: str = "") -> Path:
    """`dlctl.fetched`, for tasks and scripts: the local path of the file at an address, or of a
    directory with what is below it. All workers of a host share one download, which is kept in
    `$XDG_CACHE_HOME/dlctl` (~/.cache/dlctl): remove it there if the data changes at its address.
    suffix: what the names end with. A path that is no address is returned as it is. Raises
    DlctlError.
    """
    if not addresses.is_like(address):
        return Path(address)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return fetched_into(address, Path(caches) / "dlctl", suffix)


def _download(text: str, place: Path, suffix: str) -> None:
    objects, found = _found(text, suffix)
    name = text.rstrip("/").rpartition("/")[2]
    unfinished = place.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    is_one = [*found] == [name] and objects.address != text.rstrip("/")
    for file, nbytes in found.items():
        if any(part in ("", ".", "..") for part in file.split("/")):
            raise DlctlError(f'"{file:.200}" there is no name for a file', where=text)
        path = unfinished / name if is_one else unfinished / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        _, written = checkpoints.write_chunks(path, objects.pieces(file))
        if written != nbytes:
            what = f"{file} has {written} bytes instead of {nbytes}"
            raise DlctlError(what, where=text)
    shutil.rmtree(place, ignore_errors=True)
    unfinished.rename(place)
