"""The manifest of a checkpoint: the content of `manifest.json`, validated field by field.

It is untrusted: it may come from another machine or version, and the sizes and names in it decide
what is read and where. So every value must have exactly the expected type, no file name may lead
out of the directory, and the shards must cover the model without gaps or overlaps.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

from dlctl.errors import DlctlError
from dlctl.model import frozen
from dlctl.model.cut import Bounds
from dlctl.model.flat import Layout, check_rows
from dlctl.records import evaluated
from dlctl.util import listing
from dlctl.util.json_depth import LEVELS_MAX, is_deep
from dlctl.util.text import is_poisoned

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

MANIFEST = "manifest.json"
NUMBER_MAX = 2**63 - 1
SCHEMA = "dlctl.checkpoint/1"
FAILURE = "failure"
"""The key of the reason for which the run had failed when the checkpoint was saved."""
FROZEN = "frozen"
"""The key of the frozen parameters, if the model has any: their file, which all checkpoints of a
run share, and the concatenated digests of the tensors, hexadecimal.
"""
MEAN = "mean"
"""The key that says that the run's model is the mean of those of all workers: true."""
OWN = "own"
"""In a loaded state: that of the shard with the same number, whatever elements it had."""
Manifest = dict[str, Any]

CHOICES = ("algorithm", "optimizer", "inner")
"""Sections of a job file whose names it records."""

# The schema; see `_conform`.
_NATURAL = range(NUMBER_MAX + 1)
_SECTION: Any = str | dict
"""A name, or the whole section of the job."""
_FILE = re.compile(rf"(?!{re.escape(MANIFEST)}$)[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}")
_SHA256 = re.compile("[0-9a-f]{64}")
_CONTENT = {"file": _FILE, "sha256": _SHA256, "nbytes": _NATURAL}
_SHARD = {
    **_CONTENT,
    "name": str,
    "state": {"tables?": dict, "kept?": dict},
    "lo": _NATURAL,
    "hi": _NATURAL,
}
_WORKER = {
    "name": str,
    "file": re.compile(f"({_FILE.pattern})?"),
    "sha256": re.compile(f"({_SHA256.pattern})?"),
    "nbytes": _NATURAL,
    "state": dict,
}
"""A worker that saved no arrays has the file name ""."""
_TABLE = {"lo": _NATURAL, "hi": _NATURAL, "dtype": re.compile("float32|float64")}
_KEPT = {"lo": _NATURAL, "hi": _NATURAL}
_FIELDS = {
    "schema": re.compile(re.escape(SCHEMA)),
    "run_id": str,
    "job": _SECTION,
    "number": _NATURAL,
    "step": _NATURAL,
    "samples": _NATURAL,
    "at": float | int,
    "layout": list,
    "size": _NATURAL,
    "algorithm": _SECTION,
    "optimizer": _SECTION,
    "shards": [_SHARD],
    "workers": [_WORKER],
    "data": dict,
    evaluated.METRICS: dict | None,
    f"{evaluated.STEP}?": int | None,
    f"{FAILURE}?": str,
    f"{MEAN}?": bool,
    f"{FROZEN}?": {**_CONTENT, "digests": re.compile("([0-9a-f]{2})*")},
}
_PORTIONS = {"portions": [(_NATURAL, _NATURAL)], "dataset_files?": _SHA256}
"""[[data epoch, portion], ...]: what is done of a dataset."""
_SHARD_OF_STREAM = (_NATURAL, _NATURAL, range(-1, NUMBER_MAX + 1), [_NATURAL])
"""[base, portions, end, done]; an end not reached yet is -1."""
_STREAM = {
    "stream": ([(_NATURAL, _NATURAL, _NATURAL)], [(_NATURAL, [_SHARD_OF_STREAM])]),
    "stream_shards": _NATURAL,
    "stream_names?": [str],
    "portion_samples": _NATURAL,
}
"""What is done of a stream (`StreamPool.to_json`): completed epochs as [data epoch, samples,
steps], and the others as [data epoch, its shards], in the order of their names."""


def parse(data: bytes, where: str) -> Manifest:
    """The parsed and validated manifest. Raises DlctlError naming `where`."""
    try:
        manifest = json.loads(data)
        if is_deep(manifest):  # It must also be writable and printable.
            raise ValueError(f"it is nested more than {LEVELS_MAX} levels deep")
        check(manifest)
        if manifest.pop("digest", "") != _digest(manifest):
            raise ValueError("its digest does not match its content")
    except (ValueError, RecursionError) as error:
        raise DlctlError(
            f"this is not the manifest of a checkpoint: {error}", where=where
        ) from error
    return evaluated.in_new_form(manifest)


