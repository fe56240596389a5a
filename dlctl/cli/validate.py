"""`dlctl validate`: check a job file offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli import console
from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option

if TYPE_CHECKING:
    from dlctl.config import Choice, JobFile, Stop


@make_command(
    "validate",
    examples=[
        ("dlctl validate job.toml", "say what is wrong, all of it"),
        ("dlctl validate --json job.toml", "the job as it will run, defaults filled in"),
    ],
    see_also=["plan", "doctor", "init", "run", "algorithms", "man"],
)
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def command(file: Path, as_json: bool) -> None:
    """Check a job file offline; report every problem.

    Nothing is started and the task is not imported. Exits with 2 if the file is not valid. What is
    valid and will not do what it says is a warning.
    """
    from dlctl import jobfile
    from dlctl.config import to_dict

    try:
        job = jobfile.load(file)
    except jobfile.JobFileError as error:
        if as_json:
            problems = [problem.to_dict() for problem in error.problems]
            _out_json(file, {"valid": False, "problems": problems, "warnings": [], "job": None})
        raise
    if as_json:
        doubts = jobfile.doubts(job)
        _out_json(file, {"valid": True, "problems": [], "warnings": doubts, "job": to_dict(job)})
        return
    for doubt in jobfile.doubts(job):
        console.warn(doubt)
    if not console.is_quiet():
        console.out(f"{console.escape(str(file))} is valid: {summary(job)}")


def _out_json(file: Path, value: dict[str, Any]) -> None:
    console.out_json("dlctl.validate/1", {"file": str(file), **value})


def summary(job: JobFile) -> str:
    """A job in one line."""
    return ", ".join(
        [
            job.job.name,
            job.algorithm.name,
            *([f"{_rated(job.inner)} in each worker"] if job.inner.name != "none" else []),
            *([_rated(job.optimizer), _compression(job.compression)] if job.servers.count else []),
            _count(job.servers.count, "server") if job.servers.count else "no servers",
            _count(job.workers.count, "worker"),
            *([f"on {_count(job.slurm.nodes, 'Slurm node')}"] if job.slurm.nodes else []),
            _stop(job.job.stop) + _work(job),
        ]
    )


def _rated(optimizer: Choice) -> str:
    return f"{optimizer.name}(lr={optimizer.options.get('lr')})"


def _work(job: JobFile) -> str:
    """As in " (80 updates)": what a length in steps or samples comes to. A step is one worker's."""
    from dlctl import batches, registry
    from dlctl.algorithms.base import Lead

    stop = job.job.stop
    method = registry.load("algorithms", job.algorithm.name)
    is_open = not (stop.samples or stop.steps) or batches.is_open(job)
    if is_open or job.data.clients or method.shard is None or not method.shard.takes_pushes:
        return ""
    step = batches.mean(job)
    lengths = [stop.samples / step] if stop.samples else []
    lengths += [stop.steps] if stop.steps else []
    push = method.replica.one_push(method.Options(**job.algorithm.options)).batches
    if method.shard.averages:
        # An update without all workers, if the method has such, is of fewer samples.
        least = "at least " if method.lead.quorum is not Lead.quorum else ""
        return f" ({least}{_count(round(min(lengths) / push / job.workers.count), 'update')})"
    return f" ({_count(round(min(lengths) / push), 'push', 'pushes')})"


def _compression(choice: Choice) -> str:
    density = choice.options.get("density")
    if choice.name == "none":
        return "no compression"
    return choice.name if density is None else f"{choice.name}(density={density})"


def _count(number: float, what: str, many: str = "") -> str:
    return f"{number:.10g} {what}" if number == 1 else f"{number:.10g} {many or what + 's'}"


def _stop(stop: Stop) -> str:
    limits = [
        _count(value, unit)
        for unit in ("epoch", "step", "sample", "second")
        if (value := getattr(stop, f"{unit}s")) is not None
    ]
    limits += [console.escape(stop.target)] if stop.target else []
    return f"until {' or '.join(limits)}" if limits else "until it is stopped"
