"""Writes projection.md and its figure from benchmarks/results/projection.json:
`python -m benchmarks.projection`, or `python docs/projection.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import figures
from matplotlib.figure import Figure

from dlctl.study import saturation
from dlctl.util import units

Json = dict[str, Any]
HERE = Path(__file__).parent
PAGE = HERE / "projection.md"
RESULTS = HERE.parent / "benchmarks" / "results" / "projection.json"
MANY, CELLS = 1000, 18
HEAD = """<!-- Written by `python -m benchmarks.projection` from benchmarks/results. -->

# A thousand workers

Nobody here has a thousand machines. `dlctl simulate --protocol` runs all roles of such a run
without gradients, in virtual time: every message of the workers and of 16 servers, each on a
machine with two cores and a link of its own. A step takes a second. There are two patterns of
traffic:

- `sync` pushes and fetches the whole model in each step: the most that a network can be asked for.
- `downpour` with top-k pushes 1 % of the elements in every fifth step, and fetches the whole model
  then.

Longer intervals divide that: `diloco` with H = 50 has a fiftieth of the traffic of `sync`.

"at workers" is how many of them would keep busy for 90 % of the time what saturates first, if each
loaded it as in the largest window in which nothing is saturated; -: there is none. Where they wait
for something, each loads everything less, so a barrier may be slow before that. "by hand" is the
same for the links of the servers alone: 90 % of their rate, divided by what a worker would send or
get in each second if it shared them with nobody. "of the ideal" is the steps of 1,000 workers,
relative to workers that never wait.
Where fewer were simulated, it is foretold: a step takes longer with each further worker as it did
between the two largest windows, and all together make no more of them than what saturates bears.
Where a window was cut before each of its halves had a step it is what the servers' links bear by
hand, at most; "no step" or "unknown" say that of the largest one, so what was busy in it is that of
a part of a round.
"""
BY_LINK = """A server's link carries the parts of all workers: for each of them a sixteenth of the
model, one way for the fetches and the other way for the pushes. More servers divide that, until
each worker's own link, which carries all of the model, is what it waits for: the last column says
how much of the time the busiest of these was busy. With `sync` all fetch at once, and then all
push, so a link that is full one way is idle the other way, and in whole rounds neither is busy all
of the time; as everybody waits for the slowest one, more workers fit than by hand. Where links are
fast it is the coordinator and the servers' processors that are busy."""
ERRORS = """"between halves" is half of the difference between the halves of the largest window,
relative to their mean; that window had from {fewest} to {most} rounds. "if foretold" is the load of
the busiest in the largest window as foretold from a fourth of its workers, relative to what was
simulated; -: one of them is saturated or was cut, and there is nothing to foretell."""
_WHAT = {
    "coordinator": "the coordinator",
    "server": "a server's processor",
    "link": "a server's link",
}


def main() -> None:
    done: Json = json.loads(RESULTS.read_text())
    cells = sorted(done["cells"].values(), key=_place)
    rounds = [_rounds(cell) for cell in cells]
    figures.set_style()
    lines = [HEAD, *_errors(cells)]
    methods = sorted({cell["method"] for cell in cells}, reverse=True)
    for method in methods:
        lines += _section(method, [cell for cell in cells if cell["method"] == method])
    lines += [
        "![steps of 1,000 workers, of the ideal](projection.svg)",
        "",
        "## How far to believe it",
        "",
        ERRORS.format(fewest=_digits(min(rounds)), most=_digits(max(rounds))),
        "",
        *_real(done.get("real")),
    ]  # fmt: skip
    _draw(cells, methods)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _errors(cells: list[Json]) -> list[str]:
    """Of what is foretold, where a thousand were simulated as well."""
    found = []
    for cell in cells:
        *smaller, row = cell["said"]["windows"]
        if row["workers"] >= MANY and len(smaller) > 1:
            told = foretold(smaller, cell["said"]["saturates"])
            found.append(
                f"{cell['method']}, {_begin(cell).replace(' | ', ', ')}: {told:.3g} are foretold "
                f"from {smaller[-1]['workers']}, and {row['steps_per_s']:.3g} were simulated, an "
                f"error of {100 * (told / row['steps_per_s'] - 1):+.0f} %."
            )
    missing = CELLS - len(cells)
    more = [f"{missing} of {CELLS} cells were not simulated yet, and are left out.", ""]
    lines = ["Where 1,000 were simulated as well:", "", *(f"- {each}" for each in found), ""]
    return [*(lines if found else []), *(more if missing else [])]


def _place(cell: Json) -> tuple[str, int, float]:
    return cell["method"], cell["said"]["parameters"], cell["said"]["link"]["bytes_per_s"]


def _section(method: str, cells: list[Json]) -> list[str]:
    return [
        f"## {method}", "",
        "| parameters | links | saturates first | at workers | by hand | steps/s of 1,000 | "
        "of the ideal | simulated workers | between halves | if foretold |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, cells),
        "",
        "The busiest of each kind, in the largest window:", "",
        "| parameters | links | coordinator | a server's processor | a server's link | "
        "a worker's processor | a worker's link |",
        "|---|---|---|---|---|---|---|",
        *map(_busy, cells),
        *(["", BY_LINK] if method == "sync" else []),
        "",
    ]  # fmt: skip


