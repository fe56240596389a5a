"""Parses Slurm's output about a job, and describes it in words. This module starts nothing.

The source is `scontrol -o show job ID`, not sacct: many clusters have no accounting. It knows a job
until a few minutes after its end.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dlctl.errors import DlctlError, Unreachable
from dlctl.launch import answers
from dlctl.launch.commands import LATE, CommandOutput

WHERE = "launcher slurm"
"""The launcher's section of the job file, whichever form that has."""
SHARED = f"set dir of {WHERE} to a directory that this machine and all nodes share"
UNKNOWN_JOB, ENDED_JOB = "Invalid job id", "already completing or completed"
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
AT_WORK = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "COMPLETING")
COMPLETING = "COMPLETING"
"""The processes of the job are being terminated, also before a requeue."""
GONE = "GONE"
"""State of a job that Slurm does not know any more."""
NO_OUTPUT = ":53"
"""The signal part of an exit code if Slurm could not open the job's output file."""
TAKEN_AWAY = ("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", "REVOKED", "NODE_FAIL")
"""States in which the job's last output is an effect of its end, not the cause."""
_WORDS = {
    "CANCELLED": "was cancelled, and not by dlctl",
    "TIMEOUT": "has reached its time limit",
    "DEADLINE": "has reached its deadline",
    "NODE_FAIL": "has ended because a node has failed",
    "BOOT_FAIL": "could not start: a node did not boot",
    "PREEMPTED": "was preempted by another job",
    "OUT_OF_MEMORY": "has ended because it ran out of memory",
    "REVOKED": "was moved to another cluster",
    "COMPLETED": "has ended: no agent is left in it",
    GONE: "is not known to Slurm any more",
}
_KEY = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9/:_-]*)=")


class JobFacts(NamedTuple):
    """The current state of a job, as Slurm reports it."""

    state: str
    reason: str = ""
    """Why the job waits; "" for none."""
    restarts: int = 0
    nodes: str = ""
    """The nodes of the job as Slurm writes them: "n[1-3]"."""
    time_limit: str = ""
    left_s: float | None = None
    """Seconds until its time limit; None: no limit, or not running."""
    exit_code: str = ""
    """ "CODE:SIGNAL"."""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def is_at_work(self) -> bool:
        return self.state in AT_WORK

    @property
    def is_over(self) -> bool:
        return not self.waits and not self.is_at_work


def read(output: CommandOutput) -> JobFacts | None:
    """None: unknown, because Slurm's controller does not answer."""
    if output.status != 0:
        return JobFacts(GONE) if UNKNOWN_JOB in output.err else None
    found = fields(output.out)
    if "JobState" not in found:
        return None
    limit = found.get("TimeLimit", "")
    run_s, limit_s = seconds(found.get("RunTime", "")), seconds(limit)
    restarts = found.get("Restarts", "0")
    return JobFacts(
        state=found["JobState"].partition(" ")[0],
        reason=_or_nothing(found.get("Reason", "")),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        nodes=_or_nothing(found.get("NodeList", "")),
        time_limit=limit,
        left_s=None if run_s is None or limit_s is None else limit_s - run_s,
        exit_code=found.get("ExitCode", ""),
    )


def fields(line: str) -> dict[str, str]:
    """Parse KEY=VALUE pairs separated by spaces; a value may contain spaces and "="."""
    line = line.strip()
    found = list(_KEY.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)][: len(found)]
    values: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        # A comment, which comes late, may contain text like a pair: the first pair counts.
        values.setdefault(match[1], line[match.end() : end].strip())
    return values


def _or_nothing(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A") else text


def seconds(text: str) -> float | None:
    """ "[DAYS-]HOURS:MINUTES:SECONDS" in seconds; None for UNLIMITED and any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if not match:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


# ---------------------------------------------------------------- in words


def waiting(job_id: str, facts: JobFacts) -> str:
    """Why a job waits, for `status`: "job 17 is pending: Resources"."""
    what = f"job {job_id} is {facts.state.lower().replace('_', ' ')}"
    again = " again" if facts.restarts else ""
    return f"{what}{again}: {facts.reason}" if facts.reason else f"{what}{again}"


def ending(job_id: str, facts: JobFacts, last_line: str) -> str:
    """Why a job is over, with Slurm's name of its state; `last_line`: of the job's output."""
    known = _WORDS.get(facts.state)
    words = known or f"has failed (exit {facts.exit_code.partition(':')[0]})"
    if facts.exit_code.endswith(NO_OUTPUT):
        words = f"could not write its output: dir of {WHERE} has to be on a shared file system"
    limit = f" of {facts.time_limit}" if facts.state == "TIMEOUT" else ""
    is_cause = last_line and facts.state not in TAKEN_AWAY
    output = f": {last_line}" if is_cause else ""
    return f"the Slurm job {job_id} {words}{limit} ({facts.state}){output}"


def job_id(output: CommandOutput) -> str:
    """The job id that sbatch --parsable has printed, perhaps after other output and before the
    cluster's name; "" if there is none.
    """
    last = output.out.split()[-1:] if output.status == 0 else []
    number = last[0].partition(";")[0] if last else ""
    return number if number.isascii() and number.isdecimal() else ""


def in_our_terms(error: DlctlError) -> DlctlError:
    """Replace the keys of [[hosts]] in another machine's hint by those of this launcher."""
    return answers.of_launcher(error, WHERE, directory="scratch")


def refused(output: CommandOutput) -> DlctlError:
    """The error if sbatch has refused the job."""
    lines = [line.strip().removeprefix("sbatch: error: ") for line in output.err.splitlines()]
    words = "; ".join(filter(None, lines)) or f"exit {output.status}"
    text = f"Slurm has refused the job: {words}"
    if is_unclear(output) or "Unable to contact" in output.err:
        return Unreachable(text, where="sbatch", hint="check with sinfo that Slurm answers")
    exists = "sinfo -s and sacctmgr show assoc list what exists"
    hint = f"correct the keys of {WHERE} in the job file; {exists}"
    return DlctlError(text, where=WHERE, hint=hint)


def is_ended(output: CommandOutput) -> bool:
    """Whether scancel has found no job that could be cancelled."""
    return UNKNOWN_JOB in output.err or ENDED_JOB in output.err


def is_unclear(output: CommandOutput) -> bool:
    """Whether the controller may have accepted the job although sbatch does not know."""
    return output.status == LATE or (output.status != 0 and "timed out" in output.err)


def not_run(error: OSError) -> DlctlError:
    """The error if a Slurm command could not be run."""
    if not isinstance(error, FileNotFoundError):
        text = f"cannot run Slurm's commands: {error.strerror or error}"
        return DlctlError(text, where="this machine")
    return DlctlError(
        f"this machine has no Slurm commands: {error.filename or error}",
        where=WHERE,
        hint="start the job where sbatch is installed, such as a login node of the cluster",
    )
