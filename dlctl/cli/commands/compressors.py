"""`dlctl compressors`: the compressors of pushes, and measurements of them on a job."""

from __future__ import annotations

from typing import Any

import click

from dlctl import registry
from dlctl.cli.group import make_command
from dlctl.cli.options import complete_runs, json_option
from dlctl.cli.ui import console
from dlctl.util import values


@make_command(
    "dlctl compressors  # all of them, a line each",
    "dlctl compressors --job job.toml  # measure each on a gradient of this job",
    "dlctl compressors --job digits --json  # for a run: at its newest good checkpoint",
)
@click.option(
    "-j", "--job", metavar="RUN|FILE", shell_complete=complete_runs, help="Measure with a gradient."
)
@json_option
def command(job: str | None) -> None:
    """With --job, a separate process loads the task and computes the gradient of one push of a
    worker, or with local SGD the steps of a replica for one push: at the newest good checkpoint of
    a run, or at the initial values of a job file. Every compressor gets the slices of the job's
    servers, three times with error feedback. The job's own compressor uses the keys of the job; the
    others use their defaults, and the job's density if it is set.

    RATIO is the size in dense float32 divided by the size of the third push, ERROR is
    |u - Q(u)| / |u| of it, and TAKE is the time for it on one core. ERROR is not a verdict: what a
    push leaves out is sent with the next one.
    """
    measured: dict[str, dict[str, Any]] = {}
    if job:
        from dlctl.ops import compression

        console.note("loading the task and computing a gradient ...")
        measured = compression.measured(job)
    rows = [
        {"name": name, "summary": entry.summary, "note": entry.note, **measured.get(name, {})}
        for name in registry.names("compressors")
        for entry in [registry.find("compressors", name)]
    ]
    text = console.table({"NAME": row["name"], "WHAT IT IS": row["summary"]} for row in rows)
    if job:
        cells = (
            {
                "NAME": row["name"] + (" *" if row["used"] else ""),
                ">RATIO": f"{values.decimal(row['ratio'])}x",
                ">PUSH": values.size(row["push_bytes"]),
                ">ERROR": values.decimal(row["relative_error"]),
                ">TAKE": f"{values.decimal(row['take_s'] * 1000)} ms",
            }
            for row in rows
        )
        text = console.table(cells)
        text += f"\n{values.count(rows[0]['elements'])} elements; * the job's own"
        if whole := max(row["whole_slices"] for row in rows):
            small = "have fewer elements than dense_below: they are sent dense"
            text += f"\n{whole} of {rows[0]['slices']} slices {small}"
    names = [row["name"] for row in rows]
    console.show("dlctl.compressors/1", {"compressors": rows}, text, names)
