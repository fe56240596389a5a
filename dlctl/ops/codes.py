"""The codes of problems: what each means, what causes it, and what helps.

A code is stable: programs may compare it. Which run has the problem now, and the command that helps
there, say `status`, `why` and `logs --failed`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Code(NamedTuple):
    what: str
    cause: str
    remedy: str


Name = Literal[
    "coordinator-silent",
    "coordinator-gone",
    "coordinator-restarting",
    "coordinator-restarted",
    "coordinator-unwritable",
    "host-unreachable",
    "daemon-unreachable",
    "heartbeat-late",
    "worker-stuck",
    "daemon-quarantined",
    "daemon-failed",
    "daemon-restarting",
    "daemon-restarted",
    "process-gone",
    "daemon-starting",
    "daemon-leaving",
    "daemon-slow",
    "rate-limit",
    "disk-full",
    "run-waiting",
    "run-failed",
]
CODES: dict[Name, Code] = {
    "coordinator-silent": Code(
        "The coordinator has not answered for longer than its heartbeat allows.",
        "It is stopped (SIGSTOP, a debugger), its machine is overloaded, or its disk hangs.",
        "Its agent replaces it after a few heartbeats. Without an agent: `dlctl stop --kill`, then "
        "`dlctl recover`.",
    ),
    "coordinator-gone": Code(
        "The coordinator's process is not there.",
        "It was killed (SIGKILL, out of memory, a reboot), or it ends as soon as it starts.",
        "A living agent starts the next one, which goes on where it was. If nobody does: "
        "`dlctl recover`. If it ends at once, `dlctl logs coordinator -l error` says why.",
    ),
    "coordinator-restarting": Code(
        "The next coordinator is starting and has not said anything yet.",
        "The one before has died, or was restarted on request.",
        "Wait: it goes on where it was. `dlctl logs coordinator --previous` has last words.",
    ),
    "coordinator-restarted": Code(
        "A coordinator has taken the place of the one before; nothing is lost.",
        "The one before has died, or was restarted on request.",
        "Nothing is to be done. `dlctl logs coordinator --previous` has last words.",
    ),
    "coordinator-unwritable": Code(
        "The coordinator works, and cannot write the run's database.",
        "The disk of the run directory is full, read-only, or dead.",
        "Make room there, or mount it again. Training goes on meanwhile; what dies has no next "
        "process before this can be written.",
    ),
    "host-unreachable": Code(
        "The agent of a host cannot be reached.",
        "The network, the host, or its ssh login is down.",
        "`dlctl doctor JOBFILE` says what is wrong. After the timeout its workers start on other "
        "hosts; a run whose server was there fails, and `dlctl recover` waits for the host.",
    ),
    "daemon-unreachable": Code(
        "A daemon does not answer, and neither does its host.",
        "The network, or the host, is down.",
        "See host-unreachable: the decision is about the whole host.",
    ),
    "heartbeat-late": Code(
        "Nothing was heard of a daemon for longer than usual.",
        "Its machine is overloaded or swaps, its process is stopped, or its link hangs.",
        "Wait: after the heartbeat timeout it is replaced. `dlctl logs NAME` says what it was at.",
    ),
    "worker-stuck": Code(
        "A worker has been in one batch for far longer than its others took.",
        "A line of the task does not come back: a lock, a network call, a data loader.",
        "Correct the line that `status` names, then `dlctl restart NAME`.",
    ),
    "daemon-quarantined": Code(
        "A daemon is not started again, since it has failed too often in a row.",
        "Its host, its data, or the task makes it fail each time.",
        "See why with `dlctl logs NAME --previous`, correct that, then `dlctl restart NAME`.",
    ),
    "daemon-failed": Code(
        "A daemon has failed, and with it the run.",
        "The task raised an error, or a daemon without which nobody trains could not go on.",
        "`dlctl logs --failed` has its last words; then as `dlctl status` says.",
    ),
    "daemon-restarting": Code(
        "A daemon's process has ended; the next one starts.",
        "It was killed, ran out of memory, or raised an error.",
        "Wait. A server goes on with its shard, and a worker's data goes to the others.",
    ),
    "daemon-restarted": Code(
        "A daemon's process has ended, and the next one is at work.",
        "It was killed, ran out of memory, or raised an error.",
        "Nothing is to be done, unless it comes again: `dlctl logs NAME --previous`.",
    ),
    "process-gone": Code(
        "A daemon's process is not there, and nobody has noticed yet.",
        "It was killed a moment ago, or its coordinator is gone, too.",
        "Wait a moment; without a coordinator: `dlctl recover`.",
    ),
    "daemon-starting": Code(
        "Others wait for a daemon that is starting.",
        "It imports torch, builds the model, or reads its data.",
        "Wait; `dlctl logs NAME` says what it is at.",
    ),
    "daemon-leaving": Code(
        "Others wait for a daemon that drains before it leaves.",
        "`dlctl scale` or `dlctl stop` was asked for: its last pushes are on their way.",
        "Wait.",
    ),
    "daemon-slow": Code(
        "Others wait for a daemon that is well, and slower than they are.",
        "A slower machine or link, or more work than the others have.",
        "A method that does not wait, smaller batches there, or more steps between pushes.",
    ),
    "rate-limit": Code(
        "A limit of pushes or fetches holds workers back.",
        "Somebody has set it, in the job file or with `dlctl set`.",
        "`dlctl set 'worker-*' push=...` raises it.",
    ),
    "disk-full": Code(
        "The disk of the run directory has no room.",
        "Logs, checkpoints, or something else fill it.",
        "Make room: `dlctl checkpoint prune` removes checkpoints that are not needed.",
    ),
    "run-waiting": Code(
        "The run as a whole waits for somebody.",
        "A barrier, a checkpoint, or daemons that are not ready.",
        "`dlctl logs NAME` of whom it names.",
    ),
    "run-failed": Code(
        "The run has failed.",
        "Its reason says so; the first line of `dlctl status` shows it.",
        "`dlctl logs --failed`, then the next command of `dlctl status`.",
    ),
}
