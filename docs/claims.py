"""Writes claims.md and its figures from the records in benchmarks/results: `make claims`, or
`python docs/claims.py`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import figures
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dlctl.cli.commands.claims import middle
from dlctl.ops import claims
from dlctl.study.claims import CLAIMS, load

HERE = Path(__file__).parent
PAGE, FOLDER = HERE / "claims.md", HERE / "claims"
RESULTS = HERE.parent / "benchmarks" / "results"
DELAYS, TABLE = RESULTS / "delays.json", RESULTS / "table.json"
LOSS = 3.2
"""To which each method of the big table trains."""
NOT_RUN = "not run yet"
LOG_FROM = 30.0
"""Largest value, relative to the smallest one, from which an axis is logarithmic."""
HEAD = """<!-- Written by `make claims` from benchmarks/results. -->

# What papers claim

Each claim below is an experiment: `dlctl claims run NAME` repeats it, in about a minute of a core.
It runs the real roles and methods in virtual time, with real gradients of small networks, so it
says whether a claim holds there, not whether it does on a thousand machines. All sides of a
comparison are tuned with the same number of trials on a seed of their own, and then run with
the same seeds.

A claim is **shown** if every part of its criterion is: at least four of five seeds agree, and
the median margin is larger than the spread over the seeds, the range between the quartiles. It
is **refuted** if that is true of the opposite of one part. Else it is **not shown**. A margin
is how far a seed is on the side that the paper says, in the unit of the measure. The criteria
were written before the runs; where a set-up or a criterion was changed after one, the claim says
so.
"""


def main() -> None:
    figures.set_style()
    FOLDER.mkdir(exist_ok=True)
    records = {name: _record(name) for name in CLAIMS}
    lines = [HEAD, "| claim | paper | outcome |", "|---|---|---|"]
    for name, record in records.items():
        outcome = record["outcome"] if record else NOT_RUN
        lines.append(f"| [{name}](#{name}) | {load(name).paper} | {outcome} |")
    for name, record in records.items():
        lines += _section(name, record)
    lines += _delays() + _table()
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _record(name: str) -> dict[str, Any] | None:
    file = RESULTS / "claims" / f"{name}.json"
    return claims.read(file) if file.exists() else None


def _section(name: str, record: dict[str, Any] | None) -> list[str]:
    claim = load(name)
    lines = ["", f"## {name}", "", f"> {claim.sentence}", ">", f"> {claim.paper}", ""]
    setup = record["setup"] if record else claim.setup
    lines += [f"Set-up: {setup}", "", f"Measure: {claim.measure}.", ""]
    if record is None:
        return [*lines, *(f"- {words}" for words in claim.criterion.values()), "", f"**{NOT_RUN}**"]
    lines += ["| shown if | outcome | margin: median (quartiles) |", "|---|---|---|"]
    for part, words in claim.criterion.items():
        margin = middle(record["margins"][part])
        lines.append(f"| {words} | {record['parts'][part]} | {margin} |")
    what = record["figure"] or next(iter(record["figures"]))
    draw(name, what, record["figures"][what])
    lines += ["", f"![{what}](claims/{name}.svg)", ""]
    for measure, arms in record["figures"].items():
        cells = "; ".join(f"{arm} {middle(row)}" for arm, row in arms.items())
        lines.append(f"- {measure}: {cells}")
    lines += [f"- {note}" for note in record["notes"]]
    how = record["made_with"]
    lines += [
        "",
        f"**{record['outcome']}** with {record['seeds']} seeds in {record['seconds']:.0f} s on "
        f"{record['made_at']}, dlctl {how['dlctl']}.",
    ]
    return [*lines, "", claim.remark] if claim.remark else lines


def draw(name: str, what: str, arms: dict[str, list[float]]) -> None:
    """docs/claims/NAME.svg: a row for each arm, a dot for each seed, a line for the median."""
    figure = Figure(figsize=(8, 0.55 + 0.27 * len(arms)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(arms.values()):
        axes.plot(row, [place] * len(row), ".", color="0.65", markersize=6)
        axes.plot([statistics.median(row)], [place], "|", color="C0", markersize=13, mew=2)
    found = [value for row in arms.values() for value in row]
    if min(found) > 0 and max(found) > LOG_FROM * min(found):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(arms)), [*arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel(what)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="x")
    figures.save(name, figure, FOLDER)


def _delays() -> list[str]:
    """Dai's figure: depth against delay, a panel for each optimiser."""
    if not DELAYS.exists():
        return []
    cells: dict[str, Any] = json.loads(DELAYS.read_text())
    optimizers = list(dict.fromkeys(name.partition("-")[0] for name in cells))
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(optimizers), sharey=True))
    lines = [
        "", "## Delays, depth and optimisers", "",
        "Figure 1 of Dai et al., Toward Understanding the Impact of Staleness in Distributed "
        "Machine Learning, 2018, with the set-up of [staleness-depth](#staleness-depth): rounds to "
        "the target with delays of up to s rounds, relative to none; the median of five seeds, 10 "
        "where the target is not reached in as many. The last column is gradient coherence with "
        "s = 8, the least product of a gradient with those of the last 8 rounds, relative to its "
        "square.",
        "", "| optimiser | hidden layers | rate | s = 4 | 8 | 16 | 32 | coherence |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for axes, optimizer in zip(panels, optimizers, strict=True):
        for depth in range(4):
            cell = cells.get(f"{optimizer}-{depth}")
            if cell is None:
                lines.append(f"| {optimizer} | {depth} | {NOT_RUN} | | | | | |")
                continue
            ratios = {int(s): _ratio(row, cell["rounds"]["0"]) for s, row in cell["rounds"].items()}
            axes.plot(
                [*ratios], [*ratios.values()], color=f"C{depth}", marker=".", label=f"{depth}"
            )
            shown = " | ".join(f"{ratios[s]:.2f}" for s in (4, 8, 16, 32))
            coherence = statistics.median(cell["coherence"])
            lines.append(
                f"| {optimizer} | {depth} | {cell['lr']:.3g} | {shown} | {coherence:.2f} |"
            )
        axes.set(title=optimizer, xlabel="s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("rounds, relative to s = 0")
    panels[0].legend(frameon=False, title="hidden layers")
    figures.save("delays", figure, FOLDER)
    return [*lines, "", "![rounds by delay](claims/delays.svg)"]


def _ratio(rounds: list[int], without: list[int]) -> float:
    return statistics.median(a / b for a, b in zip(rounds, without, strict=True))


def _table() -> list[str]:
    """The big table, as far as it has been run."""
    if not TABLE.exists():
        return []
    done: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    conditions = list(dict.fromkeys(each for row in done.values() for each in row))
    lines = [
        "", "## Every method, five conditions", "",
        f"Until the same validation loss, {LOSS} nats, of a GPT with two layers of 32 on the text "
        "of examples/chargpt, simulated; four workers, 160 steps of 50 ms each. With loopback, "
        "one slower worker and kills all of them share two cores of one machine, so a step takes "
        "twice as long; with the two links each has a machine. The rates of a method are tuned "
        "with three trials on loopback, all else is by its defaults, which are for longer runs. "
        "Seconds / MB / thousand samples, medians of three seeds; n/3: the seeds that reached it, "
        "where not all did; bytes of collectives are not counted. The last column is the loss at "
        "the end, on loopback. `python -m benchmarks.claims.table` computes the cells that are not "
        "there yet.",
        "", f"| method | {' | '.join(conditions)} | loss |", "|---" * (2 + len(conditions)) + "|",
    ]  # fmt: skip
    for name, row in done.items():
        cells = " | ".join(_cell(row.get(condition)) for condition in conditions)
        lines.append(f"| {name} | {cells} | {_end(row[conditions[0]])} |")
    return lines


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return NOT_RUN
    if "error" in cell:
        return "failed"
    curves = cell["curves"]
    at = [found for curve in curves if (found := _first(curve)) is not None]
    if not at:
        return "never"
    seconds, mb, samples = (statistics.median(of) for of in list(zip(*at, strict=True))[:3])
    count = "" if len(at) == len(curves) else f", {len(at)}/{len(curves)}"
    return f"{seconds:.3g} / {f'{mb:.3g}' if mb else '-'} / {samples / 1e3:.3g}{count}"


def _first(curve: list[list[float]] | None) -> list[float] | None:
    """The first evaluation that reached the loss: seconds, MB, samples, loss."""
    return next((point for point in curve or () if point[3] <= LOSS), None)


def _end(cell: dict[str, Any]) -> str:
    ends = [curve[-1][3] for curve in cell.get("curves", ()) if curve]
    return f"{statistics.median(ends):.2f}" if ends else "-"


if __name__ == "__main__":
    main()