def serialise(manifest: Manifest, where: str) -> bytes:
    """The bytes for `parse`. Raises DlctlError for a manifest that `parse` would refuse."""
    data = json.dumps({**manifest, "digest": _digest(manifest)}, indent=1).encode()
    parse(data, where)
    return data


def _digest(manifest: Manifest) -> str:
    """SHA-256 of everything else in it, so that a flipped bit is detected."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def otherwise(manifest: Manifest, job: JobFile) -> str:
    """How a job's method and optimisers differ from those of this checkpoint, as in
    'algorithm "sync" -> "allreduce"'; "" if they are equal.
    """
    names = [(section, manifest.get(section), getattr(job, section).name) for section in CHOICES]
    return ", ".join(
        f'{section} "{before}" -> "{now}"'
        for section, before, now in names
        if isinstance(before, str) and before != now
    )


def has_updates(manifest: Manifest) -> bool:
    """Whether a checkpoint has more than the model's initial values."""
    versions = [part["state"].get("version") for part in manifest["shards"]]
    return manifest["step"] > 0 or versions != [0] * len(versions)


def is_suspect(manifest: Manifest) -> bool:
    """Whether its model may be ruined: results computed from it were unusable."""
    return is_poisoned(str(manifest.get(FAILURE, "")))


def layout(manifest: Manifest) -> Layout:
    """The model's layout, as every replica built it."""
    return Layout.from_rows(manifest["layout"])


def bounds_of(manifest: Manifest) -> Bounds:
    """The bounds of the servers' shards when it was saved."""
    return (0, *(shard["hi"] for shard in manifest["shards"]))


def parts(manifest: Manifest) -> list[dict[str, Any]]:
    """Every file of it, with "file", "sha256" and "nbytes"; "file" may be ""."""
    shared = [manifest[FROZEN]] if FROZEN in manifest else []
    return [*manifest["shards"], *manifest["workers"], *shared]


def models(manifest: Manifest) -> list[dict[str, Any]]:
    """The files whose mean is the run's model; [] if it is in the shards."""
    if not manifest.get(MEAN):
        return []
    return [worker for worker in manifest["workers"] if "lo" in worker]


def tables(shard: Manifest) -> dict[str, Any]:
    """A shard's tables beside the parameters: name -> {"lo", "hi", ...}."""
    found: dict[str, Any] = shard["state"].get("tables", {})
    return found


def kept(shard: Manifest) -> dict[str, Any]:
    """What the optimiser keeps beside a shard's matrices: name -> {"lo", "hi"}."""
    found: dict[str, Any] = shard["state"].get("kept", {})
    return found


UPDATES = ("updates", "steps")
"""The names of optimisers' update counters."""


def state_of(manifest: Manifest, lo: int, hi: int, own: int | None = None) -> dict[str, Any]:
    """The saved state besides the vectors for elements [lo, hi): of the same slice, or of the first
    one if the model was sharded differently. own: with the state of this shard beside it.

    Raises ValueError if the state is undefined for other slices: some shards were saved before an
    operation of the method's lead, and some after it; or their optimisers' counters differ, as with
    a separate buffer or step each.
    """
    shards = manifest["shards"]
    same = [shard for shard in shards if (shard["lo"], shard["hi"]) == (lo, hi)]
    for why, of in (
        ("it was saved in the middle of a step", _newest_op),
        ("its servers were at different steps", _counters),
    ):
        if not same and len({json.dumps(of(shard), sort_keys=True) for shard in shards}) > 1:
            raise ValueError(f"{why}: only {len(shards)} servers can resume from it")
    state: dict[str, Any] = (same or shards)[0]["state"]
    return state if own is None else {**state, OWN: shards[own]["state"]}


def _counters(shard: Manifest) -> list[Any]:
    """Counters of the parameters' optimiser and of all tables' rules, without plain update counts:
    these may differ, as a checkpoint is not an instantaneous snapshot."""
    states = (shard["state"], *tables(shard).values())
    each = [state.get("counters", {}) for state in states]
    return [{k: n for k, n in counters.items() if k not in UPDATES} for counters in each]


def _newest_op(shard: Manifest) -> int:
    states = (shard["state"], *tables(shard).values())
    return max(int(state.get("op", -1)) for state in states)


