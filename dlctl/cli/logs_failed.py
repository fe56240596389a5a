"""`dlctl logs --failed`: of everybody who is not well the last words, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dlctl.cli import belonging, console, lives, logfiles, loglines, nextstep, report, troubles
from dlctl.cli.lives import Lives
from dlctl.cli.logfiles import Line, LogFile
from dlctl.cli.snapshot import ENDED, GONE, Snapshot
from dlctl.cli.trouble import Trouble, incarnation
from dlctl.errors import DlctlError
from dlctl.util.names import COORDINATOR

LAST_SIGN = "; the time is that of its last sign of life"
_EVALUATION = re.compile(r"worker-\d+: step \d+: ")
"""What the coordinator's log says of how good the model was."""


def show(
    snapshot: Snapshot,
    names: Sequence[str],
    limit: int | None,
    wanted: Callable[[Line], bool] | None,
    printer: loglines.Printer,
) -> None:
    """Print, for each of these daemons that is not well, the last lines of the life in question.

    Raises DlctlError behind them if the run's database is damaged: then that is what comes next.
    """
    if snapshot.original is not None:
        console.note("nobody knows from a copy who is in trouble")
        console.note(console.next_lines(belonging.where_to_look(snapshot.original), "  "))
        return
    found = [trouble for trouble in _found(snapshot) if trouble.name in names]
    damage = None if snapshot.is_live else _damage(snapshot)
    if not found and damage is None:
        told = report.went_back(snapshot)
        state = report.became(snapshot.state) + (f"; it {told}" if told else "")
        console.note(f"no daemon is in trouble: {snapshot.run_id} {state}")
    known = lives.load(snapshot.directory)
    test = _but_evaluations(wanted)
    files = logfiles.list_files(snapshot.directory)
    for trouble in found:
        own = [f for f in files.get(trouble.name, []) if f.incarnation == trouble.incarnation]
        printer.show(logfiles.tail(own, limit, test))
        at, text = _end(snapshot, trouble, known, logfiles.tail(own, 1))
        printer.mark(trouble.name, at, text)
    if damage is not None:
        raise damage
    if found and (step := nextstep.of(snapshot)) is not None:
        console.note(console.next_lines(step.text(), ""))


def _damage(snapshot: Snapshot) -> DlctlError | None:
    try:
        belonging.check_database(snapshot.directory, read_all=False)
    except DlctlError as error:
        return error
    return None


def mark_ends(
    snapshot: Snapshot, files: Sequence[LogFile], names: Sequence[str], printer: loglines.Printer
) -> None:
    """Below the lives before the present ones: how each of them ended, in the order of that."""
    known, ends = lives.load(snapshot.directory), []
    for name in names:
        own = [file for file in files if file.name == name]
        if own and (
            end := _ended(snapshot, name, own[-1].incarnation, known, logfiles.tail(own, 1))
        ):
            ends.append((end[0], name, end[1]))
    for at, name, text in sorted(ends, key=lambda end: end[0] or 0.0):
        printer.mark(name, at, text)


def _ended(
    snapshot: Snapshot, name: str, number: int, known: Lives, last_line: Sequence[Line]
) -> tuple[float | None, str] | None:
    """(when, how) the process of this incarnation has ended; None if it may be there."""
    if (found := _on_record(snapshot, name, number, known)) is not None:
        return found
    if snapshot.original is not None:
        return None
    how = known.takeover if name == COORDINATOR and known.takeover else "ended: nobody has seen how"
    if number >= incarnation(snapshot.daemon(name)):
        if snapshot.is_live:
            return None
        why = f": {snapshot.reason}" if snapshot.reason else ""
        how = f"the run {report.became(snapshot.state)}{why}"
        if not snapshot.is_gone:
            return snapshot.run.get("ended_at"), how
    return (last_line[-1].at if last_line else None), f"{how}{LAST_SIGN}"


def _on_record(
    snapshot: Snapshot, name: str, number: int, known: Lives
) -> tuple[float | None, str] | None:
    if (end := known.ends.get((name, number))) is not None:
        return end.at, troubles.ended(end.how)
    last = troubles.last_exit(snapshot.daemon(name), number)
    return None if last is None else (last.get("at"), troubles.ended(report.exited(last)))


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
    number = incarnation(snapshot.coordinator)
    return [Trouble(COORDINATOR, "", "", None, number)]


def _end(
    snapshot: Snapshot, trouble: Trouble, known: Lives, last_line: Sequence[Line]
) -> tuple[float | None, str]:
    """(when, what): how this life ended, or what is wrong with it now."""
    end = _on_record(snapshot, trouble.name, trouble.incarnation, known)
    if end is not None:
        return end
    if trouble.what and snapshot.daemon(trouble.name).get("state") == GONE:
        # When it ended nobody has seen: the time of this command would be another one each time.
        signs = [trouble.at, *(line.at for line in last_line)]
        at = max((sign for sign in signs if sign is not None), default=None)
        return at, f"{trouble.name} {trouble.what}{LAST_SIGN if at is not None else ''}"
    if trouble.what:
        at = snapshot.now if trouble.at is None else trouble.at
        return at, f"{trouble.name} {trouble.what}"
    is_over = snapshot.state in ENDED
    why = f": {snapshot.reason}" if snapshot.reason else ""
    return snapshot.run.get("ended_at") if is_over else None, f"the run failed{why}"
