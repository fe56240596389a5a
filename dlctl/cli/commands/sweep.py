"""`dlctl sweep`: values of keys of a job file, each tried in a run of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dlctl.cli.group import CommandGroup
from dlctl.cli.options import OUTPUT, file_argument, json_option
from dlctl.cli.ui import console
from dlctl.errors import NotFound, UsageError
from dlctl.util import hints, outfile, regular, values
from dlctl.util.text import plural


class _Sweeps(CommandGroup):
    """`dlctl sweep job.toml` is `dlctl sweep run job.toml`, and --resume is resume."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = ["resume", *args[1:]] if args[:1] == ["--resume"] else args
        return super().parse_args(ctx, words)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and Path(args[0]).suffix == ".toml":
            args = ["run", *args]
        return super().resolve_command(ctx, args)


@click.group(
    "sweep",
    _Sweeps,
    examples=[
        "dlctl sweep job.toml --set inner.lr=1e-4..1e-2:log --trials 20 --metric 'accuracy max'",
        "dlctl sweep job.toml --set algorithm.local_steps=10,50 --sampler grid --slots 2",
        "dlctl sweep resume  # after everything was killed",
        "dlctl sweep best --write  # the best values, into the job file",
    ],
)
def command() -> None:
    """Each trial is a run in the directory of the sweep, with a name, a seed and values of its own,
    for every command that takes a run. A sweep that was killed goes on where it was: with
    "resume" its trials are taken up from their checkpoints, and none is lost or done twice.
    """


@command.subcommand("dlctl sweep job.toml --set inner.lr=1e-4..1e-2:log --trials 20")
@file_argument
@click.option(
    "--set", "words", multiple=True, required=True, metavar="KEY=VALUES",
    help="LOW..HIGH, LOW..HIGH:log, or A,B,C.",
)  # fmt: skip
@click.option(
    "--trials", type=click.IntRange(1, 100_000),
    help="Points to try. [default: 20; with --sampler grid all]",
)  # fmt: skip
@click.option("--metric", default="", metavar="WORDS", help="[default: best of checkpoints]")
@click.option(
    "--sampler", type=click.Choice(["tpe", "random", "grid"]),
    help="[default: tpe if optuna is there, else random]",
)  # fmt: skip
@click.option("--pruner", type=click.Choice(["none", "halving"]), default="none")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, help="Of each point.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the sampler.")
@click.option("--slots", type=click.IntRange(1, 1000), default=1, help="Trials at a time.")
@json_option
def run(
    file: Path,
    words: tuple[str, ...],
    trials: int | None,
    metric: str,
    sampler: str | None,
    pruner: str,
    seeds: int,
    seed: int,
    slots: int,
) -> None:
    """Try values of keys, and show the table. Points are asked for in generations of four, so that
    the same ones come whatever the number of slots. "halving" looks at a generation after a ninth
    and a third of the job's length, and ends two thirds of it each time.
    """
    from dlctl.ops import sweep  # imported late: it pulls in pydantic
    from dlctl.util import extras

    chosen = sampler or ("tpe" if extras.is_there("sweep") else "random")
    plan = sweep.SweepPlan(str(file), words, trials or 0, metric, chosen, pruner, seeds, seed)
    directory = sweep.begin(plan)
    _run_on(directory, slots)


@command.subcommand("dlctl sweep resume digits-sweep-7f3a  # after everything was killed")
@click.argument("name", required=False, metavar="[SWEEP]")
@click.option("--slots", type=click.IntRange(1, 1000), default=1, help="Trials at a time.")
@json_option
def resume(name: str | None, slots: int) -> None:
    """Go on with a sweep; without a name with the newest one in ./runs. Trials that have failed
    are tried once more, unless their training has diverged. Refused if the job file has changed,
    but for the keys that are varied.
    """
    from dlctl.ops import sweep

    _run_on(sweep.named(name), slots)


@command.subcommand("dlctl sweep ls digits-sweep-7f3a  # its trials")
@click.argument("name", required=False, metavar="[SWEEP]")
@json_option
def ls(name: str | None) -> None:
    """List the trials of a sweep, the best first; without a name the sweeps in ./runs."""
    from dlctl.ops import sweep
    from dlctl.runs import sweep_database

    if name is not None:
        _show(sweep.named(name))
        return
    found = [(path, *sweep_database.read(path)) for path in sweep.newest()]
    data = [{"sweep": p.name, "directory": str(p), "trials": len(t)} for p, _, t in found]
    rows = (
        {
            "SWEEP": path.name,
            ">ENDED": sum(trial["state"] in sweep_database.ENDED for trial in trials),
            ">TRIALS": plan["trials"],
            "METRIC": plan["metric"],
            "VARIED": " ".join(plan["words"]),
        }
        for path, plan, trials in found
    )
    table = console.table(rows) or "there are no sweeps: dlctl sweep job.toml --set KEY=VALUES"
    console.show("dlctl.sweeps/1", {"sweeps": data}, table)


