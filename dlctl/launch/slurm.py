"""The launcher for Slurm: one batch job for all agents, with one agent on each node.

Slurm chooses the nodes and the time. Before the job runs nobody can be asked there; then its agents
can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.job.config import Allocated, Host
from dlctl.launch import base, slurmcalls
from dlctl.launch.launcher import Launcher, LeftBehind
from dlctl.launch.slurmrequest import SlurmRequest
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
        return (Allocated(),) * self.options.nodes

    def check(self) -> Iterator[Verdict]:
        for key, (pattern, message) in _TEXTS.items():
            text = getattr(self.options, key)
            if text and not pattern.fullmatch(text):
                yield key, message, ""
        yield from self._check_time()
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

    # ------------------------------------------------------------ before the start

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
        from dlctl.launch.slurmagents import SlurmAgents  # only a coordinator needs it

        return SlurmAgents(self.options, directory, hosts, watcher, tell)

    def held(self, directory: Path) -> str:
        handle = slurmcalls.read_handle(directory)
        return f"job {handle.job_id}" if handle is not None and handle.job_id else ""

    def end(
        self, directory: Path, hosts: Mapping[str, Host], grace_s: float, *, purge: bool
    ) -> list[LeftBehind]:
        """Ends the Slurm job: with it all of its processes and files on the nodes end."""
        handle = slurmcalls.read_handle(directory)
        try:
            slurmcalls.end(directory, at_once=grace_s <= 0)
        except DlctlError as error:
            return [LeftBehind(error.where or "Slurm's nodes", error=error, may_run=True)]
        if handle is None:
            return []
        return [LeftBehind("Slurm", (f"the Slurm job {handle.job_id or handle.name} is over",))]
