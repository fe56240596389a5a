"""The job of a coordinator (`control` of the launcher): what `dlctl start` submits in place of
starting the run where it was called.

The job runs `dlctl run JOBFILE` on its node. Before its time
limit it submits its successor, kills the run's daemons on its node, and ends; after the loss of its
node Slurm requeues it. In both cases `dlctl run` continues the run, from the shards that are on
the shared file system (`durability = "disk"`). The name of the job is that of the job file, so that
there is one at a time.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError, Unreachable
from dlctl.launch import commands, local, orderfiles, slurmcalls, slurmscript, slurmwords
from dlctl.launch.slurmrequest import ControlJob
from dlctl.runs import select
from dlctl.runs.reach import Reach
from dlctl.util import processes, regular

NOTICE_S = 120
"""Slurm's signal comes so long before the time limit, or up to 60 s earlier."""
POLL_S = 0.5
LINGER_S = 5
BEGAN = "began"
"""File of its directory: the options of the user's `dlctl start` have been used."""
VARIABLE = "DLCTL_CONTROL_JOB"
"""Of the environment in the job: its number."""
_BODY = """
export {variable}=$SLURM_JOB_ID
dlctl() {{ {python} -P -m dlctl "$@"; }}
leave() {{
    sbatch --dependency=singleton --parsable {script} > {directory}/successor
    {python} -P -m dlctl.launch.slurmcontrol {file}
    exit 0
}}
trap leave USR1
words={words}
[ "{attempt}" = 0 ] && [ ! -e {directory}/{began} ] || words=
touch {directory}/{began}
# Its daemons are its children: so Slurm finds them.
eval "dlctl run --progress plain $words {file}" > {directory}/start.log 2>&1 &
run=$!
code=0
until dlctl wait --for ready -j {file} --timeout 5s > /dev/null 2>&1; do
    kill -0 $run 2> /dev/null || {{ wait $run; code=$?; break; }}
    sleep 0.5
done
echo $code > {directory}/.started && mv -f {directory}/.started {directory}/started.$SLURM_JOB_ID
wait $run
code=$?
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

    def find(self) -> tuple[str, str]:
        """Its number and its state with the reason, as in ("17", "PENDING Resources"); ("", ""):
        there is none. Raises Unreachable if Slurm does not answer, and DlctlError.
        """
        argv = ["squeue", "--noheader", "--me", f"--name={self.name}", "--format=%A %T %r"]
        output = _run(argv)
        if output.status:
            what = output.last_line() or "no answer"
            raise Unreachable(f"Slurm does not report its queue: {what}", where="squeue")
        lines = sorted(output.out.splitlines(), key=lambda line: "RUNNING" not in line)
        number, _, state = lines[0].strip().partition(" ") if lines else ("", "", "")
        return number, state.removesuffix(" None")

    def submit(self, words: Sequence[str]) -> str:
        """Submit it; returns its number. words: options of its first `dlctl start`. Raises
        DlctlError.
        """
        if self.directory.exists():
            orderfiles.check(self.directory)
        else:
            orderfiles.make(self.directory, slurmwords.SHARED)
        for left in (self.directory / BEGAN, *self.directory.glob("started.*")):
            left.unlink(missing_ok=True)
        script = self.directory / slurmscript.SCRIPT
        script.write_text(render(self, words))
        output = _run(slurmcalls.submit_argv(script))
        number = slurmwords.job_id(output)
        if not number:
            raise slurmwords.refused(output)
        return number

    def started(self, number: str) -> tuple[int, str] | None:
        """The exit code and the output of `dlctl start` in the job; None: it is not over."""
        try:
            code = int(regular.read_bytes(self.directory / f"started.{number}"))
            said = regular.read_bytes(self.directory / "start.log").decode(errors="replace")
        except (OSError, ValueError):
            return None
        return code, said

    def wait(self, number: str, tell: Callable[[str], None]) -> tuple[int, str]:
        """Wait until the run has started there: the exit code and the output of `dlctl start`.
        tell: receives the states of the job. Raises DlctlError if the job ends before.
        """
        until, before = time.monotonic() + self.queue_s, ""
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
                raise Unreachable(
                    f"{before or f'job {number}'} for {self.queue_s:.0f} s",
                    where=f"job {number}", hint=f"it stays in the queue; scancel {number}",
                )  # fmt: skip
            time.sleep(POLL_S)
        return answer


def of(asked: ControlJob, file: Path, root: Path, queue_s: float) -> SlurmControl:
    """root: see `slurmcalls.root`."""
    file = Path(select.job_file(file))
    name = f"dlctl-control-{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    return SlurmControl(asked, file, name, root / name, queue_s)


def reach(number: str) -> Reach:
    return Reach(
        f"the control job {number}", VARIABLE, number,
        ("squeue", "--noheader", "-j", number, "--format=%T %r"),
        (
            "srun", f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet",
            f"--export=ALL,{VARIABLE}={number}",
        ),
    )  # fmt: skip


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
        script=shlex.quote(str(directory / slurmscript.SCRIPT)), file=shlex.quote(str(file)),
        directory=shlex.quote(str(directory)), words=shlex.quote(shlex.join(words)),
        began=BEGAN, linger=LINGER_S,
    )  # fmt: skip
    return f"#!/bin/bash\n{options}{body}"


def _run(argv: list[str]) -> commands.CommandOutput:
    try:
        return commands.wait(argv, slurmcalls.COMMAND_S)
    except OSError as error:
        raise slurmwords.not_run(error) from error


# ---------------------------------------------------------------- at the end of the job


def leave(file: Path) -> None:
    """Kill the daemons of the run on this node: its successor continues the run. In order they
    would stop it.
    """
    directory = select.directory(str(file), quiet=True)
    for _ in range(3):  # An agent may have started another one meanwhile.
        for daemon in local.living(directory):
            processes.send_signal(daemon.pid, daemon.start, signal.SIGKILL)


if __name__ == "__main__":
    leave(Path(sys.argv[1]))
