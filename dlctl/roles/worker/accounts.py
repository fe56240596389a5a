"""What a replica counts about its own work; the services write it, and read each other's counts."""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.algorithms.base import ReplicaSide
from dlctl.roles.protocol.meters import Rates
from dlctl.roles.worker.bad_gradients import BadGradients
from dlctl.roles.worker.leases import Portions
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.pacing import Pacing
from dlctl.roles.worker.progress import Progress
from dlctl.roles.worker.settings import WorkTerms


@dataclass(frozen=True, eq=False, slots=True)
class Accounts:
    portions: Portions
    """Which samples are in which push."""
    bad_gradients: BadGradients
    pacing: Pacing
    """How long this replica has computed, and waited."""
    rates: Rates
    progress: Progress
    """The progress of the whole run, not of this replica."""

    @classmethod
    def opened(cls, links: Links, terms: WorkTerms, side: ReplicaSide) -> Accounts:
        """The accounts of a replica that has done nothing yet."""
        return cls(
            Portions(terms.batch_size, terms.lease_ahead_s),
            BadGradients(terms.push_norm_max),
            Pacing(side, links.send_queue.limiters),
            Rates("samples", "push_bytes", "fetch_bytes"),
            Progress(lambda: len(links.members.known)),
        )

    def step_made(self, step: int, samples: int, took_s: float, where: str) -> None:
        """A usable gradient. step: its number in this replica. where: its batch, for messages."""
        self.bad_gradients.computed(step, where)
        self.rates.add("samples", samples)
        self.progress.computed(samples)
        self.pacing.computed(took_s)
