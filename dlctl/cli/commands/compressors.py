"""`dlctl compressors`: the compressors of pushes, and measurements of them on a job."""

from __future__ import annotations

from typing import Any

import click

from dlctl import registry
from dlctl.cli.group import command as make_command
from dlctl.cli.options import complete_runs, json_option
from dlctl.cli.ui import console
from dlctl.util import values


@make_command(
    "compressors",
    examples=[
        ("dlctl compressors", "all of them, a line each"),
        ("dlctl compressors --job job.toml", "measure each on a gradient of this job"),
        ("dlctl compressors --job digits --json", "for a run: at its newest good checkpoint"),
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

    With --job, a separate process loads the task and computes the gradient of one push of a worker,
    or with local SGD the steps of a replica for one push: at the newest good checkpoint of a run,
    or at the initial values of a job file. Every compressor gets the slices of the job's servers,
    three times with error feedback. The job's own compressor uses the keys of the job; the others
    use their defaults, and the job's density if it is set.

    RATIO is the size in dense float32 divided by the size of the third push, ERROR is
    |u - Q(u)| / |u| of it, and TAKE is the time for it on one core. ERROR is not a verdict: what a
    push leaves out is sent with the next one.
    """
    measured: dict[str, dict[str, Any]] = {}
    if job:
        from dlctl.ops import compression

        say = console.detail if as_json or console.progress_style() != "tty" else console.note
        say("loading the task and computing a gradient ...")
        measured = compression.measured(job)
    rows = [
        {"name": name, "summary": entry.summary, "note": entry.note, **measured.get(name, {})}
        for name in registry.names("compressors")
        for entry in [registry.find("compressors", name)]
    ]
    if as_json:
        console.out_json("dlctl.compressors/1", {"compressors": rows})
    elif console.is_quiet():
        console.out("\n".join(console.escape(row["name"]) for row in rows))
    elif job:
        console.out(_table(rows))
    else:
        lines = [[console.escape(row["name"]), console.escape(row["summary"])] for row in rows]
        console.out(console.table(["NAME", "WHAT IT IS"], lines))
        console.hint("dlctl algorithms NAME shows the keys of one entry")


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
    table = f"{console.table(headers, lines, headers[1:])}\n{elements} elements; * the job's own"
    whole = max(row["whole_slices"] for row in rows)
    if whole:
        of = rows[0]["slices"]
        table += (
            f"\n{whole} of {of} slices have fewer elements than dense_below: they are sent dense"
        )
    return table
