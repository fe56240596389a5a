"""The manifest of a checkpoint: what must stand in `manifest.json`, checked field by field.

It may come from another machine or another year, and the sizes and names in it decide what is read
and where; so every value must have exactly the type that it should, and no file name leads out of
the directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import TYPE_CHECKING, Any

from dlctl import frozen
from dlctl.errors import DlctlError
from dlctl.flat import Layout, check_rows
from dlctl.util.json_depth import is_deep
from dlctl.util.text import is_poisoned

if TYPE_CHECKING:
    from dlctl.config import JobFile

MANIFEST = "manifest.json"
NUMBER_MAX = 2**63 - 1
LEVELS_MAX = 64
"""Of lists and objects within each other; what is read must also be written and shown."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
SCHEMA = "dlctl.checkpoint/1"
FAILURE = "failure"
"""Only of what was saved because its run had failed: why it had."""
FROZEN = "frozen"
"""Only of a model with frozen parameters: the file of these, which all checkpoints of a run share,
and the digests of the tensors, one after the other, hexadecimal."""
MEAN = "mean"
"""Only where the run's model is the mean of those of all workers: true."""
Manifest = dict[str, Any]

CHOICES = ("algorithm", "optimizer", "inner")
"""Sections of a job file whose names it has."""
_SECTION = (str, dict)
"""A name, or that whole section of the job."""
_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (str,),
    "run_id": (str,),
    "job": _SECTION,
    "number": (int,),
    "step": (int,),
    "samples": (int,),
    "at": (float, int),
    "layout": (list,),
    "size": (int,),
    "algorithm": _SECTION,
    "optimizer": _SECTION,
    "shards": (list,),
    "workers": (list,),
    "data": (dict,),
    "evaluation": (dict, type(None)),
}
_PART: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "file": (str,),
    "sha256": (str,),
    "nbytes": (int,),
    "state": (dict,),
}
_SHARD = {**_PART, "lo": (int,), "hi": (int,)}
_FROZEN: dict[str, tuple[type, ...]] = {
    "file": (str,),
    "sha256": (str,),
    "nbytes": (int,),
    "digests": (str,),
}


def parse(data: bytes, where: str) -> Manifest:
    """The manifest that these bytes are. Raises DlctlError naming `where`."""
    try:
        manifest = json.loads(data)
        if is_deep(manifest, LEVELS_MAX):
            raise ValueError(f"it is nested more than {LEVELS_MAX} levels deep")
        check(manifest)
        if manifest.pop("digest", "") != _digest(manifest):
            raise ValueError("its digest is not that of its content")
    except (ValueError, RecursionError) as error:
        raise DlctlError(
            f"this is not the manifest of a checkpoint: {error}", where=where
        ) from error
    return manifest  # type: ignore[no-any-return]


def serialise(manifest: Manifest, where: str) -> bytes:
    """What `parse` reads back. Raises DlctlError for a manifest that it would refuse."""
    data = json.dumps({**manifest, "digest": _digest(manifest)}, indent=1).encode()
    parse(data, where)
    return data


def _digest(manifest: Manifest) -> str:
    """SHA-256 of everything else in it: a flipped bit must not lead to wrong files or steps."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def otherwise(manifest: Manifest, job: JobFile) -> str:
    """What a job has in place of the method and optimisers that have made this checkpoint, as in
    'algorithm "sync" -> "allreduce"'; "" if these are the same.
    """
    names = [(section, manifest.get(section), getattr(job, section).name) for section in CHOICES]
    return ", ".join(
        f'{section} "{before}" -> "{now}"'
        for section, before, now in names
        if isinstance(before, str) and before != now
    )


def has_updates(manifest: Manifest) -> bool:
    """Whether it holds more than what the model began with."""
    versions = [part["state"].get("version") for part in manifest["shards"]]
    return manifest["step"] > 0 or versions != [0] * len(versions)


def is_doubtful(manifest: Manifest) -> bool:
    """Whether its model may be ruined: nobody could use what was computed from it any more."""
    return is_poisoned(str(manifest.get(FAILURE, "")))


def layout(manifest: Manifest) -> Layout:
    """The model's layout, as every replica built it."""
    return Layout.from_rows(manifest["layout"])


