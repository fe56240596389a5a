"""What is wrong with the coordinator of a run, and what becomes of the others without it."""

from __future__ import annotations

from collections.abc import Iterator

from dlctl.cli import belonging, lives, logfiles, nextstep, report, values
from dlctl.cli.snapshot import GONE, READY, SILENT, Snapshot, is_here
from dlctl.cli.trouble import RECENT_S, Trouble, incarnation, replaced
from dlctl.control import unresponsive
from dlctl.runs import paths
from dlctl.util import hints, processes
from dlctl.util.names import COORDINATOR

NEEDED = ("server", "worker")
"""Roles without any process of which nobody trains."""


def of(snapshot: Snapshot) -> Iterator[Trouble]:
    """It is silent, gone, cannot write, or has just taken the place of another one."""
    row, job = snapshot.coordinator, f"-j {snapshot.run_id}"
    number, heard_at = incarnation(row), values.number(row.get("updated_at"))
    if row["state"] == SILENT:
        silent = values.duration(snapshot.silent_s)
        text = f"has not answered for {silent} (pid {snapshot.coordinator_pid})"
        if unresponsive.has_agent(snapshot.daemons):
            text += f"; {replaced(snapshot, paths.STILL_LIMITS)}"
        yield Trouble(COORDINATOR, text, nextstep.command(snapshot), heard_at, number)
    elif snapshot.unwritten_s is not None:
        yield _unwritten(snapshot, heard_at, number)
    elif row["state"] == GONE and belonging.has_unknown_coordinator(snapshot):
        yield _unrecorded(snapshot, heard_at, number)
    elif row["state"] == GONE or (row["state"] == "starting" and _ends_at_once(snapshot, heard_at)):
        yield _absent(snapshot, heard_at, number)
    elif row["state"] == "starting" and snapshot.run.get("updated_by") is not None:
        text = "has died or was restarted; the next one starts and goes on where it was"
        more = f"dlctl logs {COORDINATOR} --previous {job}"
        yield Trouble(COORDINATOR, text, more, heard_at, number - 1, is_grave=False)
    elif snapshot.is_live and number > 1:
        known = lives.load(snapshot.directory)
        at = known.taken_over_at
        if at is not None and snapshot.now - at < RECENT_S:
            ago = values.ago(at, snapshot.now)
            text = f"{known.takeover} {ago}"
            if known.takeover == lives.DIED:  # When, nobody has seen.
                text = f"{known.takeover}; the new one has taken over {ago}"
            text += f"; {known.forgotten}" if known.forgotten else ""
            more = f"dlctl logs {COORDINATOR} --previous {job}"
            yield Trouble(COORDINATOR, text, more, at, number - 1, is_over=True, is_grave=False)


def _absent(snapshot: Snapshot, heard_at: float | None, number: int) -> Trouble:
    """Of a coordinator that is gone, and whether there will be another one."""
    unseen_s, job = _unseen_s(snapshot, heard_at), f"-j {snapshot.run_id}"
    gone = "is gone" if unseen_s is None else f"has been gone for {values.duration(unseen_s)}"
    why, mend = _disk(snapshot) if snapshot.is_live else ("", "")
    failed = _ends_at_once(snapshot, heard_at) if snapshot.is_live else ""
    text = gone if failed else f"{gone} (pid {snapshot.run.get('pid')})"
    if why:
        text += f"; its agent may not be able to start another one: {why}"
        step = f"{mend}, then\ndlctl recover {job}"
    elif failed:
        text += f"; its agent starts another one again and again, which ends at once: {failed}"
        logs = f"dlctl logs {COORDINATOR} -l error {job}"
        step = hints.told(logs, "says more; as soon as that is mended the next one goes on")
    elif snapshot.is_live:
        text += "; its agent starts another one"
        step = hints.told(f"dlctl recover {job}", "if that does not end")
    else:
        text += f", and nobody starts it again{_stopped_agents(snapshot)}"
        step = nextstep.command(snapshot)
    return Trouble(COORDINATOR, text, step, heard_at, number)


