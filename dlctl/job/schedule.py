"""The rate over a run: a factor of its peak, by the number of samples of all workers so far.

Progress is global, and counted in samples: workers that join, leave, die or restart do not change
it. The factor for an update is that of the samples before it, as with torch's schedulers:

    warm-up w   p / w, for p < w; then, with q = (p - w) / (T - w):
    constant    1
    linear      1 - (1 - final) q
    cosine      final + (1 - final) (1 + cos(pi q)) / 2   (SGDR, Loshchilov and Hutter 2017)
    wsd         1, from decay_at T on linear to final (warm-up, stable, decay; Hu et al. 2024)
    step        gamma to the power of the number of decay_at T that are passed

p: samples; T: those of the whole run. After T it is constant.

With `lr_scaling` it is multiplied by n or sqrt(n), n = workers / `lr_workers` (Goyal et al. 2017).
A new n is reached as in the warm-up, linearly over length w from the old one; at the beginning of
the run the old one is 1, and if n differs then, this is the whole warm-up. The number of workers is
set by `dlctl scale`: all servers receive the same `Scale`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dlctl.job import batches
from dlctl.job.config import JobFile, Schedule

_LENGTH = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) *(%|steps?|samples?)")
Key = tuple[str, ...]
DECAY_AT = 0.9
"""Fraction of a run where the decay of "wsd" begins by default."""


def length(text: str, step_samples: float, whole: float = math.nan) -> float:
    """The samples of "5%", "500 steps" or "10_000 samples". whole: those of the run, for a
    percentage. Raises ValueError for anything else.
    """
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise ValueError(f'"{text}" is not a length, as in "5%", "500 steps" or "10_000 samples"')
    number, unit = float(found[1].replace("_", "")), found[2]
    if not number:
        return 0.0
    if unit == "%":
        return whole * number / 100
    return number * (step_samples if unit.startswith("step") else 1)


class Scale(NamedTuple):
    """The factor of the rate that depends on the number of workers."""

    since: float
    """Samples; from there on it changes from `before` to `after`."""
    before: float
    after: float

    def at(self, samples: float, warmup: float) -> float:
        """warmup: samples until it is `after`."""
        passed = samples - self.since
        if passed < 0:
            return self.before
        if passed >= warmup:
            return self.after
        return self.before + (self.after - self.before) * passed / warmup

    def to(self, after: float, samples: float, warmup: float) -> Scale:
        """The next scale, which holds from there on."""
        return Scale(float(samples), self.at(samples, warmup), after)


def multiple(job: JobFile, workers: int) -> float:
    """The factor of the rate for so many workers."""
    n = workers / (job.schedule.lr_workers or job.workers.count)
    return {"none": 1.0, "linear": n, "sqrt": math.sqrt(n)}[job.schedule.lr_scaling]


def first_scale(job: JobFile) -> Scale:
    """The scale at a run's beginning."""
    return Scale(0.0, 1.0, multiple(job, job.workers.count))


def faults(job: JobFile) -> Iterator[tuple[Key, str, str]]:
    """Faults of the schedule of a job that can be found without the dataset: key, message,
    suggestion.
    """
    schedule = job.schedule
    texts = {"warmup": schedule.warmup, "over": schedule.over}
    for key, text in texts.items():
        try:
            if text:
                length(text, batches.mean(job))
        except ValueError as error:
            yield ("schedule", key), str(error), ""
            return
    if schedule.over.strip().endswith("%"):
        yield ("schedule", "over"), "it is the whole, not a part", 'as in "50_000 steps"'
        return
    if schedule.over and length(schedule.over, batches.mean(job)) < 1:
        yield ("schedule", "over"), "it is no sample long", 'as in "50_000 steps"'
        return
    if schedule.lr_workers and not scales(schedule):
        yield ("schedule", "lr_workers"), "no rate goes by it", 'add lr_scaling = "linear"'
    if schedule.kind == "wsd" and len(schedule.decay_at) > 1:
        yield ("schedule", "decay_at"), '"wsd" decays once', "give one value"
    if schedule.kind == "step" and not schedule.decay_at:
        yield ("schedule", "kind"), '"step" goes down nowhere', "add decay_at = [0.5, 0.75]"
    if schedule.decay_at and schedule.kind not in ("step", "wsd"):
        yield ("schedule", "decay_at"), f'"{schedule.kind}" has none', 'use "step" or "wsd"'
    whole = whole_run(job, 0 if job.job.stop.epochs else 1)
    if needs_whole(schedule) and math.isinf(whole):
        key = "kind" if schedule.kind != "constant" else "warmup"
        what = "it has to know how long the run is, and job.stop does not say"
        unit = "samples" if batches.is_open(job) else "steps"
        yield ("schedule", key), what, f'add over = "50_000 {unit}"'
        return
    is_known = bool(schedule.over) or not job.job.stop.epochs
    warmup = length(schedule.warmup, batches.mean(job), whole)
    if is_known and warmup > whole:
        what = "the warm-up is longer than the run"
        yield ("schedule", "warmup"), f"{what}: {warmup:,.0f} of {whole:,.0f} samples", ""


