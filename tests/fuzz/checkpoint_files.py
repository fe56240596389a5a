"""Checkpoints: the manifest, the check of all files, and reading what the check found good.

An input is the files of a checkpoint, each behind its name; the manifest comes first. Who changes a
manifest on purpose makes its digest right again, and so do most cases here.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import manifests
import numpy as np

from dlctl.cli.commands import checkpoint as checkpoint_command
from dlctl.cli.ui import console
from dlctl.errors import DlctlError
from dlctl.model.flat import slice_bounds
from dlctl.records import manifest
from dlctl.records.best import Best
from dlctl.runs import checkpoints, lineage

from . import mutation, trees
from .harmless import check_harmless
from .parts import join, split
from .scratch import scratch

NAME = "checkpoint"
MEMORY_BYTES = 6_000_000
MEMORY_PER_BYTE = 100
SIZE = 23
LAYOUT = [["weight", "trained", [4, 5], "float32", ["tied"]], *manifests.LAYOUT[1:]]
_TOKENS = [
    token.encode()
    for token in (
        '"', ":", ",", "[", "]", "{", "}", "null", "NaN", "Infinity", "-1", "1e999", "9" * 30,
        '"\\ud800"', '"../x"', '"/dev/zero"', '"manifest.json"', '"F32"', '"BF16"', '"F8_E4M3"',
        '"data_offsets"', '"shape"', '"lo"', '"hi"', '"nbytes"', '"__metadata__"', "[" * 1000,
    )
] + [(2**40).to_bytes(8, "little"), b"\x80", b"\xff\xfe"]  # fmt: skip

_DTYPES = [("F64", 8), ("F16", 2), ("I32", 4), ("U64", 8), ("BF16", 2), ("F8_E4M3", 1), ("BOOL", 1)]


# ---------------------------------------------------------------- what is tried


def seeds() -> list[bytes]:
    """Checkpoints of one, two and many servers, and one whose worker saved nothing."""
    return [_seed(1, True), _seed(2, True), _seed(2, False), _seed(4, True)]


def _seed(servers: int, with_worker: bool) -> bytes:
    directory = scratch("seed")
    shards, w = [], np.linspace(-1, 1, SIZE, dtype=np.float32)
    for index in range(servers):
        lo, hi = slice_bounds(SIZE, servers, index)
        arrays = {"w": w[lo:hi], "slot.sum": abs(w[lo:hi])}
        if index == 0:
            arrays["averaged"] = np.ones(4)
        state = {"version": 40, "lr": 0.1, "counters": {"updates": 40}, "deliveries": [[0, 1, 7]]}
        shards.append(_part(directory, f"shard-{index}", arrays) | {"lo": lo, "hi": hi})
        shards[-1]["state"] = state
    residual = {"residual": np.zeros(SIZE)}
    if with_worker:
        worker = _part(directory, "worker-0", residual)
    else:
        worker = {"name": "worker-0", "file": "", "sha256": "", "nbytes": 0, "state": {}}
    made = manifests.whole(
        layout=LAYOUT, shards=shards, workers=[worker], evaluation={"accuracy": 0.9},
        frozen=manifests.frozen_part(directory, LAYOUT),
    )  # fmt: skip
    checkpoints.write_manifest(directory, made)
    names = ["manifest.json", *(part["file"] for part in manifest.parts(made) if part["file"])]
    return _joined([[name.encode(), (directory / name).read_bytes()] for name in names])


def _part(directory: Path, name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    file = f"{name}.safetensors"
    sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
    return {"name": name, "file": file, "sha256": sha256, "nbytes": nbytes, "state": {}}


def _files(data: bytes) -> list[list[bytes]]:
    """[name, content] of each file of an input."""
    return [[*part.partition(b"\0")[::2]] for part in split(data)]


def _joined(files: list[list[bytes]]) -> bytes:
    return join(b"\0".join(file) for file in files)


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    files, others = _files(data), _files(other)
    choice = random.randrange(10)
    if choice == 9 or not files or not others:
        return mutation.mutate(random, data, other, _TOKENS)
    if choice < 5:
        files[0][1] = _change_manifest(random, files[0][1], others[0][1])
    elif choice == 5:
        files[0][1] = mutation.mutate(random, files[0][1], others[0][1], _TOKENS)
    else:
        _change_file(random, files, random.choice(others)[1])
    return _joined(files)


def _change_manifest(random: Random, data: bytes, other: bytes) -> bytes:
    with suppress(ValueError, RecursionError):
        tree = trees.mutate(random, json.loads(data), json.loads(other))
        return _signed(random, tree)
    return mutation.mutate(random, data, other, _TOKENS)


def _signed(random: Random, tree: Any) -> bytes:
    """A manifest with the digest that it should have."""
    if not isinstance(tree, dict):
        return json.dumps(tree).encode()
    tree.pop("digest", None)
    text = trees.deep_json(random, json.dumps(tree))
    with suppress(ValueError, RecursionError, TypeError):
        tree = json.loads(text)
        digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
        return json.dumps(tree | {"digest": digest}).encode()
    return text.encode()


def _change_file(random: Random, files: list[list[bytes]], other: bytes) -> None:
    """Another content of one file; mostly the manifest knows its new size and hash."""
    name, content = file = random.choice(files)
    if random.random() < 0.6:
        file[1] = _change_tensors(random, content)
    else:
        file[1] = mutation.mutate(random, content, other, _TOKENS)
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        tree = json.loads(files[0][1])
        for part in (*tree["shards"], *tree["workers"]):
            if part["file"].encode() == name:
                digest = hashlib.sha256(file[1]).hexdigest()
                part |= {"nbytes": len(file[1]), "sha256": digest}
        files[0][1] = _signed(random, tree)


def _change_tensors(random: Random, data: bytes) -> bytes:
    """A safetensors file with another head."""
    length = int.from_bytes(data[:8], "little")
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        tree = json.loads(data[8 : 8 + length])
        for entry in tree.values():
            if random.random() < 0.3:
                entry["dtype"], item_bytes = random.choice(_DTYPES)
                begin, end = entry["data_offsets"]
                entry["shape"] = [(end - begin) // item_bytes]
        tree = trees.mutate(random, tree, tree) if random.random() < 0.7 else tree
        head = json.dumps(tree).encode()
        return len(head).to_bytes(8, "little") + head + data[8 + length :]
    return data


# ---------------------------------------------------------------- what must hold


@cache
def _directory() -> Path:
    directory = scratch("run") / checkpoints.FOLDER / "000000000012-1"
    directory.mkdir(parents=True)
    return directory


def target(data: bytes) -> None:
    """`verify` says what is wrong and never fails; what it finds good can be read as promised."""
    directory = _directory()
    _write(directory, _files(data))
    problems: list[str] = []
    good = lineage.newest_good(directory.parent.parent, problems.append)
    check_harmless(console.escape_lines("\n".join(problems)))
    assert all(problems)
    assert len("".join(problems)) < 20_000
    quick = checkpoints.verify(directory, hashes=False)
    if not (directory / manifest.MANIFEST).exists():
        assert good is None
        assert quick
        return
    assert not quick or problems, "a quick look found more than a thorough one"
    assert (good is None) == bool(problems)
    try:
        found = checkpoints.read_manifest(directory)
    except DlctlError:
        assert problems
        return
    _check_manifest(directory, found)
    _read_all(directory, found, is_good=not problems)


def _write(directory: Path, files: list[list[bytes]]) -> None:
    for old in directory.iterdir():
        old.unlink()
    for name, content in files:
        if re.fullmatch(rb"[a-z0-9.-]{3,40}", name):
            (directory / name.decode()).write_bytes(content)


def _check_manifest(directory: Path, found: dict[str, Any]) -> None:
    assert manifest.parse(manifest.serialise(found, "here"), "here") == found
    assert all(math.isfinite(found[key]) for key in ("number", "step", "samples", "at"))
    manifest.layout(found).to_bytes()
    assert Best("accuracy", "max").of([(directory, found)]) in (None, directory)
    with redirect_stdout(io.StringIO()) as shown:
        row = checkpoint_command._row(directory, found, [], False)
        console.out_json("dlctl.checkpoints/1", row)
    json.loads(shown.getvalue())
    check_harmless(console.table([checkpoint_command._cells(row)]))


def _read_all(directory: Path, found: dict[str, Any], *, is_good: bool) -> None:
    """Everything that a run reads to go on; a good checkpoint has it all."""
    size = found["size"]
    try:
        names = checkpoints.slots(directory, found)
        for tensor in ("w", *(checkpoints.SLOT + name for name in names)):
            for lo, hi in ((0, size), (size // 3, size // 2)):
                part = checkpoints.read_slice(directory, found, tensor, lo, hi)
                assert part.dtype == np.float32
                assert part.shape == (hi - lo,)
    except DlctlError:
        assert not is_good
    try:
        extra = checkpoints.read_averaged(directory, found)
        assert extra.dtype == np.float64
        assert extra.shape == (manifest.layout(found).size("averaged"),)
        checkpoints.frozen_file(directory, found)
    except DlctlError:
        assert not is_good
    for worker in found["workers"]:
        with suppress(DlctlError):
            checkpoints.read_worker(directory, found, worker["name"])
