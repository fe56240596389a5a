"""`dlctl plot`: lines of several runs in one picture."""

from __future__ import annotations

from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import OUTPUT, complete_runs, job_option
from dlctl.cli.ui import console
from dlctl.observe import history, plot
from dlctl.runs import select
from dlctl.util import extras

AXES = ("seconds", "steps", "samples", "epochs", "bytes")


@make_command(
    "dlctl plot  # the loss against samples: plot.png",
    "dlctl plot digits-7f3a digits-a22d --x bytes  # two runs, by their traffic",
    "dlctl plot runs/* --y accuracy --x seconds -o all.pdf  # by evaluations of the model",
)
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@click.option(
    "--y", "what", default="loss", metavar="NAME", help="The figure to plot.  [default: loss]"
)
@click.option("--x", "axis", type=click.Choice(AXES), default="samples", help="[default: samples]")
@click.option(
    "-o", "--output", metavar="FILE", type=OUTPUT, default=Path("plot.png"),
    help='A .png, .svg or .pdf file; "-": standard output, as png.  [default: plot.png]',
)  # fmt: skip
@click.option("--log", is_flag=True, help="Logarithmic y axis.")
@job_option
def command(
    runs: tuple[str, ...], what: str, axis: str, output: Path, log: bool, job: str | None
) -> None:
    """NAME is loss, samples_per_s, staleness, push_bytes_per_s, fetch_bytes_per_s, lr, inner_lr,
    workers, noise_scale, or the name of a metric. task.loss is a further metric that the task's
    loss returns, evaluation.loss one of its evaluate, method.replicas a figure of the method; the
    prefix may be omitted if the name is clear without it. Seconds are training time, and bytes the
    traffic of all workers (pushes and fetches), so that methods can be compared by cost. Where a
    run rolled back to a checkpoint, redone work is drawn once against steps, samples and epochs.
    Needs `pip install 'dlctl[plot]'`.
    """
    extras.require("plot", "dlctl plot")
    named = [select.look(run) for run in runs or (job,)]
    found = [history.read(snapshot.directory, whole=False) for snapshot in named]
    plot.draw(found, what, axis, output, log=log)
    console.written(output)
