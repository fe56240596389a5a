"""Who is not well in a run, and what that means: for `status`, `why` and `logs --failed` alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dlctl.control import unresponsive
from dlctl.ops import codes, disk, next_step
from dlctl.runs import facts, lock, logs, paths, takeovers
from dlctl.runs.snapshot import (
    GONE,
    READY,
    SILENT,
    STALE_AFTER_S,
    WITHOUT_PROCESS,
    Snapshot,
    is_here,
)
from dlctl.util import hints, processes, values
from dlctl.util.names import COORDINATOR, NO_ROOM
from dlctl.util.text import ALIKE_LIFE_S, KILLED, NOT_FINITE, REFUSED

RECENT_S = 60.0
"""A daemon that has taken another one's place is told of for so long."""
Row = Mapping[str, Any]


class Problem(NamedTuple):
    code: codes.Name
    """See `dlctl.ops.codes`."""
    daemon: str
    text: str
    """The rest of a sentence that begins with the daemon's name; plain text."""
    fix: str
    """The command that helps, or tells more; "" if there is nothing to do."""
    since: float | None
    """Seconds since 1970; None if nobody knows."""
    incarnation: int
    """Of the process in whose log there may be more of it."""
    is_over: bool = False
    """Its next process is at work."""
    is_grave: bool = True


def replaced(snapshot: Snapshot, limits: int = 1) -> str:
    return unresponsive.replaced(limits * unresponsive.limit_s(snapshot.directory))


QUIET_S = 2.5
"""Daemons report once a second: one of which nothing is heard for longer is worth a word."""
STUCK_REPORT_S = 1.5
"""One that is slow and does not say why is slow because nothing is heard of it for so long."""
FOUND_GONE = "gone"
"""How an end begins that nobody has seen (see `describe_exit`)."""


def found(snapshot: Snapshot) -> list[Problem]:
    """Everybody who is not well, or has not been a moment ago; the coordinator first.

    As long as the coordinator cannot write, nobody knows that of the others; nor of anybody from a
    copy.
    """
    if snapshot.original is not None:
        return []
    troubles = [*of_coordinator(snapshot)]
    if snapshot.unwritten_s is not None:
        return troubles
    for row in snapshot.daemons:
        troubles += _daemon(snapshot, row)
    return troubles


def last_exit(row: Row, number: int) -> Row | None:
    """How the process of this incarnation has ended, as its daemon's row says; None if it says that
    of another one only, as that of a daemon which lives.
    """
    last = row.get("last_exit")
    is_over = row.get("state") in WITHOUT_PROCESS or number < facts.incarnation(row)
    return last if isinstance(last, Mapping) and is_over else None


def ended(how: str) -> str:
    """As in "ended: exit 1"; of one that was gone when somebody looked, that is when it was."""
    return f"was found {how}" if how.startswith(FOUND_GONE) else f"ended: {how}"


def died(last: Row, now: float) -> str:
    """How the process before the present one ended, as in "was killed by SIGKILL 0.5s ago"."""
    how, colon, why = facts.exited(last), "", ""
    if how.startswith(FOUND_GONE):
        return f"was found gone {values.ago(last.get('at'), now)}{how.removeprefix(FOUND_GONE)}"
    if "(" not in how:
        how, colon, why = how.partition(": ")
    when = values.ago(last.get("at"), now)
    when = "" if when == values.NOTHING else f" {when}"
    if how.startswith(("killed", "replaced", "restarted", "stopped")):
        return f"was {how}{when}{colon}{why}"
    if how.startswith("exit "):
        return f"ended with {how}{when}{colon}{why}"
    return f"ended{when}: {how}{colon}{why}"


def _died(last: Any, now: float) -> str:
    """The same of one that has been replaced since or waits for that, and whose doing it was."""
    return f"{died(last, now)}{next_step.blame(last)}" if isinstance(last, Mapping) else "has ended"


# ---------------------------------------------------------------- daemons


