"""Hogwild!: the workers of one host step in one model, without locks. Niu et al., "Hogwild!: A
Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011.

Every worker i repeats, with its own batch e:

    read x_e                          which others may be changing
    x_v -= gamma G_e(x)_v             for each v in e, and nothing else is written

There are no servers. One vector in the host's memory is the model of all workers; each is a
process that makes `steps_at_once` steps in it before it handles its messages.

- An addition is a load, an add and a store: of two simultaneous additions to one element one may be
  lost. That is rare and harmless where a batch touches few of all elements: sparse gradients, as of
  nn.Embedding(sparse=True), write only their rows. A dense model is written whole by every step: it
  may train, too, but the analysis does not cover it, and the processors contend for the memory.
- Only SGD without momentum steps lock-free. Torch's state of other optimisers (momentum, means of
  squares) is dense and local to each process, so they are refused. A weight decay writes to every
  element, and torch has none for sparse gradients.
- Data is leased as in other methods: no two workers compute the same batch. The experiments of the
  paper sample without replacement, too. If a worker dies, the steps of its unfinished portions stay
  in the model, and are made again.
- The memory is anonymous. It exists as long as any worker runs, and is lost with the last one: then
  the run fails, and resumes from its newest checkpoint. A worker that joins uses it as it is.
- A checkpoint is a snapshot of one worker while others step: it contains steps that it does not
  count as done. After a drain, as at every orderly stop, it is exact.
- Buffers of a model, as of a BatchNorm, are local to each worker.
- The paper's gamma falls by a factor of 0.9 at each epoch: `[schedule]`.

All workers have to be on one host, and the model on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, Shape
from dlctl.algorithms.needs import Done, Gradient
from dlctl.job.config import Choice, JobFile
from dlctl.job.inner import NONE, is_plain
from dlctl.job.settings import Live


@dataclass(slots=True, kw_only=True)
class Options:
    steps_at_once: Live[Annotated[int, Ge(1), Le(10**6)]] = 32
    """Steps that a worker makes before it handles its messages; at most those of one portion
    (`data.portion_batches`): for short steps increase both."""


class Replica(ReplicaSide):
    options: Options

    def run(self) -> Needs:
        while True:
            steps = self.options.steps_at_once
            if (yield Gradient(step=True, gather=False, steps=steps)) is not None:
                yield Done()


def check(job: JobFile) -> list[Fault]:
    """Workers need an optimiser, and each of its steps has to be a mere addition."""
    found: list[Fault] = []
    if job.inner.name == NONE:
        found.append((("inner", "name"), "hogwild steps with the workers' own SGD", 'use "sgd"'))
    elif not job.has_loop and not is_plain(job.inner):  # A loop is refused as such.
        what = (
            f"the state of {job.inner.name} would be local to each process: only parameters are "
            "shared"
        )
        found.append((("inner", "name"), what, 'use "sgd" without momentum'))
    if job.workers.device == "cuda":
        what = "the model of hogwild is in the host's memory"
        found.append((("workers", "device"), what, 'use "cpu"'))
    return found


HOGWILD = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="replica",
        links=frozenset({"memory"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
    inner=Choice(name="sgd", options={"lr": 0.01}),
    check=check,
)
