"""Nodes for a moment, for `dlctl doctor --nodes`: small jobs that start at once or not at all.

On a node of each runs `daemons.node`, as ssh would run it on a host, or `dlctl doctor` itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dlctl.errors import DlctlError, TimedOut
from dlctl.job.config import Allocated
from dlctl.launch import answers, slurmcalls, slurmpartitions, slurmwords
from dlctl.launch.answers import CallResult
from dlctl.launch.calls import node_words
from dlctl.launch.session import Session
from dlctl.launch.slurmrequest import ControlJob, SlurmRequest

NAME = "dlctl-doctor"
AT_ONCE_S = 15
"""Slurm has so long to start one."""
MINUTES = 3
NODES_MAX = 2
HERE = "trial"
"""In place of the number of a control job."""
_REFUSED = ("Unable to allocate resources", "Unable to create step", "Job allocation")
_OPTIONS = {
    "partition": "partition", "account": "account", "qos": "qos", "constraint": "constraint",
    "cpus_per_node": "cpus-per-task", "cpus": "cpus-per-task", "gpus_per_node": "gpus-per-node",
    "memory": "mem",
}  # fmt: skip


def _srun(asked: SlurmRequest | ControlJob, **more: str) -> list[str]:
    given = {"job-name": NAME, "nodes": "1", "ntasks": "1", "time": str(MINUTES)}
    given |= {"immediate": str(AT_ONCE_S), **more}
    for key, option in _OPTIONS.items():
        if value := getattr(asked, key, ""):
            given[option] = str(value)
    extra = [*getattr(asked, "extra", ())]
    return ["srun", "--quiet", *(f"--{key}={value}" for key, value in given.items()), *extra]


def sessions(asked: SlurmRequest) -> list[Session]:
    """With as many free nodes as there are, and as a check needs. Raises DlctlError."""
    known = slurmpartitions.known()
    row = known.find(asked.partition)
    nodes = known.nodes.get(row["PartitionName"], []) if row is not None else []
    free = [node.name for node in nodes if node.is_free][: min(NODES_MAX, asked.nodes)]
    if not free:
        raise _not_now("no node of the partition is free")
    # Of its nodes with certain features, Slurm chooses one.
    places = [{}] if asked.constraint else [{"nodelist": name} for name in free]
    return [_session(asked, place) for place in places]


def _session(asked: SlurmRequest, place: Mapping[str, str]) -> Session:
    words = node_words(Allocated(python=os.path.expanduser(asked.python)))
    command = [*_srun(asked, chdir="/", **place), *words]
    name = place.get("nodelist", "a node")
    return Session(name, command, explained, slurmcalls.environment())


def control(asked: ControlJob, variable: str) -> tuple[str, ...]:
    """What runs a command where a control job would."""
    dropped = [f"--unset={name}" for name in os.environ.keys() - slurmcalls.environment().keys()]
    return ("env", *dropped, *_srun(asked, export=f"ALL,{variable}={HERE}"))


def explained(answer: CallResult) -> DlctlError:
    """What is wrong with a node, or why there is none."""
    if answer.value is None and (refusal := why_not(answer.words)):
        return _not_now(refusal)
    return slurmwords.in_our_terms(answers.explain(answer))


def why_not(words: str) -> str:
    """Why srun has got no node, from its output; "": it has got one."""
    lines = [line.removeprefix("srun: ").removeprefix("error: ") for line in words.splitlines()]
    return next((line for line in lines if line.startswith(_REFUSED)), "")


def _not_now(why: str) -> TimedOut:
    return TimedOut(
        f"Slurm gives no node for the check now: {why}",
        where=slurmwords.WHERE,
        hint="run it again when sinfo shows idle nodes",
    )
