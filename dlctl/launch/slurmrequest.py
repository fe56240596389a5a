"""What a job asks of Slurm: the options of the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from dlctl.job.config import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
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
