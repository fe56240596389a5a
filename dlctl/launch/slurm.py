"""The launcher for Slurm: one batch job for all agents, with one agent on each node.

Slurm chooses the nodes and the time. Before the job runs nobody can be asked there; then its agents
can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from dlctl.config import Allocated, Host, Seconds
from dlctl.errors import DlctlError
from dlctl.launch import base, slurmcalls
from dlctl.launch.launcher import Launcher, Left
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    nodes: Annotated[int, Ge(1), Le(1024)]
    """Nodes of the job, with an agent on each; servers and workers are spread over them."""
    partition: str = ""
    """Where to run; "": Slurm's default, as with the following keys."""
    time: str = ""
    """Time limit of the job, as in "90m" or "2h"; Slurm counts whole minutes."""
    account: str = ""
    """The account that the job is charged to."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the nodes must have, as in "gpu&ib"."""
    cpus_per_node: Annotated[int, Ge(0), Le(65536)] = 0
    """Processors of each node; 0: Slurm's default, which may be one."""
    gpus_per_node: Annotated[int, Ge(0), Le(1024)] = 0
    """GPUs of each node."""
    memory: str = ""
    """Memory of each node, as sbatch takes it: "16G"; "0" is all of it."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, one string each, without additional quotes: ["--exclusive",
    "--comment=for ann"]."""
    requeue: bool = False
    """Whether Slurm may requeue the job when it was preempted, or a node has failed. The run waits
    meanwhile, and continues if its shards are still on their nodes."""
    queue_s: Seconds = 86400.0
    """Longest wait in the queue; after that the job is cancelled and the run fails."""
    notice_s: Annotated[float, Ge(0), Le(65535)] = 120.0
    """How long before the time limit the run is saved and stopped; Slurm may be 60 s early."""
    python: str = ""
    """The Python on the nodes that has dlctl and torch; "": at the same path as here."""
    dir: str = ""
    """A directory that this machine and all nodes share, a full path: for requests and replies;
    "": ~/.local/state/dlctl/slurm."""
    scratch: str = ""
    """Where dlctl stores its files on each node, a full path; "": /tmp/dlctl-slurm-USERID."""


class Slurm(Launcher):
    Options = Request
    title = "Slurm"
    noun = "Slurm node"
    takes_hosts = False
    can_ask = False
    outlives = True
    is_reclaimed = True
    copies_files = True
    options: Request

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

    def doubts(self) -> Iterator[str]:
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
    ) -> list[Left]:
        """Ends the Slurm job: with it all of its processes and files on the nodes end."""
        handle = slurmcalls.read_handle(directory)
        try:
            slurmcalls.end(directory, at_once=grace_s <= 0)
        except DlctlError as error:
            return [Left(error.where or "Slurm's nodes", error=error, may_run=True)]
        if handle is None:
            return []
        return [Left("Slurm", (f"the Slurm job {handle.job_id or handle.name} is over",))]