def is_needed(schedule: Schedule) -> bool:
    """Whether the rate changes at all."""
    is_constant = schedule.kind == "constant" and length(schedule.warmup, 1, 1.0) == 0
    return scales(schedule) or not is_constant


def scales(schedule: Schedule) -> bool:
    """Whether the rate depends on the number of workers."""
    return schedule.lr_scaling != "none"


def needs_whole(schedule: Schedule) -> bool:
    """Whether a schedule depends on the length of the run."""
    is_part = schedule.warmup.strip().endswith("%")
    return schedule.kind != "constant" or (is_part and length(schedule.warmup, 1, 1.0) > 0)


def goes_down(schedule: Schedule) -> bool:
    """Whether the rate ends well below its peak."""
    at_end = {
        "constant": 1.0,
        "step": schedule.gamma ** len(schedule.decay_at),
    }.get(schedule.kind, schedule.final)
    return at_end <= 0.5


def whole_run(job: JobFile, dataset_samples: int) -> float:
    """The samples of the run by `schedule.over`, else by the first of the limits in `job.stop`;
    infinite if neither is set.
    """
    if job.schedule.over:
        return length(job.schedule.over, batches.mean(job))
    stop = job.job.stop
    if stop.steps and batches.is_open(job):
        return math.inf
    limits = [
        stop.epochs * dataset_samples if stop.epochs else math.inf,
        stop.steps * batches.mean(job) if stop.steps else math.inf,
        stop.samples or math.inf,
    ]
    return min(limits)


def warmup_samples(job: JobFile, dataset_samples: int) -> float:
    return length(job.schedule.warmup, batches.mean(job), whole_run(job, dataset_samples))


def factor(
    job: JobFile, dataset_samples: int, scale: Scale | None = None
) -> Callable[[int], float] | None:
    """Samples so far -> the current fraction of the peak; None: always 1.

    scale: for the number of workers; None: that of the run's beginning.

    Raises ValueError if the warm-up is longer than the run, or the length of the run is unknown.
    """
    schedule = job.schedule
    if not is_needed(schedule):
        return None
    whole = whole_run(job, dataset_samples)
    if needs_whole(schedule) and math.isinf(whole):
        raise ValueError("a schedule has to know how long the run is")
    warmup = warmup_samples(job, dataset_samples)
    if warmup > whole:
        raise ValueError(f"the warm-up takes {warmup:.0f} samples, and the run has {whole:.0f}")

    first = first_scale(job)
    now = scale or first

    def at(samples: int) -> float:
        scaled = now.at(samples, warmup)
        if samples < warmup:
            return scaled * (samples / warmup if first.after == 1.0 else 1.0)
        passed = min(samples, whole)
        rest = (passed - warmup) / (whole - warmup) if whole > warmup else 1.0
        return scaled * _after_warmup(schedule, rest, passed / whole)

    return at


def _after_warmup(schedule: Schedule, rest: float, part: float) -> float:
    """rest: progress after the warm-up; part: progress of the whole run; both 0..1."""
    final = schedule.final
    match schedule.kind:
        case "linear":
            return 1 - (1 - final) * rest
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * rest)) / 2
        case "wsd":
            begins = schedule.decay_at[0] if schedule.decay_at else DECAY_AT
            return 1 - (1 - final) * max(0.0, (part - begins) / (1 - begins))
        case "step":
            return schedule.gamma ** bisect_right(sorted(schedule.decay_at), part)
        case _:
            return 1.0
