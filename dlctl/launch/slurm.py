"""The launcher for Slurm: one batch job for all agents, with one agent on each node, or a job for
each agent.

Slurm chooses the nodes and the time. Before the job runs nobody can be asked there; then its agents
can.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.job.config import Allocated, Host
from dlctl.launch import (
    base,
    slurmcalls,
    slurmcontrol,
    slurmpartitions,
    slurmscript,
    slurmtrial,
    slurmwords,
)
from dlctl.launch.launcher import Fact, Launcher, LeftBehind
from dlctl.launch.session import Session
from dlctl.launch.slurmcontrol import SlurmControl
from dlctl.launch.slurmpartitions import Use
from dlctl.launch.slurmrequest import SlurmRequest
from dlctl.runs import reach
from dlctl.runs.reach import Reach
from dlctl.util.hostnames import FULL_PATH
from dlctl.util.units import parse_duration

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:+-]*")
CONSTRAINT = re.compile(r"[A-Za-z0-9\[(][A-Za-z0-9_.&|*()\[\]-]*")
MEMORY = re.compile(r"[0-9]+[KMGT]?")
EXTRA = re.compile(r"--[a-z][a-z0-9-]*(=[^\0\r\n]*)?")
OWN = (
    "nodes", "partition", "time", "account", "qos", "constraint", "cpus-per-task", "gpus-per-node",
    "mem", "job-name", "ntasks", "ntasks-per-node", "signal", "output", "error", "open-mode",
    "chdir", "requeue", "no-requeue", "no-kill", "array", "export", "parsable", "wait", "wrap",
    "input", "test-only",
)  # fmt: skip
"""Options of sbatch that are not allowed in `extra`: dlctl sets them, or they have a key."""
_TEXTS = {
    "partition": (WORD, "must be the name of a partition"),
    "account": (WORD, "must be the name of an account"),
    "qos": (WORD, "must be the name of a quality of service"),
    "constraint": (CONSTRAINT, 'must be features, as in "gpu&ib"'),
    "memory": (MEMORY, 'must be a number with K, M, G or T, as in "16G"'),
    "python": (FULL_PATH, "must be a full path on the nodes"),
    "dir": (FULL_PATH, "must be a full path"),
    "scratch": (FULL_PATH, "must be a full path on the nodes"),
}
Verdict = tuple[str | tuple[str | int, ...], str, str]


class Slurm(Launcher):
    Options = SlurmRequest
    title = "Slurm"
    noun = "Slurm node"
    takes_hosts = False
    can_ask = False
    outlives = True
    is_reclaimed = True
    copies_files = True
    options: SlurmRequest

    # ------------------------------------------------------------ the job file

    def places(self) -> tuple[Allocated, ...]:
        of_each = Allocated(servers=0) if self.options.jobs == "each" else Allocated()
        return (of_each,) * self.options.nodes

    @property
    def workers_min(self) -> int | None:
        return 1 if self.options.jobs == "each" else None

    def check(self) -> Iterator[Verdict]:
        for key, (pattern, message) in _TEXTS.items():
            text = getattr(self.options, key)
            if text and not pattern.fullmatch(text):
                yield key, message, ""
        yield from self._check_time()
        yield from self._check_control()
        yield from self._check_extra()

    def _check_time(self) -> Iterator[Verdict]:
        notice_s = self.options.notice_s
        if not self.options.time:
            return
        try:
            limit_s = parse_duration(self.options.time)
        except ValueError as error:
            yield "time", str(error), ""
            return
        if limit_s <= 0:
            yield "time", "must be above zero", ""
        elif notice_s >= limit_s:
            message = f"must be more than notice_s ({notice_s:g} s), when the run is stopped"
            yield "time", message, "for a test, give less in notice_s"

    def _check_control(self) -> Iterator[Verdict]:
        asked = self.options.control
        if asked is None:
            return
        if self.options.jobs != "each":
            what = (
                'a coordinator in a job of its own needs jobs = "each": its servers are beside it'
            )
            yield "control", what, 'add jobs = "each"'
        for key in ("partition", "account", "qos", "memory"):
            pattern, message = _TEXTS[key]
            text = getattr(asked, key)
            if text and not pattern.fullmatch(text):
                yield ("control", key), message, ""
        try:
            minutes = slurmscript.minutes(asked.time)
        except ValueError as error:
            yield ("control", "time"), str(error), ""
            return
        if asked.time and minutes * 60 <= 2 * slurmcontrol.NOTICE_S:
            least = f"must be more than {2 * slurmcontrol.NOTICE_S} s"
            yield ("control", "time"), f"{least}: it ends {slurmcontrol.NOTICE_S} s before", ""

    def _check_extra(self) -> Iterator[Verdict]:
        for number, option in enumerate(self.options.extra):
            path = ("extra", number)
            name = option.partition("=")[0].removeprefix("--")
            if not EXTRA.fullmatch(option):
                yield path, "must be a long option of sbatch", 'as in "--reservation=lab"'
            elif name in OWN:
                yield path, f"--{name} is dlctl's own", "dlctl algorithms slurm shows its keys"

    def warnings(self) -> Iterator[str]:
        for option in self.options.extra:
            _, _, value = option.partition("=")
            if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
                yield f"extra: the quotes in {option} become part of its value; none are needed"

    @property
    def moves(self) -> bool:
        return self.options.control is not None

    # ------------------------------------------------------------ before the start

    def control(self, file: Path) -> SlurmControl | None:
        asked, root = self.options.control, slurmcalls.root(self.options.dir)
        return None if asked is None else slurmcontrol.of(asked, file, root, self.options.queue_s)

    def reach(self) -> Reach | None:
        number = slurmcontrol.here()
        return slurmcontrol.reach(number) if number and self.options.control is not None else None

    @classmethod
    def reached(cls, place: str) -> Reach | None:
        return slurmcontrol.reached(place)

    def facts(self) -> Iterator[Fact]:
        """Whether jobs start in the partitions, and whether they are preempted."""
        known = slurmpartitions.known()
        for use in self._uses():
            yield from slurmpartitions.verdicts(use, known)

    def _uses(self) -> Iterator[Use]:
        asked, is_each = self.options, self.options.jobs == "each"
        usual = os.environ.get("SBATCH_PARTITION", "")
        yield Use(
            "workers" if is_each else "the job", slurmwords.WHERE, asked.partition or usual,
             1 if is_each else asked.nodes, slurmscript.minutes(asked.time),
            is_taken_singly=is_each,
        )  # fmt: skip
        if asked.control is not None:
            section, limit = (
                f"control of {slurmwords.WHERE}",
                slurmscript.minutes(asked.control.time),
            )
            where = asked.control.partition or usual
            yield Use("control", section, where, 1, limit, is_control=True)

    def trial(self) -> list[Session]:
        return slurmtrial.sessions(self.options)

    def preflight(self) -> None:
        slurmcalls.nodes(self.options.partition)

    def an_address(self, hosts: Sequence[Host]) -> str:
        return slurmcalls.nodes(self.options.partition)[0]

    def folder(self, host: Host) -> str:
        return self.options.scratch or "/tmp/dlctl-slurm-USERID"

    @property
    def wait_s(self) -> float:
        return self.options.queue_s

    # ------------------------------------------------------------ the run

    def agents(
        self,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
    ) -> base.AgentControl:
        # Only a coordinator needs these.
        from dlctl.launch.slurmagents import SlurmAgents
        from dlctl.launch.slurmjobs import SlurmJobs

        kind = SlurmJobs if self.options.jobs == "each" else SlurmAgents
        return kind(self.options, directory, hosts, watcher, tell)

    def held(self, directory: Path) -> str:
        jobs = [handle.job_id for handle in slurmcalls.handles(directory).values() if handle.job_id]
        return f"{'job' if len(jobs) == 1 else 'jobs'} {', '.join(jobs)}" if jobs else ""

    def end(
        self, directory: Path, hosts: Mapping[str, Host], grace_s: float, *, purge: bool
    ) -> list[LeftBehind]:
        """Ends the Slurm jobs, also one of the coordinator that is queued again: with them all of
        their processes and files on the nodes end."""
        jobs, place = slurmcalls.handles(directory).values(), reach.read(directory)
        done: list[str] = []
        try:
            if place is not None and self.options.control is not None:
                done += filter(None, [slurmcontrol.cancel(place.value)])
            slurmcalls.end(directory, at_once=grace_s <= 0)
        except DlctlError as error:
            return [LeftBehind(error.where or "Slurm's nodes", error=error, may_run=True)]
        done += [f"the Slurm job {handle.job_id or handle.name} is over" for handle in jobs]
        return [LeftBehind("Slurm", tuple(done))] if done else []
