"""What Slurm says of a job, read, and said again in words. Nothing is started here.

`scontrol -o show job ID` is asked, and not sacct: many clusters have no accounting. It knows a job
until a few minutes after its end.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dlctl.errors import DlctlError, Unreachable
from dlctl.launch.commands import LATE, Said

UNKNOWN_JOB = "Invalid job id"
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
AT_WORK = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "COMPLETING")
COMPLETING = "COMPLETING"
"""Its processes are being ended, also before it is queued again."""
GONE = "GONE"
"""Of a job that Slurm does not know any more."""
NO_OUTPUT = ":53"
"""The signal in an exit code that no job gets: the file for what it prints could not be opened."""
TAKEN_AWAY = ("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", "REVOKED", "NODE_FAIL")
"""What the job has printed then is of its end, and not of the reason for it."""
_WORDS = {
    "CANCELLED": "was cancelled, and not by dlctl",
    "TIMEOUT": "has reached its time limit",
    "DEADLINE": "has reached its deadline",
    "NODE_FAIL": "has ended because a node has failed",
    "BOOT_FAIL": "could not begin: a node did not start",
    "PREEMPTED": "had to make room for another job",
    "OUT_OF_MEMORY": "has ended because it ran out of memory",
    "REVOKED": "was taken to another cluster",
    "COMPLETED": "has ended: no agent is left in it",
    GONE: "is not known to Slurm any more",
}
_KEY = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9/:_-]*)=")


class Facts(NamedTuple):
    """A job as Slurm sees it now."""

    state: str
    reason: str = ""
    """Why it waits; "" for none."""
    restarts: int = 0
    nodes: str = ""
    """As Slurm writes them: "n[1-3]"."""
    time_limit: str = ""
    left_s: float | None = None
    """Seconds until its time limit; None: it has none, or does not run."""
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


def read(said: Said) -> Facts | None:
    """None: Slurm cannot say it now, because its controller does not answer."""
    if said.status != 0:
        return Facts(GONE) if UNKNOWN_JOB in said.err else None
    fields = _fields(said.out)
    if "JobState" not in fields:
        return None
    limit = fields.get("TimeLimit", "")
    run_s, limit_s = seconds(fields.get("RunTime", "")), seconds(limit)
    restarts = fields.get("Restarts", "0")
    return Facts(
        state=fields["JobState"].partition(" ")[0],
        reason=_or_nothing(fields.get("Reason", "")),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        nodes=_or_nothing(fields.get("NodeList", "")),
        time_limit=limit,
        left_s=None if run_s is None or limit_s is None else limit_s - run_s,
        exit_code=fields.get("ExitCode", ""),
    )


def _fields(line: str) -> dict[str, str]:
    """KEY=VALUE with spaces between; a value may hold spaces and even "=" itself."""
    line = line.strip()
    found = list(_KEY.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)][: len(found)]
    values: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        # A job's name comes second and its comment late: the first one counts.
        values.setdefault(match[1], line[match.end() : end].strip())
    return values


def _or_nothing(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A") else text


def seconds(text: str) -> float | None:
    """ "[DAYS-]HOURS:MINUTES:SECONDS"; None for UNLIMITED and what is no such text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if not match:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


# ---------------------------------------------------------------- in words


def waiting(job_id: str, facts: Facts) -> str:
    """As `status` shows it: "job 17 is pending: Resources"."""
    what = f"job {job_id} is {facts.state.lower().replace('_', ' ')}"
    again = " again" if facts.restarts else ""
    return f"{what}{again}: {facts.reason}" if facts.reason else f"{what}{again}"


def ending(job_id: str, facts: Facts, last_line: str) -> str:
    """Why a job is over, with Slurm's own word for it; `last_line`: of what it has printed."""
    known = _WORDS.get(facts.state)
    words = known or f"has failed (exit {facts.exit_code.partition(':')[0]})"
    if facts.exit_code.endswith(NO_OUTPUT):
        words = "could not write into its directory: dir in [slurm] has to be one that nodes share"
    limit = f" of {facts.time_limit}" if facts.state == "TIMEOUT" else ""
    is_told = last_line and facts.state not in TAKEN_AWAY
    said = f": {last_line}" if is_told else ""
    return f"the Slurm job {job_id} {words}{limit} ({facts.state}){said}"


def job_id(said: Said) -> str:
    """The number that sbatch --parsable has printed, perhaps behind words of others, and before a
    cluster's name; "" if there is none.
    """
    last = said.out.split()[-1:] if said.status == 0 else []
    number = last[0].partition(";")[0] if last else ""
    return number if number.isascii() and number.isdecimal() else ""


def in_our_terms(error: DlctlError) -> DlctlError:
    """What another machine says is said for [[hosts]], where keys are called otherwise."""
    for theirs, ours in (
        ("dir of this host in [[hosts]]", "scratch in [slurm]"),
        (" of this host in [[hosts]]", " in [slurm]"),
        ("[[hosts]]", "[slurm]"),
    ):
        error.hint = error.hint.replace(theirs, ours) if error.hint else error.hint
    return error


def refused(said: Said) -> DlctlError:
    """sbatch has not taken the job."""
    lines = [line.strip().removeprefix("sbatch: error: ") for line in said.err.splitlines()]
    words = "; ".join(filter(None, lines)) or f"exit {said.status}"
    text = f"Slurm has not taken the job: {words}"
    if said.status == LATE or "Unable to contact" in said.err:
        return Unreachable(text, where="sbatch", hint="sinfo says whether Slurm answers")
    hint = "correct [slurm] in the job file; sinfo -s and sacctmgr show assoc say what there is"
    return DlctlError(text, where="[slurm]", hint=hint)


def not_run(error: OSError) -> DlctlError:
    """A command of Slurm's could not be run."""
    if not isinstance(error, FileNotFoundError):
        text = f"cannot run Slurm's commands: {error.strerror or error}"
        return DlctlError(text, where="this machine")
    return DlctlError(
        f"Slurm's commands are not here: {error.filename or error}",
        where="[slurm]",
        hint="start the job where sbatch is, such as a login node of the cluster",
    )
