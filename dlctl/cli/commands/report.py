"""`dlctl report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import OUTPUT, run_argument
from dlctl.cli.ui import attention, console
from dlctl.observe import history, html
from dlctl.runs import select
from dlctl.util import outfile


@make_command(
    "dlctl report  # write digits-7f3a.html here, for the running job or the newest one",
    "dlctl report digits-7f3a -o best.html  # another run, to a file of your choice",
)
@click.option(
    "-o", "--output", metavar="FILE", type=OUTPUT,
    help='File to write; "-": standard output.  [default: RUN.html]',
)  # fmt: skip
@run_argument
def command(output: Path | None, job: str | None) -> None:
    """The page is one self-contained file that loads nothing from a network. It shows the loss,
    further metrics that the task's loss returns, evaluations, the learning rate, throughput,
    staleness and bytes against the time of day, training seconds, steps or samples, with the run's
    events as marks; and the job file. For a live run it shows the data so far. An existing file is
    replaced.
    """
    snapshot = select.look(job)
    target = output or Path(f"{snapshot.run_id}.html")
    text = html.page(history.read(snapshot.directory), attention.errors(snapshot))
    outfile.write(target, text.encode("utf-8", "backslashreplace"))
    console.written(target)
