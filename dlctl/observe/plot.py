"""`dlctl plot`: lines of several runs in one picture, to compare methods by their cost."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dlctl.errors import DlctlError, UsageError
from dlctl.observe.history import AXES, RunHistory
from dlctl.util import extras, outfile
from dlctl.util.did_you_mean import did_you_mean
from dlctl.util.text import escape

LABELS = {
    "seconds": "seconds at work",
    "steps": "steps of all workers",
    "samples": "samples of all workers",
    "epochs": "epochs",
    "bytes": "bytes pushed and fetched",
}
TASK, EVALUATION, METHOD = "task.", "evaluation.", "method."
_PREFIXES = (TASK, EVALUATION, METHOD)
"""Prefixes of the curves whose names a task or a method has chosen."""
Curve = tuple[list[float], list[float]]


def curve(history: RunHistory, what: str, axis: str) -> Curve:
    """x and y of one line. Raises UsageError if the run has no such one.

    "loss" is that of the training, "task.loss" a further metric of the task's loss, and
    "evaluation.loss" one of its evaluate. A prefix may be omitted if no line before it in this
    order has the name. Against steps, samples and epochs without what the run has gone back behind.
    """
    named, is_cost = _named(history, axis), axis in ("seconds", "bytes")
    found = named.get(_whole(what, named), ())
    drawn = [(x, y) for x, y, counts in found if y is not None and (counts or is_cost)]
    if not drawn:
        short = {name: name.partition(".")[2] for name in named}
        known = [short[name] if _whole(short[name], named) == name else name for name in named]
        raise UsageError(f'{history.run_id} has no "{what:.80}"; {did_you_mean(what, known)}')
    xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
    if axis == "bytes" and max(xs) == 0:
        raise UsageError(
            f"{history.run_id} has counted no bytes: {history.method} sums over a group, which "
            "torch.distributed communicates on its own",
            hint="--x samples, or --x seconds",
        )
    return xs, ys


def _whole(what: str, names: Collection[str]) -> str:
    """The name with its prefix, if that is missing."""
    return next((name for p in ("", *_PREFIXES) if (name := p + what) in names), what)


def _named(history: RunHistory, axis: str) -> dict[str, list[tuple[float, float | None, bool]]]:
    """Whole name -> (x, y, whether it counts in the end) of each line of a run."""
    points, evaluations = history.points, history.evaluations
    trained = [point.on(axis) for point in points], history.counting()
    evaluated = (
        [history.of_evaluation(found, axis) for found in evaluations],
        history.counting_evaluations(),
    )
    return {
        prefix + name: [*zip(xs, line, counting, strict=True)]
        for prefix, lines, (xs, counting) in (
            ("", history.lines(), trained),
            (TASK, history.task_lines(), trained),
            (EVALUATION, history.evaluation_lines(), evaluated),
            (METHOD, history.method_lines(), evaluated),
        )
        for name, line in lines.items()
    }


def draw(histories: Sequence[RunHistory], what: str, axis: str, file: Path, *, log: bool) -> None:
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
    is_ours = all(what in history.lines() for history in histories)
    label = what.replace("_per_s", " per second").replace("_", " ") if is_ours else escape(what)
    axes.set_ylabel(label, parse_math=False)
    axes.set_yscale("log" if log else "linear")
    axes.grid(visible=True, alpha=0.3)
    if axis == "bytes" or (is_ours and what.endswith("bytes_per_s")):
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


def _labels(histories: Sequence[RunHistory]) -> Iterator[str]:
    """Labels by method, as methods are compared; with the run where methods or runs are equal."""
    methods = [history.method for history in histories]
    for history in histories:
        is_alone = methods.count(history.method) == 1 and len(histories) > 1
        yield history.method if is_alone else f"{history.method} ({history.run_id})"
