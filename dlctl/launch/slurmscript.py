"""The batch script of a run's Slurm job. It is rendered from the job alone, and holds no secrets.

One srun starts one keeper on every node (`daemons.node.keep`), which starts and watches the agent
on its node. The loss of a keeper or a node must not end the others: hence --no-kill, --wait=0 and
--kill-on-bad-exit=0.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.util.units import parse_duration

if TYPE_CHECKING:
    from dlctl.launch.slurmrequest import SlurmRequest

NOTICE = "notice"
"""File of the directory of orders, written when Slurm has sent its signal: the time limit is near,
or the job is about to be preempted. Content: the attempt, counted from 0."""
REQUEUE = "--requeue"
"""Option of keepers: Slurm may requeue the job."""
AGENT = "--agent="
"""Option of keepers: the agent of this node."""
NODE = "dlctl.launch.slurmnode:SlurmNode"
"""What a keeper knows of its node."""
LOG = "job.log"
SCRIPT = "job.sh"
ATTEMPT = "${SLURM_RESTART_COUNT:-0}"
_ODD = re.compile(r"[^A-Za-z0-9_@%+=:,./-]")
_BODY = """
cd /
places={directory}
trap 'echo "{attempt}" > "$places/.{notice}" && mv -f "$places/.{notice}" "$places/{notice}"' USR1
{srun} &
step=$!
# The signal interrupts `wait`, not the step: wait again for the exit status of the step.
while wait "$step"; [ $? -gt 128 ] && kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
exit $?
"""


def render(asked: SlurmRequest, name: str, directory: Path, only: str = "") -> str:
    """`name`: of the job, for squeue. `directory`: of the orders, which all nodes share. only: the
    agent whose job it is; "": of all, one on each node."""
    options = _options(asked, name, directory)
    body = _BODY.format(
        directory=shlex.quote(str(directory)),
        notice=NOTICE,
        attempt=ATTEMPT,
        srun=shlex.join(_srun(asked, directory, only)),
    )
    return f"#!/bin/bash\n{options}{body}"


def _options(asked: SlurmRequest, name: str, directory: Path) -> str:
    given = {
        "job-name": name,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        "partition": asked.partition,
        "time": minutes(asked.time),
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "cpus-per-task": asked.cpus_per_node,
        "gpus-per-node": asked.gpus_per_node,
        "mem": asked.memory,
        "signal": f"B:USR1@{math.ceil(asked.notice_s)}" if asked.notice_s else "",
        # % starts a placeholder in a file name.
        "output": str(directory / LOG).replace("%", "%%"),
        "open-mode": "append",
        "chdir": "/",
    }
    more = ["--no-kill", "--requeue" if asked.requeue else "--no-requeue"]
    for option in asked.extra:
        name, equals, value = option.partition("=")
        more.append(f"{name}{equals}{_quoted(value)}")
    return lines(given, more)


def lines(given: Mapping[str, object], more: Sequence[str]) -> str:
    """The #SBATCH lines of options that have a value, and of others as they are."""
    options = [f"--{key}={_quoted(str(value))}" for key, value in given.items() if value]
    return "".join(f"#SBATCH {option}\n" for option in [*options, *more])


def _quoted(value: str) -> str:
    """Quoted for sbatch, which differs from a shell: a backslash is an escape in all quotes, and
    for older versions # starts a comment in quotes.
    """
    if not _ODD.search(value):
        return value
    return '"' + re.sub(r'["\\#]', r"\\\g<0>", value) + '"'


def minutes(time: str) -> int:
    """A time limit in Slurm's unit, rounded up; 0: no limit. Raises ValueError."""
    return math.ceil(parse_duration(time) / 60) if time else 0


def _srun(asked: SlurmRequest, directory: Path, only: str) -> list[str]:
    """--cpus-per-task is not inherited from sbatch since Slurm 22.05."""
    words = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1"]
    words += [f"--cpus-per-task={asked.cpus_per_node}"] if asked.cpus_per_node else []
    python = os.path.expanduser(asked.python) or sys.executable
    words += ["--cpu-bind=none", python, "-P", "-m", "daemons.node.keep", NODE, str(directory)]
    words += [AGENT + only] if only else []
    return [*words, REQUEUE] if asked.requeue else words