def _row(cell: Json) -> str:
    said = cell["said"]
    row, first = said["windows"][-1], said["saturates"]
    error = "-" if said["error"] is None else f"{100 * said['error']:+.1f} %"
    saturates = "nothing | -"
    if first is not None:
        is_known = bool(saturation.free(said["windows"]))
        saturates = f"{_what(first)} | {_count(first['workers']) if is_known else '-'}"
    spread = "no step" if not row["steps_per_s"] else "unknown"
    if said["spread"] is not None and row["steps_per_s"]:
        spread = f"{_digits(100 * said['spread'])} %"
    return (
        f"| {_begin(cell)} | {saturates} | {_count(by_hand(cell))} | {_digits(steps(cell))} | "
        f"{_digits(100 * share(cell))} % | {row['workers']:,} | {spread} | {error} |"
    )


def _rounds(cell: Json) -> float:
    """Of each worker, in the largest window."""
    row = cell["said"]["windows"][-1]
    return float(row["steps_per_s"] * row["seconds"] / row["workers"] / cell["traffic"]["steps"])


def _begin(cell: Json) -> str:
    return f"{cell['size']} | {cell['link'].replace('Gbit', ' Gbit')}"


def _busy(cell: Json) -> str:
    row = cell["said"]["windows"][-1]
    kinds = ("coordinator", "server", "link", "worker", "own_link")
    shares = (row["busy"].get(kind, {"share": 0.0})["share"] for kind in kinds)
    # One that was cut before all workers had begun has simulated nothing.
    shown = [f"{_digits(100 * share)} %" if row["seconds"] else "-" for share in shares]
    return f"| {_begin(cell)} | {' | '.join(shown)} |"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def steps(cell: Json) -> float:
    """Of 1,000 workers, per second."""
    said = cell["said"]
    row, first = said["windows"][-1], said["saturates"]
    if row["workers"] >= MANY:
        return float(row["steps_per_s"])
    if not all(map(saturation.tells, said["windows"])):
        of = cell["traffic"]
        each_bytes = said["parameters"] * max(of["push_bytes"], of["fetch_bytes"]) / of["steps"]
        return float(of["servers"] * said["link"]["bytes_per_s"] / each_bytes)
    return foretold(said["windows"], first)


def foretold(windows: list[Json], first: Json | None) -> float:
    """Steps per second of 1,000 workers, from windows with fewer."""
    (m, fast_s), (n, slow_s) = (
        (row["workers"], row["workers"] / max(1e-9, row["steps_per_s"])) for row in windows[-2:]
    )
    step_s = slow_s + max(0.0, (slow_s - fast_s) / (n - m)) * (MANY - n)
    if first is not None:
        usual = saturation.free(windows) or windows[:1]
        most = first["workers"] / saturation.FULL / usual[-1]["workers"] * usual[-1]["steps_per_s"]
        step_s = max(step_s, MANY / max(1e-9, most))
    return float(MANY / step_s)


def share(cell: Json) -> float:
    """The steps, of those that workers would make that never wait."""
    return steps(cell) * float(cell["said"]["step_s"]) / MANY


def by_hand(cell: Json) -> float:
    """As many workers saturate the servers' links."""
    of, parameters = cell["traffic"], cell["said"]["parameters"]
    rate = cell["said"]["link"]["bytes_per_s"]
    push_s, fetch_s = (parameters * of[f"{what}_bytes"] / rate for what in ("push", "fetch"))
    alone_s = of["steps"] * cell["said"]["step_s"] + push_s + fetch_s
    return float(saturation.FULL * alone_s * of["servers"] / max(push_s, fetch_s))


def _what(first: Json) -> str:
    return _WHAT[first["kind"]]


def _count(workers: float) -> str:
    rounded = float(f"{workers:.2g}")
    return f"{rounded:,.0f}" if workers >= 1.5 else "the first"


def _real(rows: list[Json] | None) -> list[str]:
    if rows is None:
        return [
            "Not measured yet: `python -m benchmarks.projection --real` compares it with real runs "
            "of 2, 4 and 8 workers of a machine that does nothing else."
        ]
    lines = [
        "Real runs of the digits example with `downpour` and one server on one machine with two "
        "cores, where a step sleeps 20 ms in place of a GPU, and what `--protocol --like` the run "
        "with four workers foretells for each. -: workers waited for cores, so that the error "
        "cannot be judged.",
        "", "| workers | steps/s | foretold | error |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: float(row["workers"])):
        error = f"{100 * (row['foretold'] / row['real'] - 1):+.1f} %" if row["judged"] else "-"
        lines.append(
            f"| {row['workers']} | {row['real']:,.0f} | {row['foretold']:,.0f} | {error} |"
        )
    return lines


def _draw(cells: list[Json], methods: list[str]) -> None:
    figure = Figure(figsize=(8, 0.9 + 0.27 * len(cells)), layout="constrained")
    axes = figure.subplots(len(methods), squeeze=False)
    for (each,), method in zip(axes, methods, strict=True):
        rows = [cell for cell in cells if cell["method"] == method]
        names = [
            f"{cell['size']}, {units.short_rate(cell['said']['link']['bytes_per_s'])}"
            for cell in rows
        ]
        each.barh(range(len(rows)), [100 * share(cell) for cell in rows], height=0.6)
        each.set_yticks(range(len(rows)), names)
        each.invert_yaxis()
        each.set_xlim(0, 100)
        each.set_title(method, loc="left")
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, axis="x")
    axes[-1][0].set_xlabel("steps of 1,000 workers, % of the ideal")
    figures.save("projection", figure, HERE)


if __name__ == "__main__":
    main()
