"""IsoLoCo. github.com/shoroi/isoloco, from its code: there is no paper of it yet.

DiLoCo whose outer step has no preferred direction. Rounds are those of `diloco`: H = `local_steps`
steps of each replica's own optimiser, then the mean of the displacements, weighted by samples. On a
shard, for each parameter that is a matrix:

    g = sum_i n_i (theta_old - theta_i) / sum_i n_i           n_i: samples of replica i
    g = U diag(S) V^T, its singular value decomposition;      h = mean(S) U V^T
    m = momentum * m + h;   theta = theta_old - lr * (h + momentum * m)

For everything else h = g. This is the server optimiser `isotropic` (dlctl-job(5)), with lr 1.8 and
momentum 0.8. It needs whole matrices, so shards are cut between them.

- The defaults are those of its 178M-parameter runs with eight replicas: H = 30, AdamW inside with
  lr 0.00138 and betas 0.9 and 0.95.
- Replicas have equal weights there; here they are weighted by samples, which differ only where data
  ends.
- `elementwise` in [optimizer] names matrices that keep their mean, such as embeddings.
- Everything else, `overlap` and deaths included, is as in `diloco`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dlctl.algorithms import barrier
from dlctl.algorithms.base import Method
from dlctl.algorithms.methods import local_sgd
from dlctl.job.config import Choice
from dlctl.job.settings import Live


@dataclass(slots=True, kw_only=True)
class Options(local_sgd.Options):
    local_steps: Live[Annotated[int, Ge(1)]] = 30
    """Steps of a replica from one mean to the next, H."""


ISOLOCO = Method(
    Options=Options,
    replica=local_sgd.Replica,
    shard=barrier.Barrier,
    optimizer=Choice(name="isotropic", options={"lr": 1.8, "momentum": 0.8}),
    inner=Choice(name="adamw", options={"lr": 1.38e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}),
)
