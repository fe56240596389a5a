"""Whether a run has enough rounds for its outer optimiser. Pure.

Where replicas push the displacement of `local_steps` steps, the servers' optimiser makes one step a
round. With a momentum of beta its step is beta / (1 - beta) parts of the rounds before, as they
were, and one of this. In a run of R rounds that is of no account if R is many times
beta / (1 - beta). Else the steps grow till the end, and when a schedule has brought those of the
replicas to nothing, what is left in the momentum of their large ones goes on.

The rule: R >= 2 beta / (1 - beta), so that the steps have grown to most of their length; and four
times as many where the rate goes down. One round at least. For DiLoCo's beta = 0.9 these are 18 and
72; its paper (Douillard et al. 2023) trains with 128 and a cosine. Measured (480 steps of 4
workers, AdamW, cosine, cross-entropy of a perceptron, two seeds; a plain mean has 0.27 for any R):

    R                             6      15     30     60     120
    rate 0.7, momentum 0.9        1.23   1.46   1.07   0.52   0.35
    rate 0.7, momentum 0.5        0.30   0.28   0.28   0.27   0.27
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dlctl.job import batches, schedule
from dlctl.job.config import JobFile
from dlctl.util.text import plural

TIMES, TIMES_OF_DECAY = 2, 8
"""Of beta / (1 - beta): without and with a schedule that goes down."""
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
    times = TIMES_OF_DECAY if schedule.goes_down(job.schedule) else TIMES
    needed = max(1, math.ceil(round(times * momentum / (1.0 - momentum), 6)))
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
