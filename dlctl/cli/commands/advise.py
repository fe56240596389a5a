"""`dlctl advise`: which method to take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli.commands.compare import in_time, plan_of
from dlctl.cli.group import make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console
from dlctl.errors import NotFound
from dlctl.util import cores, units

if TYPE_CHECKING:
    from dlctl.health.memory import HostMemory
    from dlctl.ops.advise import Advised
    from dlctl.study.advice import Advice


@make_command(
    "dlctl advise job.toml --target 'accuracy >= 0.95'",
    "dlctl advise job.toml --link 100Mbit/s,5ms --slow worker-3=3x  # for such a network",
    "dlctl advise job.toml --methods diloco,sparseloco,downpour+topk --write",
)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--target", metavar="WORDS", help="[default: job.stop.target]")
@click.option("--methods", metavar="NAME,...", default="", help="[default: a short list]")
@click.option("--seeds", type=click.IntRange(1, 100), default=3, help="[default: 3]")
@click.option(
    "--tune", type=click.IntRange(1, 1000), default=4, metavar="TRIALS",
    help="Trials to tune each method's rates and interval with.  [default: 4]",
)  # fmt: skip
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="For all methods.")
@click.option(
    "--link", metavar="RATE[,LATENCY]",
    help="Between machines.  [default: measured between the job's hosts; one machine: no limit]",
)  # fmt: skip
@click.option("--slow", multiple=True, metavar="WORKER=FACTORx", help="A slower worker.")
@click.option("--step", metavar="TIME", help="Of a step.  [default: measured here]")
@click.option(
    "--cores", "machine_cores", type=click.IntRange(1), help="Of each machine.  [default: as here]"
)
@click.option("--slots", type=click.IntRange(1), help="Simulations at a time.  [default: cores]")
@click.option("--write", is_flag=True, help="Put the method and its values into the job file.")
@json_option
def command(
    file: Path,
    target: str | None,
    methods: str,
    seeds: int,
    tune: int,
    changes: tuple[str, ...],
    link: str | None,
    slow: tuple[str, ...],
    step: str | None,
    machine_cores: int | None,
    slots: int | None,
    write: bool,
) -> None:
    """Measures a step of the job and the links between its hosts, simulates a short list of methods
    (see `dlctl compare`), and says which one reaches the target first, what the next best costs,
    and how sure that is. "downpour+topk" is a method with another compression. `--write` changes
    the job file to the job that was simulated, with what --set says; nothing else runs or starts.
    """
    from dlctl.ops import advise, compare  # imported late: they pull in pydantic
    from dlctl.study import table as table_of

    plan = plan_of(file, methods, target, seeds, tune, changes, link, slow, step, machine_cores)
    found = advise.advise(plan, slots or cores.usable())
    for name, why in found.left_out.items():
        console.warn(f"{name} is left out: {why}")
    table = f"{found.directory / compare.FILE}"
    if found.advice is None:
        closest = table_of.rows(found.record)[0]["method"]
        raise NotFound(
            f"no method has reached {found.record['plan']['target']}; {closest} came closest",
            hint=f"give the job a later stop, or another --target; the runs: {table}",
        )
    best = found.advice.best
    data = {
        "directory": str(found.directory),
        "target": found.record["plan"]["target"],
        "method": best["method"],
        "tuned": best["tuned"],
        "next": found.advice.next,
        "next_costs": found.advice.next_costs,
        "rivals": [row["method"] for row in found.advice.rivals],
        "cheapest": found.advice.cheapest["method"],
        "left_out": dict(found.left_out),
        "memory": {host: memory._asdict() for host, memory in found.memory[best["method"]].items()},
        "best": best,
    }
    console.show("dlctl.advice/1", data, "\n".join(_lines(found, found.advice, table)))
    if write:  # Last: if the file cannot be changed, the answer is there all the same.
        sections = advise.write(file, found.record, best["method"])
        words = ", ".join(f"[{name}]" for name in sections)
        console.note(f"{file}: {words or 'nothing had to be'} changed")


def _lines(found: Advised, advice: Advice, table: str) -> list[str]:
    """The answer in five lines."""
    best, cheapest = advice.best, advice.cheapest
    tuned = ", ".join(f"{key} = {value:g}" for key, value in best["tuned"].items())
    lines = [
        f"take     {best['method']}{f', with {tuned}' if tuned else ''}",
        f"because  it reaches {found.record['plan']['target']} in {in_time(best['seconds'])}, with "
        f"{_size(best)} on the wire and {_memory(found, best['method'])}",
    ]
    if advice.next is None:
        lines.append("next     no other method is slower for sure, or reaches it")
    elif (costs := advice.next_costs) is not None:
        lines.append(f"next     {advice.next['method']} takes {costs:.2f} times as long")
    saves = f"; the fewest bytes: {cheapest['method']}, {_size(cheapest)}"
    lines.append(f"sure     {advice.sureness}{saves if cheapest is not best else ''}")
    request: Any = found.record["plan"]["request"]
    link = "no limit of the links" if found.link is None else _link(found)
    lines.append(f"how      simulated, steps of {1000 * request['step_s']:.3g} ms, {link}; {table}")
    return lines


def _memory(found: Advised, method: str) -> str:
    """Of the host with the least to spare."""

    def spare(each: tuple[str, HostMemory]) -> float:
        free = each[1].available_bytes
        return math.inf if free is None else free - each[1].needed_bytes

    host, memory = min(found.memory[method].items(), key=spare)
    free = memory.available_bytes
    of_free = "" if free is None else f" of {units.short_size(free)}"
    return f"{units.short_size(memory.needed_bytes)}{of_free} of memory on {host}"


def _size(row: dict[str, Any]) -> str:
    return units.short_size(row["bytes"]["median"])


def _link(found: Advised) -> str:
    assert found.link is not None
    rate = units.short_rate(found.link.bytes_per_s)
    return f"links of {rate} and {1000 * found.link.latency_s:.3g} ms"