def parts(manifest: Manifest) -> list[dict[str, Any]]:
    """Every file of it, with "file", "sha256" and "nbytes"; "file" may be ""."""
    shared = [manifest[FROZEN]] if FROZEN in manifest else []
    return [*manifest["shards"], *manifest["workers"], *shared]


def _digests(part: Manifest) -> bytes:
    """Raises ValueError."""
    return bytes.fromhex(part["digests"])


def models(manifest: Manifest) -> list[dict[str, Any]]:
    """The files that the run's model is the mean of; [] if it is in the shards."""
    if not manifest.get(MEAN):
        return []
    return [worker for worker in manifest["workers"] if "lo" in worker]


def tables(shard: Manifest) -> dict[str, Any]:
    """Of a shard: name -> {"lo", "hi", ...} of every table beside the parameters."""
    found: dict[str, Any] = shard["state"].get("tables", {})
    return found


UPDATES = ("updates", "steps")
"""What optimisers call the number of their updates."""


def state_of(manifest: Manifest, lo: int, hi: int) -> dict[str, Any]:
    """What was kept besides the vectors of elements [lo, hi): of the same slice, or of the first
    one if it was cut otherwise.

    Raises ValueError if nothing can be said of another cut: some shards were saved before an
    operation of the method's lead, and some behind it; or what their optimisers count differs, as
    where each of them has a buffer or a step of its own.
    """
    shards = manifest["shards"]
    same = [shard for shard in shards if (shard["lo"], shard["hi"]) == (lo, hi)]
    if not same and len({_newest_op(shard) for shard in shards}) > 1:
        raise ValueError(
            f"it was saved in the middle of a step: only {len(shards)} servers can go on from it"
        )
    if not same and len({json.dumps(_counters(shard), sort_keys=True) for shard in shards}) > 1:
        raise ValueError(
            f"its servers stood at different steps: only {len(shards)} servers can go on from it"
        )
    state: dict[str, Any] = (same or shards)[0]["state"]
    return state


def _counters(shard: Manifest) -> list[Any]:
    """Of the parameters' optimiser, and of all tables' rules; but for plain numbers of updates,
    which may be some apart, as a checkpoint is not of one moment."""
    states = (shard["state"], *tables(shard).values())
    each = [state.get("counters", {}) for state in states]
    return [{k: n for k, n in counters.items() if k not in UPDATES} for counters in each]


def _newest_op(shard: Manifest) -> int:
    states = (shard["state"], *tables(shard).values())
    return max(int(state.get("op", -1)) for state in states)


def check(manifest: Any) -> None:
    """Raises ValueError saying which field is wrong and how."""
    if type(manifest) is not dict or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if type(manifest) is dict else type(manifest).__name__
        raise ValueError(f'its schema is {found!r:.60}, not "{SCHEMA}"')
    _check_fields(manifest, _FIELDS, "")
    _check_fields(manifest, dict.fromkeys(manifest.keys() & {FAILURE}, (str,)), "")
    _check_fields(manifest, dict.fromkeys(manifest.keys() & {MEAN}, (bool,)), "")
    check_rows(manifest["layout"])
    for index, shard in enumerate(manifest["shards"]):
        _check_part(shard, _SHARD, f"shards[{index}]")
        if not shard["lo"] <= shard["hi"] <= manifest["size"] or not shard["file"]:
            raise ValueError(f"shards[{index}] is no part of [0, {manifest['size']})")
    for index, worker in enumerate(manifest["workers"]):
        _check_part(worker, _PART, f"workers[{index}]")
    if FROZEN in manifest:
        _check_part(manifest[FROZEN], _FROZEN, FROZEN)
    for model in models(manifest):
        if (model["lo"], model.get("hi")) != (0, manifest["size"]) or not model["file"]:
            raise ValueError("the mean is of a part of a model")
    _check_whole(manifest)


def _check_whole(manifest: Manifest) -> None:
    """What holds between fields."""
    for parts in (manifest["shards"], manifest["workers"]):
        files = [part["file"] for part in parts if part["file"]]
        if len(set(files)) != len(files):
            raise ValueError("it names one file twice")
    if not manifest["shards"]:
        raise ValueError("it has no shards")
    _check_tables(manifest["shards"])
    if layout(manifest).size() != manifest["size"]:
        raise ValueError(f"size is {manifest['size']}, the layout has {layout(manifest).size()}")
    if FROZEN in manifest and not frozen.fits(layout(manifest), _digests(manifest[FROZEN])):
        raise ValueError("frozen.digests are not those of the layout")
    if "stream" in manifest["data"]:
        _check_stream(manifest["data"])
        return
    portions = manifest["data"].get("portions")
    if type(portions) is not list or not all(_is_naturals(p) and len(p) == 2 for p in portions):
        raise ValueError("data.portions is not a list of [data epoch, portion]")


