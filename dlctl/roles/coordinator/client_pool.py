"""The data of a run with clients: a data epoch has some of them, and a portion is one client."""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.clients import Cohort, cohort, epoch_samples
from dlctl.roles.coordinator.leases import PortionPool, Range


def client_pool(sizes: tuple[int, ...], drawn: Cohort, seed: int) -> ClientPool:
    """sizes: samples of each client."""
    samples = epoch_samples(sizes, drawn)
    return ClientPool(samples, drawn.clients, sizes=sizes, passes=drawn.passes, seed=seed)


@dataclass(slots=True, kw_only=True)
class ClientPool(PortionPool):
    """samples: of a data epoch, on average. portion_samples: its clients."""

    sizes: tuple[int, ...]
    passes: int
    seed: int

    @property
    def per_epoch(self) -> int:
        return self.portion_samples

    def client(self, data_epoch: int, portion: int) -> int:
        drawn = cohort(self.seed, data_epoch, len(self.sizes), self.per_epoch)
        return int(drawn[portion])

    def bounds(self, portion: int) -> tuple[int, int]:
        """What a portion of any epoch may have at most."""
        return 0, max(self.sizes) * self.passes

    def samples_before(self, portion: int) -> int:
        """On average."""
        return portion * self.samples // self.per_epoch

    def may_hoard(self, slot: int, slots: int) -> bool:
        """Of the newest data epoch: what it has of it, done or not, is no more than its part."""
        newest = self.standing(self.next[0])
        return newest.under_way.get(slot, 0) * slots <= newest.left

    def _range(self, epoch: int, index: int) -> Range:
        client = self.client(epoch, index)
        return Range(epoch, index, 0, self.sizes[client] * self.passes, client)
