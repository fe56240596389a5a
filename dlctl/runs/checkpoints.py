"""Checkpoints on disk: how they are written, read, verified and re-sharded.

    <run>/ckpt/<step, 12 digits>-<number>/
        shard-0.safetensors    "w" float32[hi-lo], "slot.<name>" float32[hi-lo] per optimiser slot;
                               the first shard also "averaged" float64;
                               "table.<name>" [n], of its dtype, per table but the parameters, n
                               from the shard's state in the manifest
                               "kept.<name>" float32[n] per array that the optimiser keeps beside
                               matrices, of all matrices of the shard; n as for tables
        worker-0.safetensors   residuals
        frozen-<hash>.safetensors   the frozen parameters by name, in their own dtypes: a hard link
                               to the run's one file of them
        manifest.json          written last: a directory without it is not a checkpoint

Every file is written under a temporary name, hashed while it is written, synced and renamed, so
that a crash at any moment leaves the old file, the new one or none, never half of one. The manifest
has every file's size and SHA-256. A slice of the flat vector is assembled from however many shards
there were, so a run may resume with another number of servers. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import DlctlError, os_errors_as
from dlctl.model import frozen
from dlctl.model.flat import AVERAGED
from dlctl.records.manifest import (
    FROZEN,
    MANIFEST,
    Manifest,
    kept,
    layout,
    models,
    parse,
    parts,
    serialise,
    tables,
)
from dlctl.runs import tensorfile
from dlctl.util import regular
from dlctl.util.fsync import replacing, sync_directory
from dlctl.util.hashing import Progress, no_progress, sha256_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

FOLDER = "ckpt"
W = "w"
SLOT = "slot."
TABLE = "table."
KEPT = "kept."
_NAME = re.compile(r"(\d{12,})-(\d+)")
Cuts = Iterable[tuple[str, Mapping[str, Any]]]
"""(file, bounds of the part in it), ..."""

# ---------------------------------------------------------------- writing


def create(run_directory: Path, step: int, number: int) -> Path:
    """Create the directory of checkpoint `number`, and make its name and parents durable.

    Raises DlctlError, also if it exists (it belongs to another checkpoint), or if the run directory
    no longer exists.
    """
    directory = run_directory / FOLDER / f"{step:012d}-{number}"
    with os_errors_as("cannot make a checkpoint", directory):
        directory.parent.mkdir(exist_ok=True)  # Not parents: the run may have been moved.
        directory.mkdir()
        for made in (directory, directory.parent, run_directory):
            sync_directory(made.parent)
    return directory


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> tuple[str, int]:
    """Write arrays as one safetensors file; returns its SHA-256 (hexadecimal) and size in bytes.

    The arrays are hashed while they are written and never copied. Raises DlctlError naming `path`
    (disk full, no permission, a dtype that safetensors does not have); no file is left then.
    """
    return write_chunks(path, tensorfile.chunks(path, arrays))


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write the bytes of a file; returns its SHA-256 and size. Raises DlctlError."""
    digest = hashlib.sha256()
    with os_errors_as("cannot write", path, f"df -h {path.parent}"), replacing(path) as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        nbytes = file.tell()
    return digest.hexdigest(), nbytes


def share_frozen(source: Path, target: Path, manifest: Manifest) -> None:
    """Provide the file of the frozen parameters in `target` if there are any and it is missing: a
    hard link, or a copy where links are impossible. Raises DlctlError.
    """
    if (part := manifest.get(FROZEN)) is None or (target / part["file"]).exists():
        return
    there, here = source / part["file"], target / part["file"]
    with os_errors_as("cannot save the frozen parameters", here):
        target.mkdir(exist_ok=True)
        try:
            here.hardlink_to(there)
        except OSError:
            with replacing(here) as file, regular.opened(there) as read:
                shutil.copyfileobj(read, file, tensorfile.CHUNK_BYTES)
        sync_directory(target)


def manifest_bytes(manifest: Manifest, where: str) -> bytes:
    """The content of a manifest's file. Raises DlctlError naming `where`."""
    return serialise(manifest, where)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Complete the checkpoint. Raises DlctlError, also if a file is missing or has another size: it
    may have been removed since its writer was acknowledged.
    """
    path = directory / MANIFEST
    data = serialise(manifest, str(path))
    if problems := _part_problems(directory, manifest, hashes=False):
        problem = problems[0].removeprefix(f"{directory}/")
        raise DlctlError(f"cannot be completed: {problem}", where=str(directory))
    write_chunks(path, [data])


# ---------------------------------------------------------------- reading


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, every field checked. Raises DlctlError naming the file."""
    path = directory / MANIFEST
    with os_errors_as("cannot read the manifest", path):
        data = regular.read_bytes(path)
    return parse(data, str(path))


