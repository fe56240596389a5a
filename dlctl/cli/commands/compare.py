"""`dlctl compare`: several methods on one job, each tuned with the same budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli.commands.simulate import assignment, of_slow_worker, of_time
from dlctl.cli.group import make_command
from dlctl.cli.options import OUTPUT, json_option
from dlctl.cli.ui import console
from dlctl.errors import UsageError
from dlctl.util import cores, units, values

if TYPE_CHECKING:
    from dlctl.ops.compare import Plan


@make_command(
    "dlctl compare job.toml --methods downpour,sync,diloco,ssp --target 'accuracy >= 0.95'",
    "dlctl compare job.toml --methods diloco,sync --link 100Mbit/s,5ms --tune 8 --seeds 5",
    "dlctl compare job.toml --methods diloco,sync --real  # on this machine's daemons",
    "dlctl compare --again runs/digits-compare-7f3a/comparison.json  # the same table",
)
@click.argument("file", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@click.option("--methods", metavar="NAME,...", help="The methods to compare.")
@click.option("--target", metavar="WORDS", help="[default: job.stop.target]")
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=3, help="Of each method.  [default: 3]"
)
@click.option(
    "--tune", type=click.IntRange(1, 1000), default=4, metavar="TRIALS",
    help="Trials to tune each method's rates and interval with.  [default: 4]",
)  # fmt: skip
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="For all methods.")
@click.option("--link", metavar="RATE[,LATENCY]", help="Of every daemon's machine.")
@click.option("--slow", multiple=True, metavar="WORKER=FACTORx", help="A slower worker.")
@click.option("--step", metavar="TIME", help="Of a step.  [default: measured here]")
@click.option(
    "--cores", "machine_cores", type=click.IntRange(1), help="Of each machine.  [default: as here]"
)
@click.option("--by", type=click.Choice(["seconds", "bytes", "samples"]), default="seconds")
@click.option("--real", is_flag=True, help="Final runs on real daemons of this machine.")
@click.option("--slots", type=click.IntRange(1), help="Simulations at a time.  [default: cores]")
@click.option("--again", type=click.Path(path_type=Path), help="Repeat this comparison.json.")
@click.option("--figure", type=OUTPUT, help="Draw the metric against time, bytes or samples.")
@json_option
def command(
    file: Path | None,
    methods: str | None,
    target: str | None,
    seeds: int,
    tune: int,
    changes: tuple[str, ...],
    link: str | None,
    slow: tuple[str, ...],
    step: str | None,
    machine_cores: int | None,
    by: str,
    real: bool,
    slots: int | None,
    again: Path | None,
    figure: Path | None,
) -> None:
    """Simulates the job with each method (see `dlctl simulate`), on the same data with the same
    seeds, and prints what each one takes until the target: the median over the seeds, and the
    quartiles. "torch" is one plain torch process, and "ddp" torch's DDP over gloo with a process
    for each worker, both without dlctl. The job's own method starts with the values of the file,
    the others with their defaults; then the rates and the interval of each are tuned with as many
    trials. A trial ends at the target, or where the job does: its stop needs a limit beside the
    target. A method is slower than the one above it if four of five seeds say so and the difference
    is larger than the spread; else it is undecided. With --real, --step and --cores are of the
    trials, and there is no --link or --slow. All that is needed to repeat it is in comparison.json.
    """
    from dlctl.ops import compare  # imported late: it pulls in pydantic

    if again is not None:
        plan = compare.plan_of(compare.read(again))
    else:
        if file is None or not methods:
            raise UsageError(
                "name a job file and the methods to compare",
                hint="dlctl compare job.toml --methods diloco,sync,downpour",
            )
        plan = plan_of(file, methods, target, seeds, tune, changes, link, slow, step, machine_cores)
        plan = replace(plan, is_real=real)
    directory, record = compare.compare(plan, slots or cores.usable())
    if again is not None and compare.differs(record, compare.read(again)):
        console.warn("the table is not the same: another processor, version or task")
    _show(directory, record, by)
    if figure is not None:
        compare.draw(directory, record, by, figure)
        console.written(figure)


def plan_of(
    file: Path,
    methods: str,
    target: str | None,
    seeds: int,
    tune: int,
    changes: tuple[str, ...],
    link: str | None,
    slow: tuple[str, ...],
    step: str | None,
    machine_cores: int | None,
) -> Plan:
    """The comparison that these options ask for. Raises UsageError."""
    from dlctl.ops import compare

    return compare.Plan(
        file=file,
        methods=tuple(dict.fromkeys(filter(None, map(str.strip, methods.split(","))))),
        target=target or "",
        changes=dict(map(assignment, changes)),
        seeds=seeds,
        trials=tune,
        request=compare.request(
            link, dict(map(of_slow_worker, slow)), of_time("--step", step), machine_cores
        ),
    )


def _show(directory: Path, record: dict[str, Any], by: str) -> None:
    from dlctl.study import table

    found = table.rows(record, by)
    cells = (
        {
            "METHOD": row["method"],
            "REACHED": f"{row['reached']}/{row['seeds']}",
            ">TIME": _middle(row["seconds"], _seconds),
            ">BYTES": _middle(row["bytes"], units.short_size),
            ">SAMPLES": _middle(row["samples"], lambda value: f"{value:,.0f}"),
            ">BEST": _middle(row["best"], values.decimal),
            "TUNED": ", ".join(f"{key} {value:g}" for key, value in row["tuned"].items()) or None,
            "VERDICT": row["verdict"] or None,
        }
        for row in found
    )
    failures = record.get("failures", [])
    for failed in failures:
        reason = failed["reason"].splitlines()[-1]
        console.warn(f"{failed['method']} failed with seed {failed['seed']}: {reason}")
    data = {
        "directory": str(directory), "target": record["plan"]["target"], "rows": found,
        "failures": failures,
    }  # fmt: skip
    if not any(row["reached"] for row in found):
        closest = data["closest"] = found[0]["method"]
        console.warn(f"no method reached {record['plan']['target']}; {closest} came closest")
    head = f"until {record['plan']['target']}: median and quartiles of the seeds that reached it"
    console.show("dlctl.compare/1", data, "\n".join([head, "", console.table(cells)]))


def in_time(middle: dict[str, Any]) -> str:
    """A median and its quartiles, in seconds."""
    return str(_middle(middle, _seconds))


def _seconds(value: float) -> str:
    return f"{value:.3g}s" if value < 10 else values.duration(value)


def _middle(middle: Any, of: Any) -> str | None:
    if middle is None:
        return None
    low, high = middle["range"]
    return f"{of(middle['median'])} ({of(low)} .. {of(high)})"