def _daemon(snapshot: Snapshot, row: Row) -> Iterator[Problem]:
    state, name, number = row.get("state"), str(row["name"]), facts.incarnation(row)
    job = f"-j {snapshot.run_id}"
    last = row.get("last_exit")
    at = values.number(last.get("at")) if isinstance(last, Mapping) else None
    heard_at = values.number(row.get("updated_at"))
    logs = f"dlctl logs {name} {job}"
    given_up_at = _given_up_at(snapshot, row)
    if given_up_at is not None and row.get("role") == "agent" and state != "failed":
        yield _host_away(snapshot, row, given_up_at)
    elif given_up_at is not None and state == "slow":
        silent_s = 0.0 if heard_at is None else snapshot.now - heard_at
        text = f"has not answered for {values.duration(silent_s)}, nor has its host"
        yield Problem("daemon-unreachable", name, text, "", heard_at, number)
    elif state == "quarantined":
        again = f"{_mend_first(row)}dlctl restart {name} {job}"
        back = again if snapshot.is_live else next_step.command(snapshot)
        back = next_step.step_of_ended(snapshot, row) or back
        yield Problem("daemon-quarantined", name, _quarantined(snapshot, row), back, at, number)
    elif state == GONE:
        yield Problem("process-gone", name, _gone(snapshot, row), "", heard_at, number)
    elif state == "failed":
        if snapshot.reason != KILLED:  # That was asked for.
            yield Problem("daemon-failed", name, _died(last, snapshot.now), logs, at, number)
    elif state == "backoff":
        helps = next_step.step_of_ended(snapshot, row) or logs
        yield Problem("daemon-restarting", name, _waiting(snapshot, row), helps, at, number)
    elif not snapshot.is_live:
        return
    elif state == "slow" or _is_quiet(snapshot, row):
        helps = next_step.step_of_stuck(snapshot, row) if state == "slow" else ""
        text = _slow(snapshot, row)
        code: codes.Name = "worker-stuck" if next_step.is_stuck(row) else "heartbeat-late"
        yield Problem(code, name, text, helps, heard_at, number, is_grave=state == "slow")
    elif state == "starting" and (isinstance(last, Mapping) or row.get("phase") == NO_ROOM):
        # A coordinator that came after it does not know how the one before ended.
        text = f"{_died(last, snapshot.now)}; a new one starts" if last else "starts"
        text += f"{_phase(row)}{_meanwhile(snapshot, row)}"
        helps = next_step.step_of_ended(snapshot, row) or _to_start(row, job)
        yield Problem("daemon-restarting", name, text, helps, at, number - 1)
    elif isinstance(last, Mapping) and at and snapshot.now - at < _told_for_s(last):
        text = f"{_died(last, snapshot.now)}; the new one is at work"
        helps = next_step.step_of_ended(snapshot, row) or f"dlctl logs {name} --previous {job}"
        over = not _comes_again(last)
        code = "daemon-restarted"
        yield Problem(code, name, text, helps, at, number - 1, is_over=over, is_grave=not over)


def _comes_again(last: Row) -> bool:
    """Whether the next process will end in the same way, as the ones before it have."""
    return next_step.times_in_row(last) > 1


def _told_for_s(last: Row) -> float:
    """How long it is told of an end when the next process is at work; 0: it was in order."""
    if _comes_again(last):
        return ALIKE_LIFE_S
    return RECENT_S if last.get("code") or next_step.blame(last) else 0.0


def _to_start(row: Row, job: str) -> str:
    """What helps one that starts again, or says why it had to."""
    name = row["name"]
    if row.get("phase") == NO_ROOM:
        where = f"dlctl logs {name} -l error {job}"
        return hints.told(where, "says where: make room for its state there")
    return f"dlctl logs {name} --previous {job}"


def _given_up_at(snapshot: Snapshot, row: Row) -> float | None:
    """When the host of a daemon is given up; None as long as somebody there can be reached."""
    agent = snapshot.daemon(str(row.get("agent"))) if snapshot.is_live else {}
    return values.number(agent.get("given_up_at"))


def _host_away(snapshot: Snapshot, agent: Row, given_up_at: float) -> Problem:
    """Of an agent that cannot be reached: what becomes of its host."""
    name, left_s = str(agent["name"]), max(0.0, given_up_at - snapshot.now)
    hosted = [row for row in snapshot.daemons if row.get("agent") == name]
    servers = [str(row["name"]) for row in hosted if row.get("role") == "server"]
    then = "its workers start on the others"
    if servers:
        then = f"the run fails without {' and '.join(servers)}"
    where = agent.get("host") or "its host"
    text = f"cannot be reached on {where}; it is given up in {values.duration(left_s)}, and then"
    helps = f"dlctl doctor {next_step.job_file(snapshot)}"
    heard_at = values.number(agent.get("updated_at"))
    number = facts.incarnation(agent)
    return Problem("host-unreachable", name, f"{text} {then}", helps, heard_at, number)


