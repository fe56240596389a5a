"""Writes projection.md and its figure from benchmarks/results/projection.json:
`python -m benchmarks.projection`, or `python docs/projection.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import figures
from matplotlib.figure import Figure

Json = dict[str, Any]
HERE = Path(__file__).parent
PAGE = HERE / "projection.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "projection.json"
FULL = 0.9
HEAD = """<!-- Written by `python -m benchmarks.projection` from benchmarks/results. -->

# A thousand workers

Nobody here has a thousand machines. `dlctl simulate --protocol` runs all roles of such a run
without gradients, in virtual time: every message of 1,000 workers and 16 servers, on links of which
each machine has one. The method is `sync`, which pushes and fetches the whole model in each step,
and a step takes a second: the most that a network can be asked for. Intervals and compressors
divide that: `diloco` with H = 50 by fifty.

"of the ideal" is the steps that they make, relative to workers that never wait. What saturates
first is seen in the largest window in which nothing is busy for 90 % of the time; the number of
workers is that at which it would be.
"""


def main() -> None:
    done: Json = json.loads(RESULTS.read_text())
    cells: dict[str, Json] = done["cells"]
    figures.set_style()
    lines = [
        HEAD, "| parameters | links | steps/s | of the ideal | saturates first | at workers | "
        "between halves | if foretold |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [_row(name, cell) for name, cell in cells.items()]
    lines += [
        "",
        "![steps of 1,000 workers, of the ideal](projection.svg)",
        "",
        "The last two columns are errors: half of the difference between the halves of the window, "
        "and the load of the busiest with 1,000 workers as foretold from 250, relative to what was "
        "simulated; -: it is saturated, and there is nothing to foretell.",
        "",
        "## Why",
        "",
        *_why(cells),
        "",
        "## How far to believe it",
        "",
        *_real(done.get("real")),
    ]
    _draw(cells)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(name: str, cell: Json) -> str:
    many = cell["many"]
    row = many["windows"][-1]
    first = _first(cell)
    error = "-" if many["error"] is None else f"{100 * many['error']:+.1f} %"
    size, _, link = name.rpartition(", ")
    saturates = "nothing | -" if first is None else f"{_what(first)} | {_count(first['workers'])}"
    return (
        f"| {size} | {_link(link)} | {row['steps_per_s']:.4g} | {100 * _share(many):.3g} % | "
        f"{saturates} | {100 * many['spread']:.2g} % | {error} |"
    )


def _share(data: Json) -> float:
    row = data["windows"][-1]
    return float(row["steps_per_s"] * data["step_s"] / row["workers"])


def _first(cell: Json) -> Json | None:
    """What saturates first, by the largest window in which nothing does."""
    many = cell["many"]
    is_free = any(not _is_full(row) for row in many["windows"])
    first: Json | None = (many if is_free else cell["few"])["saturates"]
    return first


def _is_full(row: Json) -> bool:
    shared = ("coordinator", "server", "link")
    return any(row["busy"].get(kind, {"share": 0.0})["share"] >= FULL for kind in shared)


def _what(first: Json) -> str:
    role = first["name"].partition("-")[0]
    return f"a {role}'s link" if first["kind"] == "link" else f"the {role}'s processor"


def _count(workers: float) -> str:
    return f"{workers:,.0f}" if workers >= 1.5 else "the first"


def _link(text: str) -> str:
    return text.replace("Gbit", " Gbit")


def _why(cells: dict[str, Json]) -> list[str]:
    lines = []
    for name, cell in cells.items():
        busy = cell["many"]["windows"][-1]["busy"]
        shares = ", ".join(f"{each['name']} {100 * each['share']:.3g} %" for each in busy.values())
        size, _, link = name.rpartition(", ")
        lines.append(f"- {size} on {_link(link)}: {shares}.")
    return [
        "The busiest of each kind, in the window with 1,000 workers:", "", *lines, "",
        "A server's link carries the parts of all workers: 1,000 times a sixteenth of the model, "
        "each way, in each step. More servers divide that, until each worker's own link, which "
        "carries all of the model, is what it waits for.",
    ]  # fmt: skip


def _real(rows: list[Json] | None) -> list[str]:
    if rows is None:
        return [
            "Not measured yet: `python -m benchmarks.projection --real` compares it with real runs "
            "of 2, 4 and 8 workers of a machine that does nothing else."
        ]
    lines = [
        "Real runs on one machine with two cores, and simulations that were calibrated on that "
        "with four workers:",
        "", "| workers | steps/s | foretold | error |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: float(row["workers"])):
        error = row["foretold"] / row["real"] - 1
        lines.append(
            f"| {row['workers']} | {row['real']:,.0f} | {row['foretold']:,.0f} | "
            f"{100 * error:+.1f} % |"
        )
    return lines


def _draw(cells: dict[str, Json]) -> None:
    figure = Figure(figsize=(8, 0.7 + 0.27 * len(cells)), layout="constrained")
    axes = figure.subplots()
    names = [f"{size}, {_link(link)}" for size, _, link in (n.rpartition(", ") for n in cells)]
    axes.barh(
        range(len(cells)), [100 * _share(cell["many"]) for cell in cells.values()], height=0.6
    )
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("steps of 1,000 workers, % of the ideal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="x")
    figures.save("projection", figure, HERE)


if __name__ == "__main__":
    main()