def check(manifest: Any) -> None:
    """Raises ValueError naming the invalid field and the problem."""
    _conform(manifest, _FIELDS, "")
    check_rows(manifest["layout"])
    if layout(manifest).size() != manifest["size"]:
        raise ValueError(f"size is {manifest['size']}, the layout has {layout(manifest).size()}")
    for some in (manifest["shards"], manifest["workers"]):
        files = [part["file"] for part in some if part["file"]]
        if len(set(files)) != len(files):
            raise ValueError("it names one file twice")
    _check_shards(manifest["shards"], manifest["size"])
    for model in models(manifest):
        if (model["lo"], model.get("hi")) != (0, manifest["size"]) or not model["file"]:
            raise ValueError("the mean is of a part of a model")
    if FROZEN in manifest:
        digests = bytes.fromhex(manifest[FROZEN]["digests"])
        if not frozen.fits(layout(manifest), digests):
            raise ValueError("frozen.digests do not match the layout")
    _check_data(manifest["data"])


def _check_shards(shards: list[Manifest], size: int) -> None:
    """Raises ValueError unless the shards, of every table, are contiguous."""
    if not shards:
        raise ValueError("it has no shards")
    names = tables(shards[0])
    ends = dict.fromkeys(["", *names], 0)
    for index, shard in enumerate(shards):
        where = f"shards[{index}]"
        _conform(tables(shard), dict.fromkeys(names, _TABLE), f"{where}.state.tables")
        if tables(shard).keys() != names.keys():
            raise ValueError(f"{where}.state.tables differ from those of shards[0]")
        for name, cut in {"": shard, **tables(shard)}.items():
            if cut["lo"] != ends[name] or cut["hi"] < cut["lo"]:
                of = f".state.tables.{name:.60}" if name else ""
                raise ValueError(f"{where}{of} does not begin where the previous one ends")
            ends[name] = cut["hi"]
    _check_kept(shards)
    if ends[""] != size:
        raise ValueError(f"the shards end at {ends['']}, the model at {size}")


def _check_kept(shards: list[Manifest]) -> None:
    """Raises ValueError unless what is kept beside matrices is contiguous over the shards."""
    ends = dict.fromkeys(kept(shards[0]), 0)
    for index, shard in enumerate(shards):
        where = f"shards[{index}].state.kept"
        _conform(kept(shard), dict.fromkeys(ends, _KEPT), where)
        if kept(shard).keys() != ends.keys():
            raise ValueError(f"{where} differs from that of shards[0]")
        for name, cut in kept(shard).items():
            if cut["lo"] != ends[name] or cut["hi"] < cut["lo"]:
                raise ValueError(f"{where}.{name:.60} does not begin where the previous one ends")
            ends[name] = cut["hi"]


def _check_data(data: Manifest) -> None:
    if "stream" not in data:
        _conform(data, _PORTIONS, "data")
        return
    _conform(data, _STREAM, "data")
    done, begun = data["stream"]
    if not (done or begun):
        raise ValueError("data.stream has no data epoch")
    if any(len(shards) != data["stream_shards"] for _, shards in begun):
        raise ValueError(f"data.stream has other shards than {data['stream_shards']}")
    names = data.get("stream_names", [])
    if len(listing.of_text(listing.ROW.join(names))) not in (0, data["stream_shards"]):
        raise ValueError("data.stream_names are not the names of its shards")


def _conform(value: Any, kind: Any, where: str) -> None:
    """Raises ValueError, naming the place, unless `value` is of this kind: a range of integers, one
    or several types, a pattern for a string, {key: kind} for an object ("key?" is optional), [kind]
    for a list of any length, (kind, ...) for a list of this length.
    """
    match kind:
        case range() if type(value) is int and value in kind:
            return
        case dict() if type(value) is dict:
            for key, one in kind.items():
                name = key.removesuffix("?")
                if name in value:
                    _conform(value[name], one, f"{where}.{name:.60}".removeprefix("."))
                elif name == key:
                    raise ValueError(f"{where}.{name:.60} is missing".removeprefix("."))
            return
        case list() | tuple() if type(value) is list:
            kinds = kind * len(value) if type(kind) is list else kind
            if len(kinds) == len(value):
                for i, (item, one) in enumerate(zip(value, kinds, strict=True)):
                    _conform(item, one, f"{where}[{i}]")
                return
        case re.Pattern() if type(value) is str and kind.fullmatch(value):
            return
        case type() | UnionType() if type(value) in (get_args(kind) or (kind,)):
            if not isinstance(value, float | int) or abs(value) <= NUMBER_MAX:
                return
    raise ValueError(f"{where or 'it'} is {value!r:.60}")


def checkpoint_row(path: Path, manifest: Manifest) -> dict[str, Any]:
    """A checkpoint as recorded among the run's keys."""
    nbytes = sum(part["nbytes"] for part in parts(manifest))
    kept = {key: manifest[key] for key in ("number", "step", "at")}
    return {**kept, "path": str(path), "nbytes": nbytes, "error": ""}
