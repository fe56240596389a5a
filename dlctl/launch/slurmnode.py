"""What the keeper of a node (`daemons.node.keep`) knows of Slurm: from the environment of its srun
task, and from scontrol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from dlctl.launch import commands, slurmcalls, slurmscript, slurmwords
from dlctl.launch.slurmscript import AGENT

ASK_S = 3.0


class SlurmNode:
    owner = "Slurm"
    shared = slurmwords.SHARED

    def __init__(self, environment: Mapping[str, str], options: Sequence[str]) -> None:
        """Raises KeyError and ValueError if this is no task of srun."""
        only = [o.removeprefix(AGENT) for o in options if o.startswith(AGENT)]
        self.agent = only[0] if only else f"agent-{int(environment['SLURM_NODEID']) + 1}"
        self.name = environment["SLURMD_NODENAME"]
        self.attempt = int(environment.get("SLURM_RESTART_COUNT", 0))
        self._job_id = environment["SLURM_JOB_ID"]
        self._may_requeue = slurmscript.REQUEUE in options

    def returns(self) -> bool:
        """Whether Slurm will run this job once more. The state is "COMPLETING" in any case, but the
        restart counter is already incremented. True if it is unknown.
        """
        if not self._may_requeue:
            return False
        with suppress(OSError):
            said = commands.wait(slurmcalls.show_argv(self._job_id), ASK_S)
            facts = slurmwords.read(said)
            return facts is None or facts.restarts > self.attempt
        return True