def _quarantined(snapshot: Snapshot, row: Row) -> str:
    error, last = row.get("error"), row.get("last_exit")
    ago = values.ago(last.get("at"), snapshot.now) if last else ""
    if isinstance(error, str) and error:  # Its exit says less.
        return f"is quarantined: {error}" + (f" ({ago})" if ago else "")
    return "is quarantined" + (f": {facts.exited(last)} {ago}" if last else "")


def _mend_first(row: Row) -> str:
    """What has to be done before a quarantined worker is restarted, or it is quarantined again; ""
    if its reason does not tell. The others train on: it need not be the rate.
    """
    if not any(words in str(row.get("error")) for words in (NOT_FINITE, REFUSED)):
        return ""
    return "correct what gives this worker such values (its host, its data) first, then\n"


def _gone(snapshot: Snapshot, row: Row) -> str:
    heard_at = values.number(row.get("updated_at"))
    heard = "" if heard_at is None else f", last heard {values.ago(heard_at, snapshot.now)}"
    text = f"is gone (pid {row.get('pid')}{heard})"
    return f"{text}; that will be noticed in a moment" if snapshot.is_current else text


def _waiting(snapshot: Snapshot, row: Row) -> str:
    last, retry_at = row.get("last_exit"), values.number(row.get("retry_at"))
    how = _died(last, snapshot.now)
    left_s = 0.0 if retry_at is None else retry_at - snapshot.now
    soon = f"in {values.duration(left_s)}" if left_s > 0 else "at once"
    again = values.number(row.get("restarts"))
    number = "" if again is None else f" (restart {values.count(again)})"
    return f"{how}; a new one starts {soon}{number}{_meanwhile(snapshot, row)}"


def _phase(row: Row) -> str:
    phase = row.get("phase")
    return f" ({phase})" if isinstance(phase, str) and phase not in ("", "starting") else ""


def _meanwhile(snapshot: Snapshot, row: Row) -> str:
    """What the others do without it."""
    if row.get("role") == "server":
        return "; it goes on with its shard"
    if row.get("role") == "agent":
        return "; its daemons go on"
    others = [r for r in snapshot.daemons if r.get("role") == "worker" and r is not row]
    return (
        "; its data goes to the others" if any(r.get("state") == "running" for r in others) else ""
    )


def _is_quiet(snapshot: Snapshot, row: Row) -> bool:
    """Whether nothing was heard of a daemon that works; as seen by a coordinator that is well."""
    heard_at = values.number(row.get("updated_at"))
    known_at = values.number(snapshot.run.get("updated_at"))
    if row.get("state") != "running" or not snapshot.is_current or heard_at is None:
        return False
    return known_at is not None and min(known_at, snapshot.now) - heard_at > QUIET_S


def _slow(snapshot: Snapshot, row: Row) -> str:
    heard_at, phase = values.number(row.get("updated_at")), row.get("phase")
    silent_s = 0.0 if heard_at is None else snapshot.now - heard_at
    if silent_s > (STALE_AFTER_S if next_step.is_stuck(row) else STUCK_REPORT_S):
        return f"has not answered for {values.duration(silent_s)}; {replaced(snapshot)}"
    at = f", at {where}" if (where := next_step.stuck_place(row)) else ""
    return f"is slow: {phase}{at}" if isinstance(phase, str) and phase else "is slow"


def still_there(snapshot: Snapshot) -> list[Row]:
    """Daemons whose processes are here; of those on other hosts nobody knows it."""
    rows = [row for row in snapshot.daemons if row.get("pid") is not None and is_here(row)]
    return [row for row in rows if row.get("state") not in (*WITHOUT_PROCESS, GONE)]


# ---------------------------------------------------------------- the coordinator
# What is wrong with the coordinator of a run, and what becomes of the others without it.


NEEDED = ("server", "worker")
"""Roles without any process of which nobody trains."""


