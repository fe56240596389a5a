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


def render(asked: SlurmRequest, name: str, directory: Path) -> str:
    """`name`: of the job, for squeue. `directory`: of the orders, which all nodes share."""
    options = "".join(f"#SBATCH {option}\n" for option in _options(asked, name, directory))
    body = _BODY.format(
        directory=shlex.quote(str(directory)),
        notice=NOTICE,
        attempt=ATTEMPT,
        srun=shlex.join(_srun(asked, directory)),
    )
    return f"#!/bin/bash\n{options}{body}"


def _options(asked: SlurmRequest, name: str, directory: Path) -> list[str]:
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
    options = [f"--{key}={_quoted(str(value))}" for key, value in given.items() if value]
    options += ["--no-kill", "--requeue" if asked.requeue else "--no-requeue"]
    for option in asked.extra:
        name, equals, value = option.partition("=")
        options.append(f"{name}{equals}{_quoted(value)}")
    return options


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


def _srun(asked: SlurmRequest, directory: Path) -> list[str]:
    """--cpus-per-task is not inherited from sbatch since Slurm 22.05."""
    words = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1"]
    words += [f"--cpus-per-task={asked.cpus_per_node}"] if asked.cpus_per_node else []
    python = os.path.expanduser(asked.python) or sys.executable
    words += ["--cpu-bind=none", python, "-P", "-m", "daemons.node.keep", NODE, str(directory)]
    return [*words, REQUEUE] if asked.requeue else words
