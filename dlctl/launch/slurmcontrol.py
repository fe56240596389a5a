"""The job of a coordinator (`control` of the launcher): what `dlctl start` submits in place of
starting the run where it was called.

The job runs `dlctl run JOBFILE` on its node. Before its time limit it submits its successor, kills
the run's daemons on its node, and ends; after the loss of its node Slurm requeues it. In both cases
`dlctl run` continues the run, from the shards that are on the shared file system (`durability =
"disk"`). The name of the job is that of the job file, so that there is one at a time.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError, TimedOut, Unreachable
from dlctl.launch import (
    commands,
    local,
    orderfiles,
    slurmcalls,
    slurmscript,
    slurmtrial,
    slurmwords,
)
from dlctl.launch.slurmrequest import ControlJob
from dlctl.runs import reach as reaching
from dlctl.runs import select
from dlctl.runs.reach import Reach
from dlctl.util import regular

NOTICE_S = 120
"""Slurm's signal comes so long before the time limit, or up to 60 s earlier."""
POLL_S = 0.5
LINGER_S = 5
UNKNOWN = slurmwords.UNKNOWN_JOB
SUCCEED_S = 60.0
"""Time to submit a successor, while Slurm does not answer."""
AGAIN_S = 5.0
BEGAN = "began"
"""File of its directory: the options of the user's `dlctl start` have been used."""
STARTED, OVER = "started", "over"
"""Files of its directory, with the number of the job: the exit code of `dlctl start`; the run has
ended, and the job is about to."""
NAME = "dlctl-control-"
VARIABLE = slurmcalls.PLACE
_BODY = """
export {variable}=$SLURM_JOB_ID
dlctl() {{ {python} -P -m dlctl "$@"; }}
# Without a successor the run trains on, until the limit.
leave() {{ {python} -P -m dlctl.launch.slurmcontrol {file} {directory} && exit 0; }}
trap leave USR1
trap : TERM  # Of scancel: every process of the job gets it, and the run stops in order.
words=({words})
[ "{attempt}" = 0 ] && [ ! -e {directory}/{began} ] || words=()
touch {directory}/{began}
# Its daemons are its children: so Slurm finds them.
dlctl run --progress plain "${{words[@]}}" {file} > {directory}/start.log 2>&1 &
run=$!
code=0
until dlctl wait --for ready -j {file} --timeout 5s > /dev/null 2>&1; do
    kill -0 $run 2> /dev/null || {{ wait $run; code=$?; break; }}
    sleep 0.5
done
cd {directory} && echo $code > .{started} && mv -f .{started} {started}.$SLURM_JOB_ID
# A signal interrupts `wait`, not the run.
while wait $run; code=$?; [ $code -gt 128 ] && kill -0 $run 2> /dev/null; do :; done
trap "" USR1
touch {directory}/{over}.$SLURM_JOB_ID
sleep {linger}  # A command that runs here, such as the one that has stopped the run, ends first.
exit $code
"""