@command.subcommand("dlctl sweep best --write  # into the job file")
@click.argument("name", required=False, metavar="[SWEEP]")
@click.option("--write", is_flag=True, help="Change the job file; all else in it stays.")
@click.option("-o", "--output", type=OUTPUT, metavar="FILE", help="Write it there instead.")
@json_option
def best(name: str | None, write: bool, output: Path | None) -> None:
    """Show the values of the best point: by the mean of its seeds, of which none has failed."""
    from dlctl.ops import sweep
    from dlctl.runs import sweep_database
    from dlctl.study import points

    directory = sweep.named(name)
    plan, trials = sweep_database.read(directory)
    found = points.best(trials)
    if found is None:
        raise NotFound("no point has ended well yet", hint=f"dlctl sweep ls {directory}")
    if write and output is None:
        _check_ended(directory, trials)
    lines = [f"{key} = {json.dumps(value)}" for key, value in found.values.items()]
    score, runs = _score(found.score, plan["metric"]), [trial["run"] for trial in found.trials]
    data = {"sweep": directory.name, "run": runs[0], "runs": runs, "values": found.values}
    head = f"{plan['metric'].rpartition(' ')[0]} {values.decimal(score)} by {', '.join(runs)}"
    console.show("dlctl.sweep_best/1", {**data, "score": score}, "\n".join([head, *lines]))
    if write or output is not None:
        _write(Path(plan["file"]), found.values, output)


def _check_ended(directory: Path, trials: list[dict[str, Any]]) -> None:
    """What comes later may be better. Raises UsageError."""
    from dlctl.runs.sweep_database import ENDED

    if left := sum(trial["state"] not in ENDED for trial in trials):
        go_on = hints.command(f"dlctl sweep resume {directory}", "runs them")
        other = hints.command(f"dlctl sweep best {directory} -o FILE", "writes another job file")
        what = f"{plural(left, 'trial')} of the sweep {'has' if left == 1 else 'have'} not ended"
        raise UsageError(what, where=str(directory), hint=hints.either(go_on, other))


def _write(file: Path, best: Mapping[str, Any], output: Path | None) -> None:
    """Raises UsageError for a job file that is no longer there."""
    from dlctl.jobfile import rewriting

    try:
        text = regular.read_bytes(file).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"cannot read the job file of the sweep: {reason}"
        raise UsageError(what, where=str(file), hint="move it back, or copy the values") from None
    outfile.write(output or file, rewriting.rewritten(text, best).encode())
    console.written(output or file)


def _run_on(directory: Path, slots: int) -> None:
    from dlctl.ops import sweep

    sweep.resume(directory, slots)
    _show(directory)


def _show(directory: Path) -> None:
    from dlctl.runs import sweep_database
    from dlctl.study import points, samplers, space

    plan, trials = sweep_database.read(directory)
    found, metric = points.ranked(trials), plan["metric"]
    rows = [
        {**t, "score": _score(t["score"], metric), "mean": _score(point.score, metric)}
        for point in found
        for t in point.trials
    ]
    cells = (_cells(row, metric, has_seeds=plan["seeds"] > 1) for row in rows)
    axes = space.parse(plan["words"])
    known = [samplers.Known(p.values, p.score) for p in found if p.is_done]
    shares = samplers.importances(axes, known)
    weights = ", ".join(f"{key} {100 * share:.0f} %" for key, share in shares.items())
    where = os.path.relpath(directory)
    lines = [console.table(cells) or "no trials yet", "", f"explained by: {weights}", f"in {where}"]
    data = {"sweep": directory.name, "directory": str(directory), "plan": plan}
    console.show("dlctl.sweep/1", {**data, "trials": rows, "importance": shares}, "\n".join(lines))


def _cells(row: Mapping[str, Any], metric: str, *, has_seeds: bool) -> dict[str, Any]:
    return {
        ">TRIAL": row["number"],
        "STATE": row["state"],
        f">{metric.upper()}": values.decimal(row["score"]),
        **({">MEAN": values.decimal(row["mean"])} if has_seeds else {}),
        **{
            key: values.decimal(v) if isinstance(v, float) else v for key, v in row["point"].items()
        },
        ">SEED": row["seed"],
        "RUN": row["run"],
        "WHY": row["reason"] or None,
    }


def _score(score: float | None, metric: str) -> float | None:
    """The metric's value: scores are smaller for better ones."""
    if score is None:
        return None
    return -score if metric.endswith(" max") else score
