"""The Slurm jobs of a run: their handles, and blocking calls on them for commands.

`slurm.json` in the run directory holds the handle of the job of all agents, `slurm-agent-N.json`
that of a job for one agent. A handle is written before the job is submitted, so a
job can be found again after any crash. The name of a job is unique.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError, Unreachable
from dlctl.launch import commands, orderfiles, slurmscript, slurmwords
from dlctl.launch.slurmwords import JobFacts
from dlctl.runs import paths
from dlctl.util import hints, regular
from dlctl.util.fsync import replacing

log = logging.getLogger("dlctl")
HANDLE = "slurm.json"
COMMAND_S = 20.0
"""Timeout of a Slurm command, which by default waits up to 10 s for the controller."""
ORDERLY_S = 8.0
"""Time for the keepers to notice that the run is over; then the job is cancelled."""
CANCEL_S = 5.0
POLL_S = 0.5
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables that say which Slurm is meant. All others of a job describe that job."""
PLACE = "DLCTL_CONTROL_JOB"
"""Variable of a control job (`slurmcontrol`): its number."""


class Handle(NamedTuple):
    """A job that was submitted, or is about to be."""

    directory: Path
    """The directory of the job's orders (`orderfiles`)."""
    name: str
    """The name of the job in squeue."""
    job_id: str = ""
    """"": not known yet."""

    def write(self, run_directory: Path, only: str = "") -> None:
        """Write the handle to the run directory; only: its agent, or "". Raises OSError."""
        value = {**self._asdict(), "directory": str(self.directory)}
        orderfiles.write(_path(run_directory, only), value)

    def forget(self, run_directory: Path, only: str = "") -> None:
        """Remove the directory of a job that no longer exists, and the handle."""
        shutil.rmtree(self.directory, ignore_errors=True)
        _path(run_directory, only).unlink(missing_ok=True)


def _path(run_directory: Path, only: str) -> Path:
    return run_directory / (f"slurm-{only}.json" if only else HANDLE)


def root(given: str) -> Path:
    """The parent of the directories of orders; `given`: `dir` of the options."""
    return Path(given).expanduser() if given else paths.index_dir().parent / "slurm"


def new_handle(run_id: str, root: Path, only: str = "") -> Handle:
    """The handle of a new job, of one agent if `only` names it."""
    name = "-".join(filter(None, (run_id, only, secrets.token_hex(3))))
    return Handle(root / name, f"dlctl-{name}")


def handles(run_directory: Path) -> dict[str, Handle]:
    """The jobs of a run: agent, or "" for the job of all -> handle."""
    files = sorted(
        run_directory.glob("slurm-agent-*.json"), key=lambda file: (len(file.name), file)
    )
    names = ["", *(file.stem.removeprefix("slurm-") for file in files)]
    found = {name: read_handle(run_directory, name) for name in names}
    return {name: handle for name, handle in found.items() if handle is not None}


def read_handle(run_directory: Path, only: str = "") -> Handle | None:
    """The handle in the run directory; None: this run, or agent, has no job."""
    value = orderfiles.read(_path(run_directory, only))
    with suppress(KeyError, TypeError):
        return Handle(Path(value["directory"]), str(value["name"]), str(value["job_id"]))
    return None


def show_argv(job_id: str) -> list[str]:
    return ["scontrol", "-o", "show", "job", job_id]


def cancel_argv(job_id: str) -> list[str]:
    return ["scancel", job_id]


def find_argv(name: str) -> list[str]:
    """Prints the id of the job with this name, unless it has ended."""
    return ["squeue", "--noheader", "--me", f"--name={name}", "--format=%A"]


def submit_argv(script: Path) -> list[str]:
    """Prints the job id, optionally followed by a semicolon and the cluster's name."""
    return ["sbatch", "--parsable", str(script)]


