"""`dlctl claims`: what papers claim, as experiments that run here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dlctl.cli.group import CommandGroup
from dlctl.cli.options import OUTPUT, completing, json_option
from dlctl.cli.ui import console
from dlctl.util import cores, outfile, values


@click.group(
    "claims",
    CommandGroup,
    examples=[
        "dlctl claims ls  # the claims, and about how long each takes",
        "dlctl claims ls staleness-depth  # its set-up and its criterion",
        "dlctl claims run staleness-depth  # shown, not shown or refuted, with figures",
    ],
)
def command() -> None:
    """Each claim states its paper, a sentence of it, a set-up and a criterion, and runs in virtual
    time with real gradients, on small models, with all sides tuned alike. It is "shown" if every
    part of its criterion holds: in four of five seeds, and by more than the spread over the seeds,
    the range between the quartiles. It is "refuted" if that is true of the opposite of a part.
    """


@command.subcommand("dlctl claims ls --json  # as data")
@click.argument(
    "name", required=False, shell_complete=completing(lambda ctx: _names())
)  # fmt: skip
@json_option
def ls(name: str | None) -> None:
    """List the claims; with a name, all about one."""
    from dlctl.ops import claims  # imported late: it pulls in pydantic
    from dlctl.study.claims import load

    chosen = _names() if name is None else [name]
    found = [claims.described(each, load(each)) for each in chosen]
    if name is not None:
        text = _details(found[0])
    else:
        rows = (
            {"NAME": one["name"], ">MINUTES": f"{one['minutes']:g}", "PAPER": one["paper"]}
            for one in found
        )
        text = console.table(rows)
    console.show("dlctl.claims/1", {"claims": found}, text, chosen)


@command.subcommand("dlctl claims run staleness-depth -o staleness.json  # and keep the figures")
@click.argument("name", shell_complete=completing(lambda ctx: _names()))
@click.option("--seeds", type=click.IntRange(5, 1000), help="[default: the claim's, 5 or more]")
@click.option("--slots", type=click.IntRange(1), help="Simulations at a time.  [default: cores]")
@click.option("--output", "-o", type=OUTPUT, help="Also write what it has found as JSON.")
@json_option
def run(name: str, seeds: int | None, slots: int | None, output: Path | None) -> None:
    """Run a claim and judge it. The outcome is no error: the exit code is 0 whatever it is."""
    from dlctl.ops import claims

    record = claims.run(name, slots or cores.usable(), seeds)
    if output is not None:
        outfile.write(output, (json.dumps(record, indent=1) + "\n").encode())
    console.show("dlctl.claim/1", record, _result(record))
    if output is not None and not console.settings.json:
        console.written(output)


def _names() -> list[str]:
    from dlctl.study.claims import CLAIMS

    return [*CLAIMS]


def _details(one: Mapping[str, Any]) -> str:
    lines = [console.style(one["name"], bold=True), one["sentence"], f"({one['paper']})", ""]
    lines += [f"set-up: {one['setup']}", f"measure: {one['measure']}"]
    lines += [f"shown if: {part}: {words}" for part, words in one["criterion"].items()]
    return "\n".join([*lines, f"takes about {one['minutes']:g} minutes on one core"])


def _result(record: Mapping[str, Any]) -> str:
    tables = [
        f"{what}: median and quartiles of {record['seeds']} seeds\n"
        + console.table({"ARM": arm, ">VALUE": middle(row)} for arm, row in arms.items())
        for what, arms in record["figures"].items()
    ]
    parts = console.table(
        {"PART": part, "OUTCOME": found, ">MARGIN": middle(record["margins"][part])}
        for part, found in record["parts"].items()
    )
    outcome = console.style(record["outcome"], bold=True)
    head = f"{record['name']}: {outcome}\n{record['sentence']}"
    return "\n\n".join([head, parts, *tables, *record["notes"]])


def middle(row: Sequence[float]) -> str:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(row, n=4, method="inclusive")
    shown = [values.decimal(each) for each in (statistics.median(row), low, high)]
    return f"{shown[0]} ({shown[1]} .. {shown[2]})"