def _check_stream(data: Manifest) -> None:
    """What is done of a stream (`StreamPool.to_json`)."""
    stream, count = data["stream"], data.get("stream_shards")
    is_pair = (
        type(stream) is list and len(stream) == 2 and all(type(part) is list for part in stream)
    )
    if not is_pair or not all(_is_naturals(epoch) and len(epoch) == 3 for epoch in stream[0]):
        raise ValueError("data.stream does not begin with [data epoch, samples, steps]")
    for begun in stream[1]:
        if type(begun) is not list or len(begun) != 2 or not _is_naturals(begun[:1]):
            raise ValueError("data.stream does not go on with [data epoch, its shards]")
        if type(begun[1]) is not list or len(begun[1]) != count:
            raise ValueError(f"data.stream has other shards than {count!r:.60}")
        if not all(map(_is_shard_of_stream, begun[1])):
            raise ValueError("data.stream has a shard that is no [base, portions, end, done]")
    if not (stream[0] or stream[1]) or type(data.get("portion_samples")) is not int:
        raise ValueError("data.stream says nothing of any data epoch, or of its portions")


def _is_shard_of_stream(shard: Any) -> bool:
    if type(shard) is not list or len(shard) != 4:
        return False
    base, portions, end, done = shard
    # An end that nobody has come to is -1.
    return _is_naturals([base, portions]) and type(end) is int and end >= -1 and _is_naturals(done)


def _check_tables(shards: list[Manifest]) -> None:
    """All shards have the same tables, and what they have of one is one after the other."""
    ends: dict[str, int] = {}
    for index, shard in enumerate(shards):
        where = f"shards[{index}].state.tables"
        found = tables(shard)
        if type(found) is not dict or (index and found.keys() != ends.keys()):
            raise ValueError(f"{where} are not those of shards[0]")
        for name, cut in found.items():
            fields: dict[str, tuple[type, ...]] = {"lo": (int,), "hi": (int,), "dtype": (str,)}
            _check_fields(cut, fields, f"{where}.{name:.60}")
            if cut["dtype"] not in ("float32", "float64"):
                raise ValueError(f"{where}.{name:.60}.dtype is {cut['dtype']!r:.60}")
            if cut["lo"] != ends.get(name, 0) or cut["hi"] < cut["lo"]:
                raise ValueError(f"{where}.{name:.60} does not begin where the one before ends")
            ends[name] = cut["hi"]


def _check_fields(value: Any, fields: dict[str, tuple[type, ...]], where: str) -> None:
    if type(value) is not dict:
        raise ValueError(f"{where} is not an object")
    for key, kinds in fields.items():
        name = f"{where}.{key}" if where else key
        if key not in value:
            raise ValueError(f"{name} is missing")
        if type(value[key]) not in kinds:
            raise ValueError(f"{name} is {value[key]!r:.60}")
        if type(value[key]) is int and not 0 <= value[key] <= NUMBER_MAX:
            raise ValueError(f"{name} is negative or too large")
        if type(value[key]) is float and not math.isfinite(value[key]):
            raise ValueError(f"{name} is {value[key]}")


def _check_part(part: Any, fields: dict[str, tuple[type, ...]], where: str) -> None:
    """A file of the checkpoint. A worker that saved no arrays has the file name ""."""
    _check_fields(part, fields, where)
    name = part["file"]
    if name and (not _FILE_NAME.fullmatch(name) or name == MANIFEST):
        raise ValueError(f"{where}.file is {name!r:.60}: not a plain file name")
    if name and (len(part["sha256"]) != 64 or set(part["sha256"]) - set("0123456789abcdef")):
        raise ValueError(f"{where}.sha256 is not 64 hexadecimal digits")


def _is_naturals(value: Any) -> bool:
    return type(value) is list and all(type(n) is int and n >= 0 for n in value)
