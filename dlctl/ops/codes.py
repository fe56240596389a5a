"""The one table of problems: code -> how it is shown, what it means, and what helps.

A code is stable: programs may compare it. `status`, `why`, `logs --failed`, `explain` and the
manual page dlctl-problems(7) all take their words from here.

In a text, and in a fix, {name} is a fact, and what stands in [brackets] goes if one of its facts is
not known. Besides the facts of the problem there are {age}, since it began, and in a fix {run},
{job_file}, {task} (its file), {again} (the command by which the task is read anew) and {next} (the
next step of the run).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from dlctl.problems import Code, Problem
from dlctl.util import values

Level = Literal["error", "over", "notice", "wait"]
"""error: somebody is not well. over: it was so, a moment ago. notice: one comes or goes, as wanted.
wait: it makes others wait, or waits itself: only `why` shows it."""
_BRACKETS = re.compile(r"\[([^]]*)\]")


class Entry(NamedTuple):
    level: Level
    text: str
    what: str
    cause: str
    remedy: str
    fixes: Mapping[str, str]
    """By the fact `cause`; "" has that of all others."""


_LOGS = "dlctl logs {daemon} -j {run}"
_BEFORE = "dlctl logs {daemon} --previous -j {run}"
_ROOM = "df -h {folder}\nmake room there"
_MOUNT = "findmnt -T {folder}\nsee why with dmesg, then check and mount it again"
_TASK = "find what ends the process in {task}, and correct it, then\n{again}"
_END = "It was killed, ran out of memory, or raised an error."

CODES: Mapping[Code, Entry] = {
    "coordinator-silent": Entry(
        "error",
        "no heartbeat for {age} (pid {pid})[; replaced after {limit_s}]; the state shown is old",
        "The coordinator has sent no heartbeat for too long.",
        "It is stopped (SIGSTOP, a debugger), its machine is overloaded, or its disk hangs.",
        "Its agent replaces it after a few timeouts. Without an agent: `dlctl stop --kill`, then "
        "`dlctl recover`. Meanwhile workers go on with the data that they have.",
        {"": "{next}"},
    ),
    "coordinator-gone": Entry(
        "error",
        "process gone[ for {age}][ (pid {pid})][; {agent} starts the next one][; {why}]",
        "The coordinator's process is gone.",
        "It was killed (SIGKILL, out of memory, a reboot), or it ends as soon as it starts.",
        "A living agent starts the next one, which goes on where it was. If there is none: "
        "`dlctl recover`. If it ends at once, `dlctl logs coordinator -l error` says why.",
        {
            "": "{next}",
            "restarts": "dlctl recover -j {run}\nif that does not end",
            "full": "df -h {folder}\nmake room there, then\ndlctl recover -j {run}",
            "read-only": "findmnt -T {folder}\n"
            "see why with dmesg, then check and mount it again, then\ndlctl recover -j {run}",
        },
    ),
    "coordinator-restarting": Entry(
        "error",
        "the next one is starting[; last status {age} ago]",
        "The next coordinator is starting and has not written anything yet.",
        "The one before has died, or was restarted on request.",
        "Wait: it goes on where it was. `dlctl logs coordinator --previous` has last words.",
        {"": _BEFORE},
    ),
    "coordinator-restarted": Entry(
        "over",
        "restarted {age} ago[ ({how})][; {forgotten}]",
        "A coordinator has taken the place of the one before; nothing is lost.",
        "The one before has died, or was restarted on request.",
        "Nothing is to be done. `dlctl logs coordinator --previous` has last words.",
        {"": _BEFORE},
    ),
    "coordinator-unwritable": Entry(
        "error",
        "cannot write the run's database[: {why}][; the state shown is {age} old]",
        "The coordinator works, and cannot write the run's database.",
        "The disk of the run directory is full, read-only, or dead.",
        "Make room there, or mount it again. Training goes on meanwhile; but what dies is not "
        "restarted before this can be written, and training waits for a server that is gone.",
        {
            "": "dlctl logs coordinator -l warning -j {run}",
            "full": _ROOM,
            "read-only": _MOUNT,
        },
    ),
    "host-unreachable": Entry(
        "error",
        "cannot be reached[ on {host}]; given up in {given_up_at}"
        "[; the run then fails without {servers}]",
        "The agent of a host cannot be reached.",
        "The network, the host, or its ssh login is down.",
        "`dlctl doctor JOBFILE` says what is wrong. After the timeout its workers start on other "
        "hosts; a run whose server was there fails, and `dlctl recover` waits for the host.",
        {"": "dlctl doctor {job_file}"},
    ),
    "daemon-unreachable": Entry(
        "error",
        "no heartbeat for {age}, nor from its host",
        "A daemon sends no heartbeats, and neither does its host.",
        "The network, or the host, is down.",
        "See host-unreachable: the decision is about the whole host.",
        {"": ""},
    ),
    "heartbeat-late": Entry(
        "error",
        "heartbeat late: {age} (limit {limit_s})",
        "A daemon's heartbeat is late.",
        "Its machine is overloaded or swaps, its process is stopped, or its link hangs.",
        "Wait: at the limit (`silent_s` in `[timeouts]`) it is replaced. `dlctl logs NAME` says "
        "what it did last.",
        {"": "dlctl restart {daemon} -j {run}"},
    ),
    "worker-stuck": Entry(
        "error",
        "stuck: {phase}[, at {place}]",
        "A worker has been in one batch for far longer than its others took.",
        "A line of the task does not come back: a lock, a network call, a data loader.",
        "Correct the line that `status` names, then `dlctl restart NAME`.",
        {
            "": "dlctl restart {daemon} -j {run}",
            "task": "see why {place} does not come back, and correct it, then\n{again}",
        },
    ),
    "worker-crash-loop": Entry(
        "error",
        "ended {age} ago: {exit}, {in_row} times in a row[; restart in {retry_at}]",
        "A worker ends by itself again and again, in the same way.",
        "The task, or a library that it uses, ends the process.",
        "Correct that, then `dlctl restart NAME`. After too many times in a row the worker is "
        "quarantined, or the run fails.",
        {"": _BEFORE, "task": _TASK},
    ),
    "daemon-quarantined": Entry(
        "error",
        "quarantined[: {error}][ ({age} ago)]",
        "A worker is not restarted, since it has failed too often in a row.",
        "Its host, its data, or the task makes it fail each time.",
        "See why with `dlctl logs NAME --previous`, correct that, then `dlctl restart NAME`.",
        {
            "": "dlctl restart {daemon} -j {run}",
            "not finite": "correct what gives this worker such values (its host, its data) first, "
            "then\ndlctl restart {daemon} -j {run}",
            "task": _TASK,
        },
    ),
    "daemon-failed": Entry(
        "error",
        "failed[ {age} ago][: {exit}][; {error}]",
        "A daemon has failed, and with it the run.",
        "The task raised an error, or a daemon without which nobody trains could not go on.",
        "`dlctl logs --failed` has its last words; then as `dlctl status` says.",
        {"": _LOGS},
    ),
    "daemon-restarting": Entry(
        "error",
        "[ended {age} ago: {exit}; ]restart[ {restarts}][ in {retry_at}][: {phase}]",
        "A daemon's process has ended; the next one starts.",
        _END,
        "Wait. A server goes on with its shard, and a worker's data goes to the others.",
        {"": _BEFORE, "task": _TASK},
    ),
    "daemon-restarted": Entry(
        "over",
        "ended {age} ago: {exit}; restarted",
        "A daemon's process has ended, and the next one is at work.",
        _END,
        "Nothing is to be done, unless it comes again: `dlctl logs NAME --previous`.",
        {"": _BEFORE, "task": _TASK},
    ),
    "process-gone": Entry(
        "error",
        "process gone (pid {pid})[; last heartbeat {age} ago]",
        "A daemon's process is gone, and the coordinator has not noticed yet.",
        "It was killed a moment ago, or its coordinator is gone, too.",
        "Wait a moment; without a coordinator: `dlctl recover`.",
        {"": ""},
    ),
    "daemon-starting": Entry(
        "notice",
        "starting[ for {age}][: {phase}]",
        "A daemon is starting.",
        "It imports torch, builds the model, or reads its data.",
        "Wait; `dlctl logs NAME` says what it does.",
        {"": _LOGS},
    ),
    "daemon-leaving": Entry(
        "notice",
        "draining[: {phase}]",
        "A daemon drains before it leaves.",
        "`dlctl scale` or `dlctl stop` was asked for: its last pushes are on their way.",
        "Wait.",
        {"": _LOGS},
    ),
    "daemon-waiting": Entry(
        "wait",
        "waits for {waiting_for}[ for {age}][: {phase}]",
        "A daemon waits for others.",
        "One of them is not well, slower, or waits itself.",
        "`dlctl why` shows them below the one that all of them wait for.",
        {"": ""},
    ),
    "batch-late": Entry(
        "wait",
        "in one batch for {age}, longer than usual",
        "A worker is in a batch that takes longer than the ones before.",
        "The task: more data in this batch, or a line that waits for something.",
        "Wait. If it does not come back the code becomes worker-stuck.",
        {"": _LOGS},
    ),
    "daemon-slow": Entry(
        "wait",
        "others wait for it[ for {age}][: {phase}]",
        "Others wait for a daemon that is well, and slower than they are.",
        "A slower machine or link, or more work than the others have.",
        "A method that does not wait, smaller batches there, or more steps between pushes.",
        {"": _LOGS},
    ),
    "rate-limit": Entry(
        "wait",
        "{direction} limit of {limit_bytes_per_s} reached by {workers}[; {waiting_bytes} waiting]",
        "A limit of pushes or fetches holds workers back.",
        "It is set in the job file or with `dlctl set`.",
        "`dlctl set 'worker-*' push=...` raises it.",
        {"": "dlctl set {each} {direction}={double} -j {run}"},
    ),
    "interval-at-limit": Entry(
        "notice",
        "{key} = auto is at its most, {steps} steps: the link needs more ({workers})",
        'The longest interval that "auto" may choose is too short for the link.',
        "The link is slow for what the workers push or fetch.",
        "`dlctl set 'worker-*' KEY=STEPS` with a longer one, or a compressor.",
        {"": "dlctl set --list -j {run}"},
    ),
    "checkpoint-late": Entry(
        "error",
        "a checkpoint takes {age}[; waits for {waiting}][, {gives_up_at} at most]",
        "A checkpoint takes long.",
        "A daemon that saves its part is slow, stuck or silent, or the disk is slow.",
        "Wait: whoever is late is given up, and training goes on meanwhile.",
        {"": "dlctl logs coordinator -j {run}"},
    ),
    "checkpoint-failed": Entry(
        "error",
        "the last checkpoint failed[: {error}]",
        "The newest checkpoint could not be saved.",
        "Mostly the disk: it is full, read-only, or dead.",
        "Correct what the error names; the next checkpoint is tried when it is due. "
        "`dlctl checkpoint` saves one at once.",
        {"": "dlctl checkpoint -j {run}"},
    ),
    "target-unreachable": Entry(
        "error",
        "the target cannot be reached[: {why}]",
        "The target of the run cannot be reached.",
        "The task's `evaluate` does not return the metric that the target names.",
        "Correct `target` in `[job]`, or return that metric.",
        {"": "dlctl stop -j {run}"},
    ),
    "disk-full": Entry(
        "error",
        "no room on the disk[: {why}][: {phase}]",
        "A disk has no room: that of the run directory, or of a server's state.",
        "Logs, checkpoints, or something else fill it.",
        "Make room: `dlctl checkpoint prune` removes checkpoints that are not needed.",
        {
            "": "dlctl logs {daemon} -l error -j {run}\nsays where: make room for its state there",
            "full": _ROOM,
        },
    ),
    "run-waiting": Entry(
        "wait",
        "waits for {waiting}",
        "The run as a whole waits for something.",
        "A barrier, a checkpoint, or daemons that are not ready.",
        "`dlctl logs NAME` of whom it names.",
        {"": "dlctl logs coordinator -j {run}"},
    ),
    "run-failed": Entry(
        "error",
        "failed[: {reason}]",
        "The run has failed.",
        "Its reason says so; the first line of `dlctl status` shows it.",
        "`dlctl logs --failed`, then the next command of `dlctl status`.",
        {"": "{next}"},
    ),
}


def level(problem: Problem) -> Level:
    return CODES[problem.code].level


def text(problem: Problem, now: float) -> str:
    """The problem in a line, as in "worker-2: heartbeat late: 12s (limit 30s)"; plain text."""
    return f"{problem.daemon}: {words(problem, now)}"


def words(problem: Problem, now: float) -> str:
    """The same without the daemon."""
    return fill(CODES[problem.code].text, shown(problem, now)) or problem.code


def fix(problem: Problem) -> str:
    """The template of the command that helps, or tells more; see `dlctl.util.hints`."""
    fixes = CODES[problem.code].fixes
    return fixes.get(str(problem.facts.get("cause")), fixes[""])


def fill(template: str, facts: Mapping[str, str]) -> str:
    """The template with its facts; "" if one is missing that is not in brackets."""
    parts = []
    for number, part in enumerate(_BRACKETS.split(template)):
        try:
            parts.append(part.format_map(facts))
        except KeyError:
            if number % 2 == 0:
                return ""
    return "".join(parts)


def shown(problem: Problem, now: float) -> dict[str, str]:
    """The facts as people read them: times as what is left until then, sizes with units."""
    found = {key: _shown(key, value, now) for key, value in problem.facts.items()}
    if problem.since is not None:
        found["age"] = values.duration(now - problem.since)
    return found | {"daemon": problem.daemon}


def _shown(key: str, value: Any, now: float) -> str:
    if values.number(value) is None:
        return _place(value) if key == "place" else str(value)
    if key.endswith("_at"):
        return values.duration(value - now)
    if key.endswith("_bytes_per_s"):
        return values.rate(value)
    if key.endswith("_bytes"):
        return values.size(value)
    return values.duration(value) if key.endswith("_s") else str(value)


def _place(place: str) -> str:
    """A line of the task as one types it."""
    file, colon, line = str(place).rpartition(":")
    return f"{values.path(file)}{colon}{line}" if file else line
