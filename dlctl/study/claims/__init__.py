"""What papers claim about distributed training, each as an experiment that judges it.

A claim is one file and one line here. It states its paper, its sentence, the set-up and the
criterion, and runs in a `Lab`; `dlctl claims` lists and runs them.
"""

from __future__ import annotations

from importlib import import_module

from dlctl.errors import NotFound
from dlctl.study.claims.base import PaperClaim
from dlctl.util.did_you_mean import meant

CLAIMS = {
    "adagrad-replicas": "adagrad_replicas",
    "warm-start": "warm_start",
    "lbfgs-replicas": "lbfgs_replicas",
    "easgd-interval": "easgd_interval",
    "error-feedback": "error_feedback",
    "staleness-depth": "staleness_depth",
    "stale-synchronous": "stale_synchronous",
    "backup-workers": "backup_workers",
    "linear-scaling": "linear_scaling",
    "gossip-crossover": "gossip_crossover",
    "spread-servers": "spread_servers",
    "target-batch": "target_batch",
    "kfac-epochs": "kfac_epochs",
    "nopeek-leakage": "nopeek_leakage",
    "diloco-interval": "diloco_interval",
    "hogwild-locks": "hogwild_locks",
}
"""Name -> its module in this package, in the order of the table."""


def load(name: str) -> PaperClaim:
    """Raises NotFound."""
    if name not in CLAIMS:
        close = meant(name, [*CLAIMS])
        raise NotFound(f'there is no claim "{name}"{close}', hint="dlctl claims ls")
    found: PaperClaim = import_module(f"{__name__}.{CLAIMS[name]}").CLAIM
    return found
