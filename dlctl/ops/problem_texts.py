"""The table of problems: code -> how it is shown, what it means, its cause and its remedy.

A code is stable: programs may compare it. `status`, `why`, `logs --failed`, `explain` and the
manual page dlctl-problems(7) all take their texts from here.

In a text or a fix, {name} is a fact; a part in [brackets] is omitted if one of its facts is
unknown. Besides the problem's facts there are {age}, the time since it began, and in a fix {run},
{job_file}, {task} (the task's file), {again} (the command that reloads the task) and {next} (the
run's next step).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from dlctl.problems import Code, Problem
from dlctl.util import values

Level = Literal["error", "over", "notice", "wait"]
"""error: a daemon is unhealthy. over: it recovered a moment ago. notice: nothing is wrong, a daemon
joins or leaves, for example. wait: a daemon blocks others or is blocked; only `why` shows it."""
_BRACKETS = re.compile(r"\[([^]]*)\]")


class CodeEntry(NamedTuple):
    level: Level
    text: str
    what: str
    cause: str
    remedy: str
    fixes: Mapping[str, str] = {"": ""}
    """The remedy by the fact `cause`; "" is the default."""


_LOGS = "dlctl logs {daemon} -j {run}"
_BEFORE = "dlctl logs {daemon} --previous -j {run}"
_ROOM = "df -h {folder}\nfree space there"
_MOUNT = "findmnt -T {folder}\nfind the cause with dmesg, then check and remount it"
_TASK = "find what ends the process in {task} and fix it, then\n{again}"
_LEFT = (
    "end the training of {task} with the run: no break out of run.loader(...) or out of\n"
    "`while not run.ended`; then\n{again}"
)
_END = "It was killed, ran out of memory, or raised an error."

CODES: Mapping[Code, CodeEntry] = {
    "coordinator-silent": CodeEntry(
        "error",
        "no heartbeat for {age} (pid {pid})[; replaced after {limit_s}]; the state shown is stale",
        "The coordinator has sent no heartbeat for too long.",
        "It is stopped (SIGSTOP, a debugger), its machine is overloaded, or its disk hangs.",
        "Its agent replaces it. Without an agent: `dlctl stop --kill`, then `dlctl recover`.",
        {"": "{next}"},
    ),
    "coordinator-gone": CodeEntry(
        "error",
        "process gone[ for {age}][ (pid {pid})][; {agent} restarts it][; {why}]",
        "The coordinator's process is gone.",
        "It was killed (SIGKILL, out of memory, a reboot), or it exits as soon as it starts.",
        "An agent restarts it. Without an agent: `dlctl recover`. If it exits at once, "
        "`dlctl logs coordinator -l error` shows why.",
        {
            "": "{next}",
            "restarts": "dlctl recover -j {run}\nif this persists",
            "full": f"{_ROOM}, then\ndlctl recover -j {{run}}",
            "read-only": f"{_MOUNT}, then\ndlctl recover -j {{run}}",
        },
    ),
    "coordinator-restarting": CodeEntry(
        "error",
        "restarting[; last status {age} ago]",
        "The new coordinator is starting and has not written anything yet.",
        "The previous coordinator died, or was restarted on request.",
        "Wait. `dlctl logs coordinator --previous` shows the previous one's last lines.",
        {"": _BEFORE},
    ),
    "coordinator-restarted": CodeEntry(
        "over",
        "restarted {age} ago[ ({how})][; {forgotten}]",
        "A new coordinator has replaced the previous one; nothing is lost.",
        "The previous coordinator died, or was restarted on request.",
        "None. `dlctl logs coordinator --previous` shows the previous one's last lines.",
        {"": _BEFORE},
    ),
    "coordinator-unwritable": CodeEntry(
        "error",
        "cannot write the run's database[: {why}][; the state shown is {age} old]",
        "The coordinator is running but cannot write the run's database.",
        "The disk of the run directory is full, read-only, or dead.",
        "Free space there, or remount it. Until then, no daemon that dies is restarted.",
        {"": "dlctl logs coordinator -l warning -j {run}", "full": _ROOM, "read-only": _MOUNT},
    ),
    "host-unreachable": CodeEntry(
        "error",
        "unreachable[ on {host}]; given up in {given_up_at}"
        "[; the run then fails without {servers}]",
        "The agent of a host is unreachable.",
        "The network, the host, or its ssh login is down.",
        "`dlctl doctor JOBFILE` shows what is wrong. After the timeout, the host's workers start "
        "on other hosts; if it ran a server, the run fails. Then `dlctl recover` continues it once "
        "the host is back; without the host remove it from the job file, and `dlctl start` resumes "
        "from the newest checkpoint on the others.",
        {"": "dlctl doctor {job_file}"},
    ),
    "daemon-unreachable": CodeEntry(
        "error",
        "no heartbeat for {age}, nor from its host",
        "Neither a daemon nor its host sends heartbeats.",
        "The network, or the host, is down.",
        "See host-unreachable: dlctl decides for the whole host.",
    ),
    "heartbeat-late": CodeEntry(
        "error",
        "heartbeat late: {age} (limit {limit_s})",
        "A daemon's heartbeat is late.",
        "Its machine is overloaded or swaps, its process is stopped, or its link hangs.",
        "Wait: at the limit (`silent_s` in `[timeouts]`) it is replaced.",
        {"": "dlctl restart {daemon} -j {run}"},
    ),
    "worker-stuck": CodeEntry(
        "error",
        "slow: stuck {phase}[, at {place}]",
        "A worker has spent far longer in one batch than in its previous ones.",
        "A line of the task does not return: a lock, a network call, a data loader.",
        "Fix the line that `status` names, then `dlctl restart NAME`.",
        {
            "": "dlctl restart {daemon} -j {run}",
            "task": "find out why {place} does not return and fix it, then\n{again}",
        },
    ),
    "worker-crash-loop": CodeEntry(
        "error",
        "exited {age} ago: {exit}, {in_row} times in a row[; restart in {retry_at}]",
        "A worker exits repeatedly, in the same way.",
        "The task, or a library that it uses, ends the process; or a script leaves its training "
        "loop soon after each start. Each restart waits longer, up to 30 s.",
        "Fix that, then `dlctl restart NAME`.",
        {"": _BEFORE, "task": _TASK, "left": _LEFT},
    ),
    "daemon-quarantined": CodeEntry(
        "error",
        "quarantined[: {error}][ ({age} ago)]",
        "A worker is no longer restarted: it failed too often, or with an error of the task.",
        "Its host, its data, or the task makes it fail each time. The run ends if another worker "
        "has the same error.",
        "Find the cause with `dlctl logs NAME --previous`, fix it, then `dlctl restart NAME`.",
        {
            "": "dlctl restart {daemon} -j {run}",
            "not finite": "fix its host or its data, then\ndlctl restart {daemon} -j {run}",
            "task": _TASK,
        },
    ),
    "daemon-failed": CodeEntry(
        "error",
        "failed[ {age} ago][: {exit}][; {error}]",
        "A daemon has failed, and with it the run.",
        "The task raised an error in several workers, or a daemon that all depend on could not "
        "continue.",
        "`dlctl logs --failed` shows its last lines; `dlctl status` shows the next command.",
        {"": _LOGS},
    ),
    "daemon-restarting": CodeEntry(
        "error",
        "[exited {age} ago: {exit}; ]restart[ {restarts}][ in {retry_at}][: {phase}]",
        "A daemon's process has exited and is being restarted.",
        _END,
        "Wait. A server resumes with its shard; the other workers take over a worker's data.",
        {"": _BEFORE, "task": _TASK},
    ),
    "daemon-restarted": CodeEntry(
        "over",
        "exited {age} ago: {exit}; restarted",
        "A daemon's process has exited, and its replacement is running.",
        _END,
        "No action is needed unless it recurs: `dlctl logs NAME --previous`.",
        {"": _BEFORE, "task": _TASK},
    ),
    "process-gone": CodeEntry(
        "error",
        "process gone (pid {pid})[; last heartbeat {age} ago]",
        "A daemon's process is gone, and the coordinator has not noticed yet.",
        "It was killed a moment ago, or its coordinator is gone too.",
        "Wait a moment; without a coordinator: `dlctl recover`.",
    ),
    "daemon-starting": CodeEntry(
        "notice",
        "starting[ for {age}][: {phase}]",
        "A daemon is starting.",
        "It imports torch, builds the model, or reads its data; a script may take long until it "
        "calls dlctl.attach.",
        "Wait; `dlctl logs NAME` shows its progress.",
        {"": _LOGS},
    ),
    "daemon-leaving": CodeEntry(
        "notice",
        "draining[: {phase}]",
        "A daemon drains before it leaves.",
        "`dlctl scale` or `dlctl stop` was requested: its last pushes are in flight.",
        "Wait.",
        {"": _LOGS},
    ),
    "daemon-waiting": CodeEntry(
        "wait",
        "waits for {waiting_for}[ for {age}][: {phase}]",
        "A daemon waits for others.",
        "One of them is unhealthy, slower, or waiting too.",
        "`dlctl why` lists the waiting daemons below the daemon that blocks them.",
    ),
    "batch-late": CodeEntry(
        "wait",
        "in one batch for {age}, longer than usual",
        "A worker's current batch takes longer than its previous ones.",
        "The task: more data in this batch, or a line that blocks.",
        "Wait. If the batch does not complete, the code becomes worker-stuck.",
        {"": _LOGS},
    ),
    "daemon-slow": CodeEntry(
        "wait",
        "others wait for it[ for {age}][: {phase}]",
        "A daemon is healthy but a straggler: others wait for it.",
        "A slower machine or link, or more work than the others have.",
        "Use an asynchronous method, smaller batches there, or more steps between pushes.",
        {"": _LOGS},
    ),
    "rate-limit": CodeEntry(
        "wait",
        "{direction} limit of {limit_bytes_per_s} reached by {workers}[; {waiting_bytes} waiting]",
        "A rate limit on pushes or fetches throttles workers.",
        "It is set in the job file or with `dlctl set`.",
        "`dlctl set 'worker-*' push=off` lifts it, a larger number raises it.",
        {"": "dlctl set 'worker-*' {direction}=off -j {run}\nlifts it"},
    ),
    "interval-at-limit": CodeEntry(
        "notice",
        "{key} = auto is at its maximum, {steps} steps: the link needs more ({workers})",
        'The longest interval that "auto" may choose is too short for the link.',
        "The link is slow for the amount that the workers push or fetch.",
        "`dlctl set 'worker-*' KEY=STEPS` with a longer interval, or a compressor.",
        {"": "dlctl set --list -j {run}"},
    ),
    "update-slow": CodeEntry(
        "notice",
        "an update takes {update_s} at the present rate",
        "The workers need very long for the samples of one update.",
        "Too few workers take part, or they are too slow, for `target_samples`.",
        "Add workers, or `dlctl set target_samples=...` with fewer samples and a smaller lr.",
        {"": "dlctl set --list -j {run}"},
    ),
    "rounds-few": CodeEntry(
        "notice",
        "{why}",
        "The run makes few exchanges for its method, and may train worse than it could.",
        "`local_steps` is large for the length of the run. The momentum of the servers' optimiser "
        "needs 2 m / (1 - m) rounds, if m is its value, and four times as many with a rate that "
        "goes down.",
        "Set a smaller `local_steps` (`dlctl set local_steps=...` does so at once), train longer, "
        'or average: `[optimizer] name = "sgd"`, `lr = 1`.',
        {"": "dlctl set --list -j {run}"},
    ),
    "checkpoint-late": CodeEntry(
        "error",
        "a checkpoint takes {age}[; waits for {waiting}][, {gives_up_at} at most]",
        "A checkpoint is late.",
        "A daemon that saves its part is slow, stuck or silent, or the disk is slow.",
        "Wait: late daemons are given up after a timeout, and training continues meanwhile.",
        {"": "dlctl logs coordinator -j {run}"},
    ),
    "checkpoint-failed": CodeEntry(
        "error",
        "the last checkpoint failed[: {error}]",
        "The newest checkpoint could not be saved.",
        "Usually the disk: it is full, read-only, or dead.",
        "Fix what the error names, then `dlctl checkpoint`.",
        {"": "dlctl checkpoint -j {run}"},
    ),
    "mirror-refused": CodeEntry(
        "error",
        "the mirror does not take checkpoints[ for {age}][: {why}][; its newest is of step {step}]",
        "The store of `[checkpoints] mirror` refuses this run; training goes on.",
        "Credentials are missing, wrong or expired, the bucket is gone or read-only, or another "
        "run writes there.",
        "Do what it names: dlctl tries again at least every minute, and uploads the newest "
        "checkpoint. Credentials in files (~/.aws) are read again each time; those of the "
        "environment only by `dlctl stop` and `dlctl start`.",
        {"": "dlctl doctor {job_file}"},
    ),
    "mirror-behind": CodeEntry(
        "error",
        "the mirror has no newer checkpoint[ for {age}][: {why}][; its newest is of step {step}]",
        "Uploads to the store of `[checkpoints] mirror` fail, or are slower than checkpoints are "
        "saved; training goes on.",
        "The store is down, unreachable, throttling, or the link to it is slow.",
        "Wait: dlctl tries again at least every minute, goes on with what is there, and uploads "
        "the newest checkpoint. If the link is slow, save less often (`every_s`).",
        {"": "dlctl checkpoint ls {address}"},
    ),
    "target-unreachable": CodeEntry(
        "error",
        "the target cannot be reached[: {why}]",
        "The target of the run cannot be reached.",
        "The task's `evaluate` does not return the metric that the target names.",
        "Fix `target` in `[job]`, or return that metric.",
        {"": "dlctl stop -j {run}"},
    ),
    "tracker-failed": CodeEntry(
        "error",
        "{tracker} does not take the run's figures[ for {age}][: {why}][; {dropped} rows dropped]",
        "A tracker of `[log]` does not take the run's figures; training goes on.",
        "Its server is away or refuses them, its package raises an error, or its process died.",
        "Repair what it names: dlctl tries again, and keeps the figures of about half an hour. The "
        "next coordinator sends what is missing (`dlctl restart coordinator`).",
        {"": "dlctl logs coordinator -l warning -j {run}"},
    ),
    "loss-noisy": CodeEntry(
        "error",
        "the loss depends on chance[: {why}]",
        "The loss is not the same at the same parameters, but the method compares losses.",
        "Dropout, batch normalisation in training, or random augmentation in the task.",
        "Set `p = 0`, keep batch normalisation in eval mode, augment nothing; or choose a "
        "stochastic method, for example `downpour`.",
        {"": "dlctl stop -j {run}\ncorrect {task}, then\ndlctl start --fresh {job_file}"},
    ),
    "disk-full": CodeEntry(
        "error",
        "the disk is full[: {why}][: {phase}]",
        "The disk of the run directory or of a server's state is full.",
        "Logs, checkpoints, or other files fill it.",
        "Free space: `dlctl checkpoint prune` removes superfluous checkpoints.",
        {
            "": "dlctl logs {daemon} -l error -j {run}\nshows where: free space there",
            "full": _ROOM,
        },
    ),
    "disk-stalled": CodeEntry(
        "error",
        "its disk has made no commit durable for {age}[ (limit {limit_s})]"
        "[; {commits} under way][; {step} waits {gives_up_at} at most]",
        "The disk of a server's state does not complete a sync.",
        "The disk hangs (a network file system whose server is gone, a failing device) or is "
        "overloaded.",
        "Repair it: the server continues as soon as the disk does, and nothing is lost. Until "
        "then its pushes are not acknowledged. Each step of a run's end has a limit of its own.",
        {"": _LOGS, "disk": "findmnt -T {folder}\nfind the cause there with dmesg"},
    ),
    "run-waiting": CodeEntry(
        "wait",
        "waits for {waiting}",
        "The run as a whole waits for something.",
        "A barrier, a checkpoint, or daemons that are not ready.",
        "`dlctl logs NAME` of the daemon that it names.",
        {"": "dlctl logs coordinator -j {run}"},
    ),
    "run-failed": CodeEntry(
        "error",
        "failed[: {reason}]",
        "The run has failed.",
        "The first line of `dlctl status` shows the reason.",
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
    """`text` without the daemon."""
    return fill(CODES[problem.code].text, shown(problem, now)) or problem.code


def fill(template: str, facts: Mapping[str, str]) -> str:
    """The template with its facts; "" if a fact outside of brackets is missing."""
    parts = []
    for number, part in enumerate(_BRACKETS.split(template)):
        try:
            parts.append(part.format_map(facts))
        except KeyError:
            if number % 2 == 0:
                return ""
    return "".join(parts)


def shown(problem: Problem, now: float) -> dict[str, str]:
    """The facts for display: times as the time left until then, sizes with units."""
    found = {key: _shown(key, value, now) for key, value in problem.facts.items()}
    if problem.since is not None:
        found["age"] = values.duration(now - problem.since)
    return found | {"daemon": problem.daemon}


def _shown(key: str, value: Any, now: float) -> str:
    if values.number(value) is None:
        return place(str(value)) if key == "place" else str(value)
    if key.endswith("_at"):
        return values.duration(value - now)
    if key.endswith("_bytes_per_s"):
        return values.rate(value)
    if key.endswith("_bytes"):
        return values.size(value)
    return values.duration(value) if key.endswith("_s") else str(value)


def place(text: str) -> str:
    """A line of the task, its path as typed by a user."""
    file, colon, line = text.rpartition(":")
    return f"{values.path(file)}{colon}{line}" if file else line