def read_slice(directory: Path, manifest: Manifest, tensor: str, lo: int, hi: int) -> Array:
    """Elements [lo, hi) of the flat vector `tensor` ("w", "slot.sum"), from all shards they are in.

    Raises DlctlError naming the file that is missing, truncated, or has no such tensor of that
    length.
    """
    import numpy as np

    if not 0 <= lo <= hi <= manifest["size"]:
        raise DlctlError(f"[{lo}, {hi}) is not within the model's {manifest['size']} elements")
    if tensor == W and (found := models(manifest)):
        total = np.zeros(hi - lo, np.float64)
        for model in found:
            total += _assembled(directory, W, [(model["file"], model)], lo, hi, "float32")
        return (total / len(found)).astype(np.float32)
    cuts = [(shard["file"], shard) for shard in manifest["shards"]]
    return _assembled(directory, tensor, cuts, lo, hi, "float32")


def read_table(
    directory: Path,
    manifest: Manifest,
    name: str,
    size: int,
    lo: int,
    hi: int,
    dtype: str = "float32",
) -> Array:
    """dtype[hi-lo]: elements of a table of `size` elements beside the parameters, however it was
    sharded when it was saved. Raises DlctlError.
    """
    last = tables(manifest["shards"][-1])
    if name not in last or last[name]["hi"] != size:
        raise DlctlError(f'it has no table "{name}" of {size} elements', where=str(directory))
    cuts = [(shard["file"], tables(shard)[name]) for shard in manifest["shards"]]
    return _assembled(directory, TABLE + name, cuts, lo, hi, dtype)


def read_kept(
    directory: Path, manifest: Manifest, name: str, size: int, lo: int, hi: int
) -> Array | None:
    """float32[hi-lo]: of the `size` elements that the optimiser keeps under this name beside the
    matrices of the model. None: the checkpoint has none of that size, but those of another
    optimiser, or options. Raises DlctlError.
    """
    found = [kept(shard).get(name) for shard in manifest["shards"]]
    if found[-1] is None or found[-1]["hi"] != size or None in found:
        return None
    cuts = [(s["file"], cut) for s, cut in zip(manifest["shards"], found, strict=True) if cut]
    return _assembled(directory, KEPT + name, cuts, lo, hi, "float32")


def _assembled(directory: Path, tensor: str, cuts: Cuts, lo: int, hi: int, dtype: str) -> Array:
    """Elements [lo, hi) of a sharded vector."""
    import numpy as np

    parts = [np.zeros(0, dtype)]
    for name, cut in cuts:
        first, last = max(lo, cut["lo"]), min(hi, cut["hi"])
        if first < last:
            part = tensorfile.vector(directory / name, tensor, dtype, cut["hi"] - cut["lo"])
            parts.append(part[first - cut["lo"] : last - cut["lo"]])
    return np.concatenate(parts)


def read_averaged(directory: Path, manifest: Manifest) -> Array:
    """float64: the averaged buffers, which only the first shard has.

    Raises DlctlError naming the file if it has none of the length given by the layout.
    """
    path, size = directory / manifest["shards"][0]["file"], layout(manifest).size(AVERAGED)
    return tensorfile.vector(path, AVERAGED, "float64", size).copy()


def frozen_file(directory: Path, manifest: Manifest) -> Path | None:
    """The file with the frozen parameters by name; None if the model has none. Raises DlctlError if
    the file does not match the layout.
    """
    if not frozen.entries(layout(manifest)):
        return None
    if FROZEN not in manifest:
        raise DlctlError("it lacks the frozen parameters", where=str(directory))
    path: Path = directory / manifest[FROZEN]["file"]
    head = frozen.plan(layout(manifest)).head
    with os_errors_as("cannot read it", path), regular.opened(path) as file:
        is_right = file.read(len(head)) == head
    if not is_right:
        raise DlctlError("its tensors are not the frozen parameters of the layout", where=str(path))
    return path


def slots(directory: Path, manifest: Manifest, at: int = 0) -> list[str]:
    """Names of the optimiser slots that were saved ("slot.sum" in the files is "sum" here), by the
    shard that has element `at`.
    """
    shards = manifest["shards"]
    part = next((shard for shard in shards if shard["lo"] <= at < shard["hi"]), shards[0])
    names = tensorfile.read(directory / part["file"])
    return sorted(name[len(SLOT) :] for name in names if name.startswith(SLOT))


def read_worker(directory: Path, manifest: Manifest, name: str) -> dict[str, Array]:
    """The arrays that worker `name` saved, mapped as by `tensorfile.read`; {} if it saved none.
    Raises DlctlError.
    """
    for worker in manifest["workers"]:
        if worker["name"] == name and worker["file"]:
            return tensorfile.read(directory / worker["file"])
    return {}


# ---------------------------------------------------------------- checking


