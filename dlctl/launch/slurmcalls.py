"""The Slurm job of a run: which one it is, and what commands may do with it, who can wait.

`slurm.json` in the run directory says it: written before the job is submitted, so that a job is
found again whatever dies between. A job has a name that no other one has.
"""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError, Unreachable
from dlctl.launch import commands, slurmfiles, slurmscript, slurmwords
from dlctl.launch.slurmwords import Facts
from dlctl.util import hints

HANDLE = "slurm.json"
COMMAND_S = 20.0
"""For a command of Slurm's: by its own configuration it waits up to 10 s for the controller."""
ORDERLY_S = 8.0
"""For the keepers to see that the run is over; then the job is cancelled."""
CANCEL_S = 5.0
POLL_S = 0.5


class Handle(NamedTuple):
    """A job that was submitted, or is about to be."""

    directory: Path
    """Of its orders, see `slurmfiles`."""
    name: str
    """As squeue shows it."""
    job_id: str = ""
    """"": Slurm has not said it yet."""

    def write(self, run_directory: Path) -> None:
        """Raises OSError."""
        value = {**self._asdict(), "directory": str(self.directory)}
        slurmfiles.write(run_directory / HANDLE, value)

    def forget(self, run_directory: Path) -> None:
        """There is no such job any more: nor are its directory and the word of it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        (run_directory / HANDLE).unlink(missing_ok=True)


def new_handle(run_id: str, root: Path) -> Handle:
    """Of a job that was never there before."""
    token = secrets.token_hex(3)
    return Handle(root / f"{run_id}-{token}", f"dlctl-{run_id}-{token}")


def read_handle(run_directory: Path) -> Handle | None:
    """None: this run has no job."""
    value = slurmfiles.read(run_directory / HANDLE)
    with suppress(KeyError, TypeError):
        return Handle(Path(value["directory"]), str(value["name"]), str(value["job_id"]))
    return None


def show_argv(job_id: str) -> list[str]:
    return ["scontrol", "-o", "show", "job", job_id]


def find_argv(name: str) -> list[str]:
    """Prints the number of the job with this name, if there is one that has not ended."""
    return ["squeue", "--noheader", "--me", f"--name={name}", "--format=%A"]


def submit_argv(script: Path) -> list[str]:
    """Prints the number of the job, and perhaps a cluster's name behind a semicolon."""
    return ["sbatch", "--parsable", str(script)]


def address_of_a_node(partition: str) -> str:
    """An address on the way to the nodes. Raises as `nodes` does."""
    return nodes(partition)[0]


def nodes(partition: str) -> list[str]:
    """Of a partition, "": of all. Raises DlctlError if Slurm does not say which there are."""
    only = [f"--partition={partition}"] if partition else []
    try:
        said = commands.wait(["sinfo", "-h", "-N", "-o", "%o", *only], COMMAND_S)
    except OSError as error:
        raise slurmwords.not_run(error) from error
    if said.status or not said.out.split():
        what = said.last_line() or "it knows no node" + (f" in {partition}" if partition else "")
        raise DlctlError(
            f"Slurm does not say which nodes it has: {what}",
            where="[slurm]",
            hint="sinfo has to answer here, as on a login node of the cluster, and partition in "
            "[slurm] has to be one of its partitions",
        )
    return said.out.split()


# ---------------------------------------------------------------- the end of a job


def end(run_directory: Path, *, at_once: bool = False) -> None:
    """See to it that the job is over, and remove its directory. Without a job nothing is done.

    The keepers end by themselves; what is left after that is cancelled. at_once: without waiting
    for that. Raises Unreachable if the job is still there, or nobody can say so, and DlctlError.
    """
    handle = read_handle(run_directory)
    if handle is None:
        return
    _write_intent(handle)
    try:
        _end_job(handle, 0.0 if at_once else ORDERLY_S)
    except OSError as error:
        raise slurmwords.not_run(error) from error
    _keep_log(handle, run_directory)
    handle.forget(run_directory)


def _keep_log(handle: Handle, run_directory: Path) -> None:
    """What the job has printed, if anything: nobody else says why no keeper could be started."""
    log = handle.directory / slurmscript.LOG
    with suppress(OSError):
        if log.stat().st_size:
            shutil.copyfile(log, run_directory / f"slurm-{handle.job_id or handle.name}.log")


def _write_intent(handle: Handle) -> None:
    """From now on no keeper starts anything; nor are the keys of agents needed any more."""
    with suppress(OSError):  # Without it the job is cancelled.
        slurmfiles.write(handle.directory / slurmfiles.OVER, {})
        for order in handle.directory.glob("*.order"):
            order.unlink(missing_ok=True)


def _end_job(handle: Handle, orderly_s: float) -> None:
    job_id = handle.job_id or find(handle)
    if not job_id:
        return
    facts = _wait_until_over(job_id, orderly_s)
    if facts is None or not facts.is_over:
        said = commands.wait(["scancel", job_id], COMMAND_S)
        facts = _wait_until_over(job_id, CANCEL_S, more_for_completing=True)
        if facts is None or not facts.is_over:
            words = said.last_line() or (facts.state if facts else "Slurm does not answer")
            raise Unreachable(
                f"the Slurm job {job_id} may still be there: {words}",
                where=f"job {job_id}",
                hint=hints.either(f"squeue -j {job_id}", f"scancel {job_id}"),
            )


def find(handle: Handle) -> str:
    """The number of a job that was submitted by somebody who died before he could note it; "" if
    there is none. Raises Unreachable if Slurm does not say it, and OSError.
    """
    said = commands.wait(find_argv(handle.name), COMMAND_S)
    if said.status:
        words = said.last_line() or "no answer"
        raise Unreachable(
            f"Slurm does not say whether the job {handle.name} is there: {words}",
            where="squeue",
            hint=f"sinfo says whether Slurm answers; then: squeue --name={handle.name}",
        )
    return next(iter(said.out.split()), "")


def _wait_until_over(
    job_id: str, timeout_s: float, *, more_for_completing: bool = False
) -> Facts | None:
    """The last that is known; None if Slurm does not answer. A job that waits is not waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        facts = slurmwords.read(commands.wait(show_argv(job_id), COMMAND_S))
        if facts is not None and (facts.is_over or facts.waits):
            return facts
        if time.monotonic() >= deadline:
            if not (
                more_for_completing and facts is not None and facts.state == slurmwords.COMPLETING
            ):
                return facts
            more_for_completing, deadline = False, deadline + CANCEL_S
        time.sleep(POLL_S)
