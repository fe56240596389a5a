"""What a job asks of Slurm: the options of the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from dlctl.job.config import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlJob:
    """The job of the coordinator. Its files, and those of the job file, are on a file system that
    all nodes share."""

    partition: str = ""
    """Where to run, best where nothing is preempted; "": Slurm's default, as with the following
    keys."""
    time: str = ""
    """Time limit, as in "90m" or "7d"; before it the next control job takes over."""
    account: str = ""
    """The account that the job is charged to."""
    qos: str = ""
    """Quality of service."""
    cpus: Annotated[int, Ge(0), Le(65536)] = 0
    """Processors; 0: Slurm's default."""
    memory: str = ""
    """Memory, as sbatch takes it: "16G"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    nodes: Annotated[int, Ge(1), Le(1024)]
    """Nodes of the job, with an agent on each; servers and workers are spread over them. With
    jobs = "each": the most jobs; the workers are spread over them, and one without workers is not
    submitted until "dlctl scale" adds some."""
    jobs: Literal["one", "each"] = "one"
    """"one": a single Slurm job has all nodes. "each": every node is a job of its own, which Slurm
    starts, preempts and requeues on its own; workers come and go with their nodes, the run trains
    with those that are there (`workers.min`, 1 if not given), and the servers are on the
    coordinator's machine."""
    control: ControlJob | None = None
    """The coordinator, with the servers if jobs = "each", is a Slurm job as well: nothing stays on
    the machine where `dlctl start` was called."""
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
    meanwhile, and continues if its shards are still on their nodes. With jobs = "each" a job that
    is not requeued is submitted again."""
    queue_s: Seconds = 86400.0
    """Longest wait in the queue; after that the job is cancelled and the run fails. With
    jobs = "each" there is no such limit."""
    notice_s: Annotated[float, Ge(0), Le(65535)] = 120.0
    """How long before the time limit the run is saved and stopped; Slurm may be 60 s early. With
    jobs = "each" the workers of that node leave then."""
    python: str = ""
    """The Python on the nodes that has dlctl and torch; "": at the same path as here."""
    dir: str = ""
    """A directory that this machine and all nodes share, a full path: for requests and replies;
    "": ~/.local/state/dlctl/slurm."""
    scratch: str = ""
    """Where dlctl stores its files on each node, a full path; "": /tmp/dlctl-slurm-USERID."""