def verify(directory: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, a sentence each; [] if nothing. Hashes every file. Without
    `hashes` it is quick, and finds only missing files and wrong sizes.
    """
    try:
        manifest = read_manifest(directory)
        problems = _part_problems(directory, manifest, hashes)
        if hashes and not problems:
            _check_tensors(directory, manifest)
    except DlctlError as error:
        return [f"{error.where}: {error.message}"]
    return problems


def _check_tensors(directory: Path, manifest: Manifest) -> None:
    """Raises DlctlError unless the files, which are as written, have all that a resume needs."""
    vectors = (W, *(SLOT + slot for slot in slots(directory, manifest)))
    for shard in manifest["shards"]:
        wanted = {name: {**shard, "dtype": "float32"} for name in vectors}
        wanted |= {TABLE + name: cut for name, cut in tables(shard).items()}
        wanted |= {KEPT + name: {**cut, "dtype": "float32"} for name, cut in kept(shard).items()}
        for tensor, cut in wanted.items():
            size = cut["hi"] - cut["lo"]
            tensorfile.vector(directory / shard["file"], tensor, cut["dtype"], size)
    read_averaged(directory, manifest)
    frozen_file(directory, manifest)


def _part_problems(directory: Path, manifest: Manifest, hashes: bool) -> list[str]:
    problems = []
    for part in parts(manifest):
        if part["file"]:
            sha256 = part["sha256"] if hashes else None
            problems += file_problems(directory / part["file"], part["nbytes"], sha256)
    return problems


class Digest:
    """Whether bytes that come in pieces are those of a file."""

    def __init__(self) -> None:
        self._sha256, self._nbytes = hashlib.sha256(), 0

    def add(self, piece: bytes) -> None:
        self._sha256.update(piece)
        self._nbytes += len(piece)

    def problems(self, where: str, part: Mapping[str, Any]) -> list[str]:
        """What is wrong with them; part: the entry of the manifest."""
        if self._nbytes != part["nbytes"]:
            return [f"{where}: it has {self._nbytes} bytes instead of {part['nbytes']}"]
        if self._sha256.hexdigest() != part["sha256"]:
            return [f"{where}: its SHA-256 is not the one that it should have"]
        return []


def file_problems(
    path: Path, nbytes: int, sha256: str | None, progress: Progress = no_progress
) -> list[str]:
    """What is wrong with one file, a sentence; [] if nothing. sha256: None to check only the size.
    progress: called repeatedly while it is read.
    """
    try:
        info = path.lstat()
        size_bytes = info.st_size
        if not stat.S_ISREG(info.st_mode):
            return [f"{path}: it is {regular.kind(info.st_mode)}, not a regular file"]
        if size_bytes != nbytes:
            how = "cut off" if size_bytes < nbytes else "too long"
            return [f"{path}: {how}: it has {size_bytes} bytes instead of {nbytes}"]
        if sha256 is not None:
            with regular.opened(path) as file:
                if sha256_of(file, nbytes, progress) != sha256:
                    return [f"{path}: its SHA-256 is not the one that it should have"]
    except FileNotFoundError:
        return [f"{path}: missing"]
    except OSError as error:
        return [f"{path}: {tensorfile.why(error, path)}"]
    return []


# ---------------------------------------------------------------- listing, pruning


def candidates(run_directory: Path) -> list[Path]:
    """Every directory with the name of a checkpoint, complete or not, newest last."""
    try:
        entries = list((run_directory / FOLDER).iterdir())
    except FileNotFoundError:
        return []
    real = [e for e in entries if _NAME.fullmatch(e.name) and e.is_dir() and not e.is_symlink()]
    return sorted(real, key=number)


def number(directory: Path) -> tuple[int, int]:
    """(number, step) of a checkpoint directory, from its name: the order of age."""
    step, number = directory.name.split("-")
    return int(number), int(step)


def of_run(run_directory: Path, path: str) -> Path:
    """The current path of a checkpoint of this run; `path` may date from before a move."""
    return run_directory / FOLDER / Path(path).name


def highest_number(run_directory: Path) -> int:
    """The number of the newest checkpoint on disk, complete or not; 0 if there is none."""
    return max((number(directory)[0] for directory in candidates(run_directory)), default=0)


def finished(run_directory: Path) -> list[Path]:
    """All checkpoints that were completed, newest last, damaged ones included."""
    return [found for found in candidates(run_directory) if os.path.lexists(found / MANIFEST)]


def complete(run_directory: Path) -> dict[Path, Manifest]:
    """All checkpoints with a readable manifest, newest last. Does not check their files."""
    found = {}
    for directory in finished(run_directory):
        with suppress(DlctlError):
            found[directory] = read_manifest(directory)
    return found


def remove_incomplete(
    run_directory: Path, before: int, on_problem: Callable[[str], None] = lambda problem: None
) -> list[Path]:
    """Remove directories without a manifest that attempts numbered below `before` left behind.

    On a full disk, nothing else would free space for the next attempt. Returns what was removed.
    """
    left = set(candidates(run_directory)) - set(finished(run_directory))
    old = sorted((found for found in left if number(found)[0] < before), key=number)
    return [directory for directory in old if remove(directory, on_problem)]


def remove(directory: Path, on_problem: Callable[[str], None] = lambda problem: None) -> bool:
    """Remove one checkpoint; False if that fails, which is reported to `on_problem`."""
    try:
        # Without its manifest, a partially removed checkpoint does not count as one.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)
    except OSError as error:
        on_problem(f"{directory}: cannot remove this checkpoint: {error.strerror}")
        return False
    return True
