"""`dlctl logs --failed`: of everybody who is not well the last words, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dlctl.cli import console, lives, logfiles, loglines, report, troubles
from dlctl.cli.lives import Lives
from dlctl.cli.logfiles import Line
from dlctl.cli.snapshot import ENDED, Snapshot
from dlctl.cli.troubles import Trouble
from dlctl.names import COORDINATOR

_EVALUATION = re.compile(r"worker-\d+: step \d+: ")
"""What the coordinator's log says of how good the model was."""


def show(
    snapshot: Snapshot,
    names: Sequence[str],
    limit: int | None,
    wanted: Callable[[Line], bool] | None,
    printer: loglines.Printer,
) -> None:
    """Print, for each of these daemons that is not well, the last lines of the life in question."""
    found = [trouble for trouble in _found(snapshot) if trouble.name in names]
    if not found:
        told = report.went_back(snapshot)
        state = report.became(snapshot.state) + (f"; it {told}" if told else "")
        console.note(f"no daemon is in trouble: {snapshot.run_id} {state}")
    known = lives.load(snapshot.directory)
    test = _but_evaluations(wanted)
    files = logfiles.list_files(snapshot.directory)
    for trouble in found:
        own = [f for f in files.get(trouble.name, []) if f.incarnation == trouble.incarnation]
        printer.show(logfiles.tail(own, limit, test))
        at, text = _end(snapshot, trouble, known)
        printer.mark(trouble.name, at, text)


def _but_evaluations(wanted: Callable[[Line], bool] | None) -> Callable[[Line], bool]:
    """The test without what the coordinator has said of how good the model was: so many lines are
    that, that they would be all there is to see.
    """

    def test(line: Line) -> bool:
        is_one = line.name == COORDINATOR and bool(_EVALUATION.match(line.text))
        return not is_one and (wanted is None or wanted(line))

    return test


def _found(snapshot: Snapshot) -> list[Trouble]:
    """Everybody who is not well. A run that failed without that: its coordinator says why."""
    found = troubles.found(snapshot)
    if found or snapshot.is_live or snapshot.state != "failed":
        return found
    number = troubles.incarnation(snapshot.coordinator)
    return [Trouble(COORDINATOR, "", "", None, number)]


def _end(snapshot: Snapshot, trouble: Trouble, known: Lives) -> tuple[float | None, str]:
    """(when, what): how this life ended, or what is wrong with it now."""
    end = known.ends.get((trouble.name, trouble.incarnation))
    if end is not None:
        return end.at, troubles.ended(end.how)
    row = snapshot.daemon(trouble.name)
    last = troubles.last_exit(row, trouble.incarnation)
    if last is not None:
        return last.get("at"), troubles.ended(report.exited(last))
    if trouble.what:
        return snapshot.now, f"{trouble.name} {trouble.what}"
    is_over = snapshot.state in ENDED
    why = f": {snapshot.reason}" if snapshot.reason else ""
    return snapshot.run.get("ended_at") if is_over else None, f"the run failed{why}"
