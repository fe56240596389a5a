"""Convert a checkpoint for another method, or another optimiser.

State that every method has is converted: parameters, buffers and frozen parameters, the progress of
data and schedule. So is the state of the optimiser that takes the gradients, in either place:

    in the servers                               in replicas that are all alike (`allreduce`)
    adam, adamw: "mean", "square", "updates"     adam, adamw: "exp_avg", "exp_avg_sq", "step"
    momentum: "momentum"                         sgd with momentum: "momentum_buffer"

All else starts afresh: other optimisers, optimisers of replicas that differ from each other, a
replica's state beside the model, the method's own state in servers and coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from dlctl import registry
from dlctl.algorithms.base import Method
from dlctl.errors import UsageError
from dlctl.job.config import Choice, JobFile
from dlctl.job.inner import NONE, OF, OF_SCRIPT, SAVED_AS, identity
from dlctl.model.flat import AVERAGED, ROWS, TRAINED, Layout
from dlctl.records.manifest import CHOICES, MEAN, Manifest, bounds_of, layout, otherwise
from dlctl.shards.base import W
from dlctl.util.names import AVERAGE
from dlctl.wire.messages import Array, Json

ADAM = {"mean": "exp_avg", "square": "exp_avg_sq"}
"""Slots of the servers' optimiser -> torch's names for them."""
MOMENTUM = {"momentum": "momentum_buffer"}
UPDATES, STEP = "updates", "step"
"""The number of updates: a counter of the servers' optimiser, and torch's name for it."""
FIRST = "worker-0"
PROGRESS = frozenset({"progress", "steps", "dice"})
"""Tensors in the file of a replica that are known otherwise, or do not matter."""
Where = Literal["servers", "replicas", ""]
Arrays = dict[str, Array]


class Source(NamedTuple):
    """A checkpoint to be read."""

    manifest: Manifest
    read: Callable[[str, int, int], Array]
    """Elements [lo, hi) of "w", or of a slot of the servers' optimiser, as "slot.mean"."""
    averaged: Callable[[], Array]
    """The buffers, float64."""
    worker: Callable[[str], Mapping[str, Array]]
    """All tensors that a worker has saved, read on access; {} if there are none."""


class TranslatedPart(NamedTuple):
    name: str
    """The daemon's name."""
    file: str
    state: Json
    arrays: Callable[[], Arrays]
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Translation:
    manifest: Manifest
    """The manifest of the new checkpoint, except "shards" and "workers"."""
    parts: tuple[TranslatedPart, ...]
    """One for each file."""
    is_of_servers: bool
    """The parts are shards; else the first one is the model of the first worker."""
    keeps: str
    """The optimiser whose state is converted; "": none."""
    afresh: tuple[str, ...]
    """State of the checkpoint or the job that is not converted."""

    def completed(self, digests: Mapping[str, Json]) -> Manifest:
        """The manifest; digests: file -> its "sha256" and "nbytes"."""
        parts = [
            {"name": part.name, "file": part.file, "state": part.state, "lo": part.lo,
             "hi": part.hi, **digests[part.file]}
            for part in self.parts
        ]  # fmt: skip
        return self.manifest | {"shards": parts, "workers": [] if self.is_of_servers else parts}


class Moments(NamedTuple):
    """An optimiser's state of past gradients."""

    names: Mapping[str, str]
    """ADAM, MOMENTUM, or any slots of the servers."""
    read: Callable[[str, int, int], Array]
    """Elements [lo, hi) of a slot."""
    counters: Mapping[str, int]


def check(manifest: Manifest, job: JobFile) -> None:
    """Raises UsageError if the job's method cannot resume from this checkpoint of another one."""
    has_rows = layout(manifest).size(ROWS) > 0
    tables = _method(job).shape.tables_of(_options(job))
    if has_rows or any(table.rule == "lead" for table in tables):
        what = "tables of rows" if has_rows else "the state of this method's coordinator"
        raise UsageError(
            f"{manifest['run_id']} was trained otherwise ({otherwise(manifest, job)}): {what} "
            "cannot be taken from its checkpoint",
            hint="begin a new run with --fresh; to start it from that model, use "
            '`dlctl checkpoint export -o FILE` and [job] weights = "FILE"',
        )


