"""`dlctl plot`: lines of several runs in one picture, to compare methods by their cost."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlctl.errors import DlctlError, UsageError
from dlctl.observe.history import AXES, History
from dlctl.util import extras, outfile
from dlctl.util.did_you_mean import did_you_mean

LABELS = {
    "seconds": "seconds at work",
    "steps": "steps of all workers",
    "samples": "samples of all workers",
    "epochs": "epochs",
    "bytes": "bytes pushed and fetched",
}
EVALUATION = "evaluation."
Curve = tuple[list[float], list[float]]


def curve(history: History, what: str, axis: str) -> Curve:
    """x and y of one line or metric of an evaluation. Raises UsageError if the run has no such one.

    "evaluation.loss" is that of evaluations, where "loss" is the training's. Against steps, samples
    and epochs without what the run has gone back behind.
    """
    lines, is_cost = history.lines(), axis in ("seconds", "bytes")
    if what in lines:
        points = zip(history.points, lines[what], history.counting(), strict=True)
        drawn = [
            (point.on(axis), y)
            for point, y, counts in points
            if y is not None and (counts or is_cost)
        ]
    else:
        metric = what.removeprefix(EVALUATION)
        drawn = [
            (history.of_evaluation(found, axis), found.metrics[metric])
            for found, counts in zip(
                history.evaluations, history.counting_evaluations(), strict=True
            )
            if metric in found.metrics and (counts or is_cost)
        ]
    if not drawn:
        evaluated = dict.fromkeys(n for found in history.evaluations for n in found.metrics)
        known = [*lines, *(EVALUATION + name if name in lines else name for name in evaluated)]
        raise UsageError(f'{history.run_id} has no "{what:.80}"; {did_you_mean(what, known)}')
    xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
    if axis == "bytes" and max(xs) == 0:
        raise UsageError(
            f"{history.run_id} has counted no bytes: {history.method} sums over a group, which "
            "torch.distributed communicates on its own",
            hint="--x samples, or --x seconds",
        )
    return xs, ys


def draw(histories: Sequence[History], what: str, axis: str, file: Path, *, log: bool) -> None:
    """Write a picture; the suffix of `file` is its format, or png without one. Raises DlctlError or
    UsageError.
    """
    outfile.check(file)
    assert axis in AXES, axis
    curves = [curve(history, what, axis) for history in histories]
    extras.require("plot", "dlctl plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for label, (xs, ys) in zip(_labels(histories), curves, strict=True):
        axes.plot(xs, ys, label=label, linewidth=1.4, marker="." if len(xs) < 30 else "")
    axes.set_xlabel(LABELS[axis])
    axes.set_ylabel(what.replace("_per_s", " per second").replace("_", " "), parse_math=False)
    axes.set_yscale("log" if log else "linear")
    axes.grid(visible=True, alpha=0.3)
    if axis == "bytes" or what.endswith("bytes_per_s"):
        from matplotlib.ticker import EngFormatter

        of = axes.xaxis if axis == "bytes" else axes.yaxis
        of.set_major_formatter(EngFormatter(unit="B"))
    axes.legend()
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=file.suffix[1:] or "png")
    except ValueError as error:
        raise DlctlError(f"cannot draw the picture: {error}", where=str(file)) from error
    outfile.write(file, content.getvalue())


def _labels(histories: Sequence[History]) -> Iterator[str]:
    """Labels by method, as methods are compared; with the run where methods or runs are equal."""
    methods = [history.method for history in histories]
    for history in histories:
        is_alone = methods.count(history.method) == 1 and len(histories) > 1
        yield history.method if is_alone else f"{history.method} ({history.run_id})"
