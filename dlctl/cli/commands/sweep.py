"""`dlctl sweep`: values of keys of a job file, each tried in a run of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from dlctl.cli.group import CommandGroup
from dlctl.cli.options import OUTPUT, file_argument, json_option
from dlctl.cli.ui import console
from dlctl.errors import NotFound
from dlctl.util import outfile, regular, values


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
@click.option("--trials", type=click.IntRange(1, 100_000), default=20, help="[default: 20]")
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
    trials: int,
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
    plan = sweep.SweepPlan(str(file), words, trials, metric, chosen, pruner, seeds, seed)
    directory = sweep.begin(plan)
    _run_on(directory, slots)


@command.subcommand("dlctl sweep resume digits-sweep-7f3a  # after everything was killed")
@click.argument("name", required=False, metavar="[SWEEP]")
@click.option("--slots", type=click.IntRange(1, 1000), default=1, help="Trials at a time.")
@json_option
def resume(name: str | None, slots: int) -> None:
    """Go on with a sweep; without a name with the newest one in ./runs."""
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
    """Show the values of the best trial."""
    from dlctl.jobfile import rewriting
    from dlctl.ops import sweep
    from dlctl.runs import sweep_database

    directory = sweep.named(name)
    plan, trials = sweep_database.read(directory)
    done = [trial for trial in trials if trial["state"] == "done"]
    if not done:
        raise NotFound("no trial has ended well yet", hint=f"dlctl sweep ls {directory.name}")
    found = min(done, key=lambda trial: (trial["score"], trial["number"]))
    lines = [f"{key} = {json.dumps(value)}" for key, value in found["point"].items()]
    score = _score(found["score"], plan["metric"])
    data = {"sweep": directory.name, "run": found["run"], "values": found["point"], "score": score}
    head = f"{plan['metric'].rpartition(' ')[0]} {values.decimal(score)} by {found['run']}"
    console.show("dlctl.sweep_best/1", data, "\n".join([head, *lines]))
    if write or output is not None:
        file = Path(plan["file"])
        text = rewriting.rewritten(regular.read_bytes(file).decode(), found["point"])
        outfile.write(output or file, text.encode())
        console.written(output or file)


def _run_on(directory: Path, slots: int) -> None:
    from dlctl.ops import sweep

    sweep.resume(directory, slots)
    _show(directory)


def _show(directory: Path) -> None:
    from dlctl.runs import sweep_database
    from dlctl.study import samplers, space

    plan, trials = sweep_database.read(directory)
    trials.sort(key=lambda t: (t["score"] is None, t["score"] or 0.0, t["number"]))
    cells = (
        {
            ">TRIAL": trial["number"],
            "STATE": trial["state"],
            f">{plan['metric'].upper()}": values.decimal(_score(trial["score"], plan["metric"])),
            **{
                key: values.decimal(v) if isinstance(v, float) else v
                for key, v in trial["point"].items()
            },
            ">SEED": trial["seed"],
            "RUN": trial["run"],
            "WHY": trial["reason"] or None,
        }
        for trial in trials
    )
    axes = space.parse(plan["words"])
    known = [samplers.Known(t["point"], t["score"]) for t in trials if t["state"] == "done"]
    shares = samplers.importances(axes, known)
    weights = ", ".join(f"{key} {100 * share:.0f} %" for key, share in shares.items())
    where = os.path.relpath(directory)
    lines = [console.table(cells) or "no trials yet", "", f"explained by: {weights}", f"in {where}"]
    data = {"sweep": directory.name, "directory": str(directory), "plan": plan}
    rows = [{**t, "score": _score(t["score"], plan["metric"])} for t in trials]
    console.show("dlctl.sweep/1", {**data, "trials": rows, "importance": shares}, "\n".join(lines))


def _score(score: float | None, metric: str) -> float | None:
    """The metric's value: scores are smaller for better ones."""
    if score is None:
        return None
    return -score if metric.endswith(" max") else score