def environment() -> dict[str, str]:
    """For Slurm's commands: that of this process without what describes a job it is in. sbatch
    passes it on, and another job must take neither the size nor the number of restarts from it.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not (name.startswith("SLURM") or name == PLACE)
    }


def nodes(partition: str) -> list[str]:
    """The nodes of a partition; "": of all. Raises DlctlError if Slurm does not list any."""
    only = [f"--partition={partition}"] if partition else []
    try:
        output = commands.wait(["sinfo", "-h", "-N", "-o", "%o", *only], COMMAND_S)
    except OSError as error:
        raise slurmwords.not_run(error) from error
    if output.status or not output.out.split():
        what = output.last_line() or "it knows no node" + (f" in {partition}" if partition else "")
        raise DlctlError(
            f"Slurm does not list its nodes: {what}",
            where=slurmwords.WHERE,
            hint="sinfo has to work on this machine, as on a login node, and partition of launcher "
            "slurm has to be a partition of the cluster",
        )
    return output.out.split()


# ---------------------------------------------------------------- the end of a job


def end(run_directory: Path, *, at_once: bool = False) -> None:
    """End the jobs of a run and remove their directories. Does nothing without a job.

    The keepers exit on their own; after `ORDERLY_S` a job is cancelled. at_once: cancel without
    waiting. Raises Unreachable if a job still exists or its state is unknown, and DlctlError.
    """
    jobs, failed = handles(run_directory), None
    for handle in jobs.values():
        _write_intent(handle)
    numbers: dict[str, str] = {}
    try:
        for only, handle in jobs.items():
            try:
                numbers[only] = handle.job_id or find(handle)
            except DlctlError as error:
                failed = error
        left = _cancelled(set(filter(None, numbers.values())), 0.0 if at_once else ORDERLY_S)
    except OSError as error:
        raise slurmwords.not_run(error) from error
    for only, number in numbers.items():
        if number in left:
            failed = left[number]
            continue
        _keep_log(jobs[only], run_directory)
        jobs[only].forget(run_directory, only)
    if failed is not None:
        raise failed


def end_in_words(run_directory: Path) -> None:
    """`end`, with a warning in place of an error."""
    try:
        end(run_directory)
    except DlctlError as error:
        log.warning("%s; %s", error.message, hints.in_a_line(error.hint))


def _keep_log(handle: Handle, run_directory: Path) -> None:
    """Save the output of the job: only there is the reason why a keeper could not be started."""
    log = handle.directory / slurmscript.LOG
    with suppress(OSError):
        if log.stat().st_size:
            kept = run_directory / f"slurm-{handle.job_id or handle.name}.log"
            with regular.opened(log) as source, replacing(kept) as file:
                shutil.copyfileobj(source, file)


def _write_intent(handle: Handle) -> None:
    """Make keepers start nothing from now on, and remove the orders with the agents' keys."""
    with suppress(OSError):  # If this fails, the job is cancelled.
        orderfiles.write(handle.directory / orderfiles.OVER, {})
        for order in handle.directory.glob("*.order"):
            order.unlink(missing_ok=True)


def _cancelled(numbers: set[str], orderly_s: float) -> dict[str, DlctlError]:
    """Cancel all jobs at once that do not end in time; those that may still be there, and why.
    Raises OSError.
    """
    states = _wait_until_over(numbers, orderly_s)
    alive = [number for number, facts in states.items() if facts is None or not facts.is_over]
    if not alive:
        return {}
    output = commands.wait(["scancel", *alive], COMMAND_S)
    states = _wait_until_over(alive, CANCEL_S, more_for_completing=True)
    left: dict[str, DlctlError] = {}
    for number, facts in states.items():
        if facts is None or not facts.is_over:
            words = output.last_line() or (facts.state if facts else "Slurm does not answer")
            left[number] = Unreachable(
                f"the Slurm job {number} may still exist: {words}",
                where=f"job {number}",
                hint=hints.either(f"squeue -j {number}", f"scancel {number}"),
            )
    return left


def find(handle: Handle) -> str:
    """The id of a job whose submitter died before it recorded the id; "" if no such job exists.
    Raises Unreachable if Slurm does not answer, and OSError.
    """
    output = commands.wait(find_argv(handle.name), COMMAND_S)
    if output.status:
        words = output.last_line() or "no answer"
        raise Unreachable(
            f"Slurm does not report whether the job {handle.name} exists: {words}",
            where="squeue",
            hint=f"check with sinfo that Slurm answers; then: squeue --name={handle.name}",
        )
    return next(iter(output.out.split()), "")


def _wait_until_over(
    numbers: Iterable[str], timeout_s: float, *, more_for_completing: bool = False
) -> dict[str, JobFacts | None]:
    """The latest known state of each job; None if Slurm does not answer. A queued job is not waited
    for.
    """
    states: dict[str, JobFacts | None] = dict.fromkeys(numbers)
    asked, deadline = [*states], time.monotonic() + timeout_s
    while asked:
        for number in asked:
            states[number] = slurmwords.read(commands.wait(show_argv(number), COMMAND_S))
        asked = [n for n in asked if (facts := states[n]) is None or _may_end(facts)]
        if time.monotonic() >= deadline:
            asked = [n for n in asked if _is_completing(states[n])] if more_for_completing else []
            more_for_completing, deadline = False, deadline + CANCEL_S
        if asked:
            time.sleep(POLL_S)
    return states


def _may_end(facts: JobFacts) -> bool:
    return not facts.is_over and not facts.waits


def _is_completing(facts: JobFacts | None) -> bool:
    return facts is not None and facts.state == slurmwords.COMPLETING