class SlurmControl(NamedTuple):
    """The control job of a job file."""

    asked: ControlJob
    file: Path
    name: str
    directory: Path
    queue_s: float
    """The longest wait in the queue."""

    @property
    def is_here(self) -> bool:
        """Whether this process is in a control job."""
        return bool(here())

    def reach(self, number: str) -> Reach:
        return reach(number)

    def trial(self) -> tuple[str, ...]:
        return slurmtrial.control(self.asked, VARIABLE)

    def find(self) -> tuple[str, str]:
        """Its number and its state with the reason, as in ("17", "PENDING Resources"); ("", ""):
        there is none, or one that is about to end. Raises Unreachable if Slurm does not answer, and
        DlctlError.
        """
        found = [row for row in _queue(self.name) if not self._is_ending(*row)]
        found.sort(key=lambda row: not row[1].startswith("RUNNING"))
        return found[0] if found else ("", "")

    def _is_ending(self, number: str, state: str) -> bool:
        if state.startswith(slurmwords.COMPLETING) or self._mark(OVER, number).exists():
            return True
        started = self.started(number)
        return started is not None and (started[0] != 0 or self._is_run_over())

    def _is_run_over(self) -> bool:
        with suppress(DlctlError):
            return reaching.is_over(select.directory(str(self.file), quiet=True))
        return False

    def _mark(self, kind: str, number: str) -> Path:
        return self.directory / f"{kind}.{number}"

    def submit(self, words: Sequence[str]) -> str:
        """Submit it; returns its number. words: options of its first `dlctl start`. Raises
        DlctlError.
        """
        if self.directory.exists():
            orderfiles.check(self.directory)
        else:
            orderfiles.make(self.directory, slurmwords.SHARED)
        (self.directory / BEGAN).unlink(missing_ok=True)
        there = {number for number, _ in _queue(self.name)}
        for left in (*self.directory.glob(f"{STARTED}.*"), *self.directory.glob(f"{OVER}.*")):
            if left.suffix.removeprefix(".") not in there:  # The last job may be about to end.
                left.unlink(missing_ok=True)
        script = self.directory / slurmscript.SCRIPT
        script.write_text(render(self, words))
        output = _run(_submit_argv(script))
        number = slurmwords.job_id(output)
        if not number:
            raise slurmwords.refused(output)
        return number

    def started(self, number: str) -> tuple[int, str] | None:
        """The exit code and the output of `dlctl start` in the job; None: it is not over."""
        try:
            code = int(regular.read_bytes(self._mark(STARTED, number)))
            said = regular.read_bytes(self.directory / "start.log").decode(errors="replace")
        except (OSError, ValueError):
            return None
        return code, said

    def wait(
        self, number: str, tell: Callable[[str], None], limit_s: float | None
    ) -> tuple[int, str]:
        """Wait until the run has started there: the exit code and the output of `dlctl start`.
        tell: receives the states of the job. limit_s: None: as long as it may wait in the queue.
        Raises DlctlError if the job ends before, and TimedOut.
        """
        limit_s = self.queue_s if limit_s is None else limit_s
        until, before = time.monotonic() + limit_s, ""
        while (answer := self.started(number)) is None:
            facts = slurmwords.read(_run(slurmcalls.show_argv(number)))
            if facts is not None and facts.is_over:
                why = slurmwords.ending(number, facts, "")
                log = self.directory / slurmscript.LOG
                raise DlctlError(why, where=f"job {number}", hint=f"its output: {log}")
            if facts is not None and (text := slurmwords.waiting(number, facts)) != before:
                before = text
                tell(text)
            if time.monotonic() > until:
                raise TimedOut(
                    f"{before or f'job {number}'}; the run has not started within {limit_s:g} s",
                    where=f"job {number}",
                    hint=f"the job stays; dlctl start waits for it again, scancel {number} ends it",
                )
            time.sleep(POLL_S)
        return answer


def of(asked: ControlJob, file: Path, root: Path, queue_s: float) -> SlurmControl:
    """root: see `slurmcalls.root`."""
    file = Path(select.job_file(file))
    name = f"{NAME}{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    return SlurmControl(asked, file, name, root / name, queue_s)


def reach(number: str) -> Reach:
    return Reach(
        "slurm", f"the control job {number}", VARIABLE, number,
        ("squeue", "--noheader", "-j", number, "--format=%T %r"), UNKNOWN,
        (
            "srun", f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet",
            f"--export=ALL,{VARIABLE}={number}",
        ),
    )  # fmt: skip


def reached(number: str) -> Reach | None:
    """The same for a number on record; None: it is none."""
    return reach(number) if number.isascii() and number.isdecimal() else None


def here() -> str:
    """The number of the control job that this process is in; "": it is in none."""
    return os.environ.get(VARIABLE, "")


def render(control: SlurmControl, words: Sequence[str]) -> str:
    asked, directory, file = control.asked, control.directory, control.file
    given = {
        "job-name": control.name,
        "nodes": 1,
        "ntasks": 1,
        "partition": asked.partition,
        "time": slurmscript.minutes(asked.time),
        "account": asked.account,
        "qos": asked.qos,
        "cpus-per-task": asked.cpus,
        "mem": asked.memory,
        "signal": f"B:USR1@{NOTICE_S}" if asked.time else "",
        "output": str(directory / slurmscript.LOG).replace("%", "%%"),
        "open-mode": "append",
        "chdir": str(file.parent),
    }
    options = slurmscript.lines(given, ["--requeue"])
    body = _BODY.format(
        variable=VARIABLE, python=shlex.quote(sys.executable), attempt=slurmscript.ATTEMPT,
        file=shlex.quote(str(file)), directory=shlex.quote(str(directory)),
        words=shlex.join(words), began=BEGAN, started=STARTED, over=OVER, linger=LINGER_S,
    )  # fmt: skip
    return f"#!/bin/bash\n{options}{body}"