def translated(source: Source, job: JobFile) -> Translation:
    """A checkpoint, converted for this job. Raises UsageError as `check` does."""
    before = source.manifest
    check(before, job)
    method, past = _method(job), registry.load("algorithms", _name(before["algorithm"]))
    kept = _kept(source, past, job, method)
    data = {key: value for key, value in before["data"].items() if key != "lead"}
    if past.lead.portions != method.lead.portions:
        data["portions"] = []  # They are of other samples.
    manifest = before | {"data": data, MEAN: method.shape.model == "mean"}
    manifest |= {section: getattr(job, section).name for section in CHOICES}
    is_of_servers = method.shape.needs_servers
    parts = _shards(source, job, method, kept) if is_of_servers else [_replica(source, job, kept)]
    afresh = (*_begins_afresh(job, method, kept), *_left_behind(source))
    keeps = "" if kept is None else (job.optimizer if method.shard else job.inner).name
    return Translation(manifest, tuple(parts), is_of_servers, keeps, afresh)


def _method(job: JobFile) -> Method:
    method: Method = registry.load("algorithms", job.algorithm.name)
    return method


def _name(section: str | Json) -> str:
    return section if isinstance(section, str) else str(section["name"])


def _options(job: JobFile) -> Any:
    return _method(job).Options(**job.algorithm.options)


# ---------------------------------------------------------------- the state of optimisers


def _place(method: Method, options: Any, inner: str) -> Where:
    """Where the optimiser of gradients is, if the run has a single state of it; "": nowhere."""
    if method.pushes_gradients(options):
        return "servers"
    return "replicas" if inner != NONE and "group" in method.shape.links else ""


def _kept(source: Source, past: Method, job: JobFile, method: Method) -> Moments | None:
    """The state that is converted; None: none."""
    before = source.manifest
    was = _place(past, past.Options(), before.get("inner", NONE))
    place = _place(method, _options(job), job.inner.name)
    in_servers = _of_servers(job.optimizer.name) if method.shard else {}
    names = _of_choice(job.inner) if place == "replicas" else in_servers
    if not names:
        return None
    if was == "replicas" and place:
        saved = source.worker(before["shards"][0]["name"])
        return _of_replica(saved, layout(before)) if _of_saved(saved) == names else None
    # Methods without gradients in the servers may use an optimiser there for something else.
    is_alike = was == place or (was, place) == ("servers", "replicas")
    if not (is_alike and past.shard and _of_servers(_name(before["optimizer"])) == names):
        return None
    counters = before["shards"][0]["state"].get("counters", {})
    return Moments(names, lambda slot, lo, hi: source.read(f"slot.{slot}", lo, hi), counters)


def _of_servers(name: str) -> Mapping[str, str]:
    """Slot -> torch's name for it, or the slot's own; {}: the optimiser is stateless."""
    known = {"adam": ADAM, "adamw": ADAM, "momentum": MOMENTUM}
    if name in known:
        return known[name]
    kind = registry.load("optimizers", name)
    return {slot: f"{name}.{slot}" for slot in kind(kind.Options()).slots}


def _of_choice(inner: Choice) -> Mapping[str, str]:
    return _of_saved({OF: np.frombuffer(identity(inner), np.uint8)})


def _of_saved(saved: Mapping[str, Array]) -> Mapping[str, str]:
    """Slot of the servers' optimiser -> its name in the saved optimiser; {}: no counterpart."""
    name, flags = json.loads(saved[OF].tobytes()) if OF in saved else (NONE, {})
    if name in ("adam", "adamw") and not flags.get("amsgrad"):
        return ADAM
    return MOMENTUM if name == "sgd" and flags.get("momentum") else {}


def _of_replica(saved: Mapping[str, Array], model: Layout) -> Moments:
    """A replica saves torch's state of each tensor, except those that never had a gradient."""
    names, entries = _of_saved(saved), list(model.slices(TRAINED))

    def read(slot: str, lo: int, hi: int) -> Array:
        found = np.zeros(hi - lo, np.float32)
        for index, (_, first, last) in enumerate(entries):
            name, begin, end = f"{SAVED_AS}0.{index}.{names[slot]}", max(lo, first), min(hi, last)
            if begin < end and name in saved:
                found[begin - lo : end - lo] = saved[name].ravel()[begin - first : end - first]
        return found

    steps = [int(saved[name]) for name in saved if name.endswith(f".{STEP}")]
    return Moments(names, read, {UPDATES: max(steps, default=0)})


