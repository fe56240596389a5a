"""`dlctl compressors`: what can be done to a push, and what it would do to those of a job."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlctl import registry
from dlctl.cli.group import command as make_command
from dlctl.cli.options import complete_runs, json_option
from dlctl.cli.ui import console
from dlctl.util import values

if TYPE_CHECKING:
    from dlctl.config import JobFile
    from dlctl.messages import Array

PUSHES = 3
"""Of a gradient, one after the other with error feedback; shown is the last one."""


@make_command(
    "compressors",
    examples=[
        ("dlctl compressors", "all of them, with a line each"),
        ("dlctl compressors --job job.toml", "what each would make of a gradient of this job"),
        ("dlctl compressors --job digits --json", "of a run: at its newest good checkpoint"),
    ],
    see_also=["algorithms", "validate", "man"],
)
@click.option(
    "-j",
    "--job",
    metavar="RUN|FILE",
    shell_complete=complete_runs,
    help="Measure with a real gradient of this run or job file.",
)
@json_option
def command(job: str | None, as_json: bool) -> None:
    """List the compressors of pushes; measure them on a job.

    With --job the task is loaded in a process of its own, and the gradient that one push of a
    worker sums up is computed, or with local SGD the steps that a replica makes for one: from the
    newest good checkpoint of a run, or from the initial values of a job file. Every compressor gets
    the slices of the job's servers, three times with error feedback. The job's own compressor has
    the keys of the job; the others have their defaults, and the job's density if it says one.

    RATIO is how many times fewer bytes than dense float32 the third push has, ERROR is
    |u - Q(u)| / |u| of it, and TAKE is the time for it on one core. ERROR is no verdict: what is
    left out of a push waits for the next one.
    """
    if job:
        rows = _measured(job, tells=not as_json and console.progress_style() == "tty")
    else:
        rows = [_described(name) for name in registry.names("compressors")]
    if as_json:
        console.out_json("dlctl.compressors/1", {"compressors": rows})
    elif console.is_quiet():
        console.out("\n".join(console.escape(row["name"]) for row in rows))
    elif job:
        console.out(_table(rows))
    else:
        lines = [[console.escape(row["name"]), console.escape(row["summary"])] for row in rows]
        console.out(console.table(["NAME", "WHAT IT IS"], lines))
        console.hint("dlctl algorithms NAME shows the keys of one of them")


def _described(name: str) -> dict[str, Any]:
    entry = registry.find("compressors", name)
    return {"name": name, "summary": entry.summary, "note": entry.note}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            console.escape(row["name"] + (" *" if row["used"] else "")),
            f"{values.decimal(row['ratio'])}x",
            values.size(row["push_bytes"]),
            values.decimal(row["relative_error"]),
            f"{values.decimal(row['take_s'] * 1000)} ms",
        ]
        for row in rows
    ]
    headers = ["NAME", "RATIO", "PUSH", "ERROR", "TAKE"]
    elements = values.count(rows[0]["elements"])
    table = f"{console.table(headers, lines, headers[1:])}\n{elements} elements; * as the job says"
    whole = max(row["whole_slices"] for row in rows)
    if whole:
        of = rows[0]["slices"]
        table += f"\n{whole} of {of} slices have fewer elements than dense_below: they travel whole"
    return table


# ---------------------------------------------------------------- a real gradient


def _measured(job: str, *, tells: bool) -> list[dict[str, Any]]:
    """tells: what it is at, for whoever waits for it at a terminal."""
    say = console.note if tells else console.detail
    resolved, checkpoint = _job(job)
    say("loading the task and computing a gradient ...")
    gradient = _gradient(resolved, checkpoint)
    rows = []
    for name in registry.names("compressors"):
        say(f"measuring {console.escape(name)} ...")
        rows.append(_measure(name, resolved, gradient))
    return rows


def _job(text: str) -> tuple[JobFile, Path | None]:
    """A job, and the newest good checkpoint if it is a run that has one."""
    from dlctl import jobfile
    from dlctl.ops import remains
    from dlctl.runs import checkpoints, preferred, select

    if Path(text).is_file():
        return jobfile.load(Path(text)), None
    directory = select.directory(text)
    job = remains.read_jobfile(directory)
    good = checkpoints.newest_good(directory, console.warn, preferred.order(directory))
    return job, good[0] if good else None


def _gradient(job: JobFile, checkpoint: Path | None) -> Array:
    """float32[d]. Another process computes it, because it needs torch and runs the user's code."""
    import numpy as np

    from dlctl.config import to_dict
    from dlctl.launch.base import same_hashes
    from dlctl.ops import other_process

    with tempfile.TemporaryDirectory(prefix="dlctl-gradient-") as directory:
        file = Path(directory) / "gradient.npy"
        arguments = [str(file)] + (["--checkpoint", str(checkpoint)] if checkpoint else [])
        other_process.run(
            "daemons.worker.sample_gradient", arguments, Path(job.job.task),
            "the gradient could not be computed",
            input=json.dumps(to_dict(job)), env={**os.environ, **same_hashes(job.job.seed)},
        )  # fmt: skip
        gradient: Array = np.load(file, allow_pickle=False)
        return gradient


def _options(kind: Any, job: JobFile, used: bool) -> dict[str, Any]:
    if used:
        return job.compression.options
    density = job.compression.options.get("density")
    has_one = density is not None and "density" in kind.Options.__dataclass_fields__
    return {"density": density} if has_one else {}


def _measure(name: str, job: JobFile, gradient: Array) -> dict[str, Any]:
    import time

    import numpy as np

    from dlctl.algorithms.base import dense
    from dlctl.flat import slice_bounds

    kind = registry.load("compressors", name)
    used = name == job.compression.name
    options = kind.Options(**_options(kind, job, used))
    compressor = kind(options)
    u = np.zeros_like(gradient)
    bounds = [slice_bounds(u.size, job.servers.count, i) for i in range(job.servers.count)]
    for _ in range(PUSHES):
        u += gradient
        missing, length = u.copy(), float(np.linalg.norm(u))
        started = time.thread_time()
        packed = [compressor.take(u[lo:hi], shard) for shard, (lo, hi) in enumerate(bounds)]
        took_s = time.thread_time() - started
    for part, (lo, hi) in zip(packed, bounds, strict=True):
        missing[lo:hi] -= dense(kind.expand(part, hi - lo), hi - lo)
    push_bytes = sum(part.nbytes for part in packed)
    return {
        **_described(name),
        "used": used,
        "elements": int(u.size),
        "slices": len(bounds),
        "whole_slices": sum(hi - lo < getattr(options, "dense_below", 0) for lo, hi in bounds),
        "push_bytes": push_bytes,
        "ratio": 4 * u.size / push_bytes if push_bytes else None,
        "relative_error": float(np.linalg.norm(missing)) / length if length else 0.0,
        "take_s": took_s,
    }