def _ends_at_once(snapshot: Snapshot, heard_at: float | None) -> str:
    """What the coordinators have ended with that were started since one was heard last."""
    return logfiles.ends_at_once(snapshot.directory, COORDINATOR, heard_at)


def _stopped_agents(snapshot: Snapshot) -> str:
    """Whoever could do it, and is stopped himself, as by SIGSTOP."""
    agents = [row for row in snapshot.daemons if row.get("role") == "agent" and is_here(row)]
    stopped = processes.stopped(agents)
    return "".join(f": {row['name']} is stopped (pid {row['pid']})" for row in stopped)


def _unseen_s(snapshot: Snapshot, heard_at: float | None) -> float | None:
    """For how long there has been no sign of a coordinator that is gone; None if there never was.

    It goes on to touch its lock when it cannot write. Where not even that is possible the age of
    the lock is 0 (`paths.beat_age_s`), which is no sign.
    """
    beat_age_s = paths.beat_age_s(snapshot.directory, snapshot.now)
    written_s = None if heard_at is None else snapshot.now - heard_at
    signs = [age_s for age_s in (beat_age_s, written_s) if age_s]
    return min(signs, default=None)


def _unrecorded(snapshot: Snapshot, heard_at: float | None, number: int) -> Trouble:
    """Of a coordinator that has taken the place of the one on record, and is not there yet."""
    why, mend = _disk(snapshot)
    text = "has died or was restarted; the next one is there"
    if not why:
        command = f"dlctl logs {COORDINATOR} -j {snapshot.run_id}"
        return Trouble(COORDINATOR, f"{text}, and says nothing yet", command, heard_at, number)
    text += f", and cannot write that: {why}{_old_news(snapshot, heard_at)}"
    return Trouble(COORDINATOR, text, mend, heard_at, number)


def _unwritten(snapshot: Snapshot, heard_at: float | None, number: int) -> Trouble:
    """Of a coordinator that works and whose words do not reach the disk."""
    why, mend = _disk(snapshot)
    text = f"cannot write the run's database{f': {why}' if why else ''}"
    text += _old_news(snapshot, heard_at)
    logs = f"dlctl logs {COORDINATOR} -l warning -j {snapshot.run_id}"
    return Trouble(COORDINATOR, text, mend or logs, heard_at, number)


def _old_news(snapshot: Snapshot, heard_at: float | None) -> str:
    """Of when the newest word on the disk is, and what goes on nevertheless."""
    if heard_at is None:
        return _training(snapshot)
    age, when = values.duration(snapshot.now - heard_at), values.clock(heard_at, snapshot.now)
    return f"; what is shown is {age} old ({when}){_training(snapshot)}"


def _disk(snapshot: Snapshot) -> tuple[str, str]:
    """(why nothing can be written in the run directory, what to do about it); "" if that can be."""
    if full := report.full_disk(snapshot):
        return full, report.make_room(snapshot)
    dead = report.dead_disk(snapshot)
    return dead, report.mend_disk(snapshot) if dead else ""


def _training(snapshot: Snapshot) -> str:
    """Whether it goes on. Whoever died since then has no next process at work before that can be
    put on record; nobody can do without a server, nor all without any worker.
    """
    if snapshot.state not in READY:
        return ""
    rows = {role: [r for r in snapshot.daemons if r.get("role") == role] for role in NEEDED}
    gone = {role: [str(r["name"]) for r in rows[role] if r.get("state") == GONE] for role in NEEDED}
    workers = gone["worker"] if len(gone["worker"]) == len(rows["worker"]) else []
    if missing := " and ".join([*gone["server"], *workers]):
        return f"; training waits for {missing}, whose next process begins when this is written"
    if others := " and ".join(gone["worker"]):
        text = f"; training goes on without {others}, whose next process"
        return f"{text} joins when this can be written"
    return "; training goes on"