def _run(argv: list[str]) -> commands.CommandOutput:
    try:
        return commands.wait(argv, slurmcalls.COMMAND_S, slurmcalls.environment())
    except OSError as error:
        raise slurmwords.not_run(error) from error


def _submit_argv(script: Path) -> list[str]:
    """One control job of a job file at a time: the next one waits for the end of the last."""
    sbatch, *more = slurmcalls.submit_argv(script)
    return [sbatch, "--dependency=singleton", *more]


def _queue(name: str) -> list[tuple[str, str]]:
    """(number, state with the reason) of the jobs of this name. Raises Unreachable, DlctlError."""
    output = _run(["squeue", "--noheader", "--me", f"--name={name}", "--format=%A %T %r"])
    if output.status:
        what = output.last_line() or "no answer"
        hint = "check with sinfo that Slurm answers"
        raise Unreachable(f"Slurm does not report its queue: {what}", where="squeue", hint=hint)
    rows = [line.strip().partition(" ") for line in output.out.splitlines() if line.strip()]
    return [(number, state.removesuffix(" None")) for number, _, state in rows]


# ---------------------------------------------------------------- at the end of the job


def cancel(number: str) -> str:
    """Cancel a control job that waits or runs, unless this process is in it; what was done, or "".
    Raises DlctlError.
    """
    if number == here():
        return ""
    output = _run(["squeue", "--noheader", "--me", "-j", number, "--format=%j"])
    if output.status and UNKNOWN not in output.err:
        what = output.last_line() or "no answer"
        raise Unreachable(
            f"Slurm does not report whether the control job {number} exists: {what}",
            where=f"job {number}", hint=f"scancel {number}",
        )  # fmt: skip
    if not output.out.startswith(NAME):
        return ""
    output = _run(["scancel", number])
    if output.status:
        what = f"the control job {number} may still exist: {output.last_line()}"
        raise Unreachable(what, where=f"job {number}", hint=f"scancel {number}")
    return f"the control job {number} is cancelled"


def leave(file: Path, orders: Path) -> bool:
    """Hand the run over to the next control job, and kill its daemons on this node: asked to end in
    order, they would stop it. False: there is nothing to hand over, or Slurm takes no next job.
    orders: the directory of the control job.
    """
    directory = select.directory(str(file), quiet=True)
    if reaching.is_over(directory):
        return False
    number = _succeeded(orders)
    if not number:
        return False
    # A stop may end at any moment until the daemons are gone. While Slurm did not answer it has
    # found this job only, and the next one would train the run that it has stopped.
    if not reaching.is_over(directory):
        reach(number).write(directory)
        local.kill_all(directory)
        if not reaching.is_over(directory):
            return True
    _withdraw(number)
    return False


def _withdraw(number: str) -> None:
    """Cancel the next control job; it waits for the end of this one. Tries again while Slurm does
    not answer.
    """
    until = time.monotonic() + SUCCEED_S
    while True:
        try:
            cancel(number)
        except DlctlError as error:
            print(f"{error}; next: {error.hint}", file=sys.stderr, flush=True)
        else:
            return
        if time.monotonic() >= until:
            return
        time.sleep(AGAIN_S)


def _succeeded(orders: Path) -> str:
    """Submit the next control job; its number, or "" if Slurm does not take it in time."""
    until = time.monotonic() + SUCCEED_S
    while True:
        output = _run(_submit_argv(orders / slurmscript.SCRIPT))
        if number := slurmwords.job_id(output):
            return number
        print(slurmwords.refused(output).message, file=sys.stderr, flush=True)
        with suppress(DlctlError):  # It may have been accepted, without an answer.
            for number, state in _queue(orders.name):
                if number != here() and state.startswith("PENDING"):
                    return number
        if time.monotonic() >= until:
            return ""
        time.sleep(AGAIN_S)


if __name__ == "__main__":
    sys.exit(0 if leave(Path(sys.argv[1]), Path(sys.argv[2])) else 1)
