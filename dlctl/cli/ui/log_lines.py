"""Log lines on the terminal: daemon, time, level, text; and marks where a daemon restarted."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from dlctl.cli.ui import console, live
from dlctl.ops import next_step, problem_texts, problems
from dlctl.problems import RUN
from dlctl.runs import facts, logs
from dlctl.runs.logs import TEXT, Line
from dlctl.runs.snapshot import Snapshot
from dlctl.util import values
from dlctl.util.names import COORDINATOR

_PALETTE = (39, 75, 114, 141, 44, 176, 108, 147, 37, 180)
"""Colours of the daemons, of 256; without red and yellow, which stand for levels."""
_LEVELS = {"warning": "WARN", "critical": "ERROR"}
_LEVEL_COLORS = {"warning": "yellow", "error": "red", "critical": "red"}
DETAIL = "detail"
"""The field of a line that holds a traceback."""
_NO_TIME = " " * len("14:47:35.120")
Wanted = Callable[[Line], bool] | None
"""A filter for lines; None if all are wanted."""


class Printer:
    """Prints lines in one of three shapes and tracks the incarnation of each daemon."""

    def __init__(self, names: Collection[str], shape: str = "text") -> None:
        """names: the daemons to print. shape: "text", "raw" (no prefix) or "json"."""
        self.width = max(map(len, names), default=0)
        self.shape = shape
        self.incarnations: dict[str, int] = {}

    def show(self, lines: Iterable[Line], *, flush: bool = False) -> None:
        for line in lines:
            if self.shape == "text":
                # Else two incarnations of a daemon look like one.
                if self.incarnations.setdefault(line.name, line.incarnation) != line.incarnation:
                    self.incarnations[line.name] = line.incarnation
                    self.mark(line.name, line.at, f"incarnation {line.incarnation} starts")
                console.out(self.text(line))
            elif self.shape == "json":
                console.out_json("dlctl.log/1", as_data(line))
            else:
                console.out(console.escape(line.raw) if console.is_tty() else line.raw)
        if flush:
            console.flush()

    def text(self, line: Line) -> str:
        """One line, as in "worker-1 | 14:47:35.661 WARN  behind by 6 steps"."""
        prefix = self._prefix(line.name)
        if line.level == TEXT:
            return f"{prefix} {_NO_TIME} {TEXT:<5} {console.escape(line.text)}"
        level = _LEVELS.get(line.level, line.level.upper())
        colored = console.style(f"{level:<5}", fg=_LEVEL_COLORS.get(line.level))
        fields = [(key, value) for key, value in line.fields.items() if key != DETAIL]
        shown = [f"  {k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in fields]
        text = console.escape(line.text) + console.style("".join(shown), dim=True)
        first = f"{prefix} {values.clock(line.at, time.time())} {colored} {text}"
        detail = str(line.fields.get(DETAIL) or "").splitlines()
        rest = [f"{prefix} {_NO_TIME} {'':<5} {console.escape(text)}" for text in detail]
        return "\n".join([first, *rest])

    def _prefix(self, name: str) -> str:
        color = _PALETTE[zlib.crc32(name.encode()) % len(_PALETTE)]
        return console.style(f"{name:<{self.width}} |", fg=color)

    def mark(self, name: str, at: float | None, text: str) -> None:
        """A separator, in the "text" shape only: what happened to the daemon."""
        if self.shape == "text":
            when = values.clock(at, time.time()) if at is not None else _NO_TIME
            console.out(f"{self._prefix(name)} {when} ----  {console.escape(text)}")


def as_data(line: Line) -> dict[str, Any]:
    """One line for `--json`: its own fields, and its daemon."""
    own = {"name": line.name, "inc": line.incarnation, "msg": line.text}
    if line.level == TEXT:
        return own | {"stream": TEXT}
    return {**line.fields, **own, "ts": values.rfc3339(line.at), "level": line.level}


_EVALUATION = re.compile(r"(worker-\d+: )?step \d+: ")
"""An evaluation of the model in the coordinator's log."""


def show_failed(
    snapshot: Snapshot, names: Sequence[str], limit: int, wanted: Wanted, printer: Printer
) -> None:
    """Print, for each unhealthy one of these daemons, the last lines of the incarnation concerned,
    without evaluations: they would crowd out all else.
    """

    def test(line: Line) -> bool:
        is_evaluation = line.name == COORDINATOR and bool(_EVALUATION.match(line.text))
        return not is_evaluation and (wanted is None or wanted(line))

    # If a run failed without an unhealthy daemon, its own problems.
    ill = [p for p in problems.found(snapshot) if problem_texts.level(p) in ("error", "over")]
    ill = [p for p in ill if p.daemon != RUN] or ill
    # The coordinator's log has more about the run itself.
    found = [(COORDINATOR if p.daemon == RUN else p.daemon, p) for p in ill]
    found = [(name, problem) for name, problem in found if name in names]
    files = logs.list_files(snapshot.directory)
    for name, problem in found:
        number = problem.facts.get("incarnation", facts.incarnation(snapshot.daemon(name)))
        own = [file for file in files.get(name, []) if file.incarnation == number]
        printer.show(logs.tail(own, limit, test))
        if printer.shape == "json":
            data = problems.as_data(snapshot, problem)
            console.out_json("dlctl.problem/1", values.timed(data))
        printer.mark(name, problem.since, problem_texts.words(problem, snapshot.now))
    if not found:
        console.note(f"no daemon is in trouble: {snapshot.run_id} {facts.became(snapshot.state)}")
    elif (step := next_step.of(snapshot)) is not None:
        console.note(console.next_lines(step.text(), ""))


def follow_logs(
    snapshot: Snapshot, names: Sequence[str], limit: int, test: Wanted, printer: Printer
) -> None:
    """Print the last lines, then new ones, until the run has ended or Ctrl-C."""
    follower = logs.Follower(snapshot.directory, names)

    def show(lines: Iterable[Line]) -> None:
        printer.show(filter(test, lines), flush=True)

    new = chain([follower.past(limit, test)], iter(follower.poll, None))
    if live.follow(snapshot, lambda: show(next(new))):
        show(follower.rest())