def of_coordinator(snapshot: Snapshot) -> Iterator[Problem]:
    """It is silent, gone, cannot write, or has just taken the place of another one."""
    row, job = snapshot.coordinator, f"-j {snapshot.run_id}"
    number, heard_at = facts.incarnation(row), values.number(row.get("updated_at"))
    if row["state"] == SILENT:
        silent = values.duration(snapshot.silent_s)
        text = f"has not answered for {silent} (pid {snapshot.coordinator_pid})"
        if unresponsive.has_agent(snapshot.daemons):
            text += f"; {replaced(snapshot, paths.STILL_LIMITS)}"
        fix = next_step.command(snapshot)
        yield Problem("coordinator-silent", COORDINATOR, text, fix, heard_at, number)
    elif snapshot.unwritten_s is not None:
        yield _unwritten(snapshot, heard_at, number)
    elif row["state"] == GONE and lock.has_unknown_coordinator(snapshot):
        yield _unrecorded(snapshot, heard_at, number)
    elif row["state"] == GONE or (row["state"] == "starting" and _ends_at_once(snapshot, heard_at)):
        yield _absent(snapshot, heard_at, number)
    elif row["state"] == "starting" and snapshot.run.get("updated_by") is not None:
        text = "has died or was restarted; the next one starts and goes on where it was"
        more = f"dlctl logs {COORDINATOR} --previous {job}"
        code: codes.Name = "coordinator-restarting"
        yield Problem(code, COORDINATOR, text, more, heard_at, number - 1, is_grave=False)
    elif snapshot.is_live and number > 1:
        known = takeovers.load(snapshot.directory)
        at = known.taken_over_at
        if at is not None and snapshot.now - at < RECENT_S:
            ago = values.ago(at, snapshot.now)
            text = f"{known.takeover} {ago}"
            if known.takeover == takeovers.DIED:  # When, nobody has seen.
                text = f"{known.takeover}; the new one has taken over {ago}"
            text += f"; {known.forgotten}" if known.forgotten else ""
            more = f"dlctl logs {COORDINATOR} --previous {job}"
            code = "coordinator-restarted"
            yield Problem(
                code, COORDINATOR, text, more, at, number - 1, is_over=True, is_grave=False
            )


def _absent(snapshot: Snapshot, heard_at: float | None, number: int) -> Problem:
    """Of a coordinator that is gone, and whether there will be another one."""
    unseen_s, job = _unseen_s(snapshot, heard_at), f"-j {snapshot.run_id}"
    gone = "is gone" if unseen_s is None else f"has been gone for {values.duration(unseen_s)}"
    why, mend = _disk_trouble(snapshot) if snapshot.is_live else ("", "")
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
        step = next_step.command(snapshot)
    return Problem("coordinator-gone", COORDINATOR, text, step, heard_at, number)


def _ends_at_once(snapshot: Snapshot, heard_at: float | None) -> str:
    """What the coordinators have ended with that were started since one was heard last."""
    return logs.ends_at_once(snapshot.directory, COORDINATOR, heard_at)


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


def _unrecorded(snapshot: Snapshot, heard_at: float | None, number: int) -> Problem:
    """Of a coordinator that has taken the place of the one on record, and is not there yet."""
    why, mend = _disk_trouble(snapshot)
    text = "has died or was restarted; the next one is there"
    if not why:
        command = f"dlctl logs {COORDINATOR} -j {snapshot.run_id}"
        text += ", and says nothing yet"
        return Problem("coordinator-restarting", COORDINATOR, text, command, heard_at, number)
    text += f", and cannot write that: {why}{_old_news(snapshot, heard_at)}"
    return Problem("coordinator-unwritable", COORDINATOR, text, mend, heard_at, number)


def _unwritten(snapshot: Snapshot, heard_at: float | None, number: int) -> Problem:
    """Of a coordinator that works and whose words do not reach the disk."""
    why, mend = _disk_trouble(snapshot)
    text = f"cannot write the run's database{f': {why}' if why else ''}"
    text += _old_news(snapshot, heard_at)
    logs = f"dlctl logs {COORDINATOR} -l warning -j {snapshot.run_id}"
    return Problem("coordinator-unwritable", COORDINATOR, text, mend or logs, heard_at, number)


def _old_news(snapshot: Snapshot, heard_at: float | None) -> str:
    """Of when the newest word on the disk is, and what goes on nevertheless."""
    if heard_at is None:
        return _training(snapshot)
    age, when = values.duration(snapshot.now - heard_at), values.clock(heard_at, snapshot.now)
    return f"; what is shown is {age} old ({when}){_training(snapshot)}"


def _disk_trouble(snapshot: Snapshot) -> tuple[str, str]:
    """(why nothing can be written in the run directory, what to do about it); "" if that can be."""
    if full := disk.full_disk(snapshot):
        return full, disk.make_room(snapshot)
    dead = disk.dead_disk(snapshot)
    return dead, disk.mend_disk(snapshot) if dead else ""


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
