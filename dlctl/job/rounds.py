"""Whether a run has enough rounds for its outer optimiser. Pure.

Where replicas push the displacement of `local_steps` steps, the servers' optimiser makes one step a
round. With a momentum of beta it moves along the mean of the last 1 / (1 - beta) rounds, or so, and
the first of them still move the model by beta^k, k rounds later. In a run of R rounds that is of
no account if R is several times 1 / (1 - beta). Else the steps grow till the end, and what the
large steps of the beginning have left in the momentum goes on while a schedule is at its end.

The rule: R >= 3 / (1 - beta). By then 1 - beta^R = 95 % of the rate is reached, and as little is
left of the first round. With DiLoCo's beta = 0.9 it asks for 30 rounds; the fewest for which its
paper reports a result are 32, of 2,000 steps (Douillard et al. 2023, section 3.1, figure on the
communication frequency), and they are its worst. Without momentum it asks for 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dlctl.job import batches, schedule
from dlctl.job.config import JobFile
from dlctl.util.text import plural

TIMES = 3
KEY = "local_steps"


class FewRounds(NamedTuple):
    rounds: int
    """About so many has each replica; 0: not even one."""
    needed: int
    momentum: float
    local_steps: int
    """With so many there were enough; 0: the run is too short for any."""

    def text(self) -> str:
        have = f"about {plural(self.rounds, 'round')}" if self.rounds else "not one whole round"
        of = f"a momentum of {self.momentum:g}" if self.momentum else "a mean of replicas"
        ways = [f"set {KEY} = {self.local_steps}"] if self.local_steps else []
        ways += ["train longer"]
        ways += ['average ([optimizer] name = "sgd", lr = 1)'] if self.momentum else []
        return f"{have}, and {of} needs {self.needed}: training may suffer; {' or '.join(ways)}"


def few(job: JobFile, dataset_samples: int = 0, local_steps: int = 0) -> FewRounds | None:
    """None if there are enough, or if it is unknown how long the run is.

    dataset_samples: 0 while they are unknown. local_steps: as set during the run, 0: as in the job.
    """
    steps = local_steps or job.algorithm.options.get(KEY)
    if not isinstance(steps, int) or not job.servers.count or batches.is_open(job):
        return None
    stop = job.job.stop
    if stop.epochs and not dataset_samples and not job.schedule.over:
        return None
    samples = schedule.whole_run(job, dataset_samples)
    if not math.isfinite(samples):
        return None
    momentum = _momentum(job)
    needed = math.ceil(round(TIMES / (1.0 - momentum), 6))
    of_step = job.workers.count * batches.mean(job)
    rounds = samples / (of_step * steps)
    if rounds >= needed:
        return None
    return FewRounds(int(rounds), needed, momentum, int(samples / (of_step * needed)))


def _momentum(job: JobFile) -> float:
    """The decay of the outer optimiser's running mean of its steps, below 1."""
    options = job.optimizer.options
    found = options.get("momentum", options.get("beta1", 0.0))
    return float(found) if isinstance(found, int | float) and 0 <= found < 1 else 0.0