def _as_replicas(kept: Moments, inner: Choice, model: Layout) -> Arrays:
    """The state as a replica saves that of its optimiser."""
    found = {OF: np.frombuffer(identity(inner), np.uint8)}
    for index, (entry, lo, hi) in enumerate(model.slices(TRAINED)):
        begin = f"{SAVED_AS}0.{index}."
        for slot, name in kept.names.items():
            found[begin + name] = kept.read(slot, lo, hi).reshape(entry.shape)
        if kept.names == ADAM:
            found[begin + STEP] = np.array(kept.counters.get(UPDATES, 0), np.float32)
    return found


# ---------------------------------------------------------------- the new files


def _shards(
    source: Source, job: JobFile, method: Method, kept: Moments | None
) -> list[TranslatedPart]:
    """The translated shards, with the bounds of the old ones."""
    before, found = source.manifest, list[TranslatedPart]()
    more_tables = method.shape.tables_of(_options(job))[1:]
    shards = bounds_of(before)
    for index, (lo, hi) in enumerate(pairwise(shards)):
        more, tables = Arrays(), dict[str, Json]()
        for table in more_tables:
            first, last = table.bounds(layout(before), shards, index)
            tables[table.name] = {"lo": first, "hi": last, "dtype": table.dtype, "version": 0}
            more[f"table.{table.name}"] = np.zeros(last - first, table.dtype)
        state = {
            "version": _version(before),
            "samples": before["samples"],
            "counters": {} if kept is None else dict(kept.counters),
            **({"tables": tables} if tables else {}),
        }
        arrays = partial(_of_shard, source, job, kept, more, lo, hi)
        found.append(
            TranslatedPart(f"server-{index}", f"shard-{index}.safetensors", state, arrays, lo, hi)
        )
    return found


def _of_shard(
    source: Source, job: JobFile, kept: Moments | None, more: Arrays, lo: int, hi: int
) -> Arrays:
    found = {W: source.read(W, lo, hi)} | more
    if lo == 0:
        found[AVERAGED] = source.averaged()
    if job.average.ema:
        found[f"slot.{AVERAGE}"] = source.read(f"slot.{AVERAGE}", lo, hi)
    if kept is not None:
        found |= {f"slot.{slot}": kept.read(slot, lo, hi) for slot in kept.names}
    return found


def _replica(source: Source, job: JobFile, kept: Moments | None) -> TranslatedPart:
    """The first replica, whose state all others adopt."""
    version, size = _version(source.manifest), source.manifest["size"]
    state = {"steps": version, "version": version, "lo": 0, "hi": size}
    arrays = partial(_of_first, source, job, kept)
    return TranslatedPart(FIRST, f"{FIRST}.safetensors", state, arrays, 0, size)


def _of_first(source: Source, job: JobFile, kept: Moments | None) -> Arrays:
    before = source.manifest
    found = {W: source.read(W, 0, before["size"]), AVERAGED: source.averaged()}
    found |= _method(job).replica.state_after(_version(before), before["samples"])
    return found if kept is None else found | _as_replicas(kept, job.inner, layout(before))


def _version(before: Manifest) -> int:
    version: int = before["shards"][0]["state"].get("version", before["step"])
    return version


# ---------------------------------------------------------------- state that is not converted


def _begins_afresh(job: JobFile, method: Method, kept: Moments | None) -> list[str]:
    """Stateful optimisers of the job that start afresh."""
    is_inner = _place(method, _options(job), job.inner.name) == "replicas"
    found = []
    if method.shard and _of_servers(job.optimizer.name) and (is_inner or kept is None):
        found.append(f"{job.optimizer.name} in the servers")
    is_sgd = job.inner.name == "sgd" and not job.inner.options.get("momentum")
    if job.inner.name != NONE and not is_sgd and not (is_inner and kept):
        is_theirs = job.inner.name == OF_SCRIPT
        found.append("the script's optimizer" if is_theirs else f"{job.inner.name} in the replicas")
    return found


def _left_behind(source: Source) -> list[str]:
    """The replicas' state beside the model and their optimisers."""
    known, found = PROGRESS | {W, AVERAGED}, set[str]()
    for part in source.manifest["workers"]:
        saved = source.worker(part["name"])
        own = [name for name in saved.keys() - known if not name.startswith(SAVED_AS)]
        found |= {name for name in own if saved[name].any()}
    return [f"the replicas' {', '.join(sorted(found))}"] if found else []
