"""The data of a run with clients: a data epoch has some of them, and a portion is one client.

Where each worker has clients of its own, nobody else trains them: what others come to first waits
as if it had come back.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.clients import Cohort, cohort, epoch_samples
from dlctl.roles.coordinator.portions import PortionPool, Range


def client_pool(sizes: tuple[int, ...], drawn: Cohort, seed: int, owners: int = 0) -> ClientPool:
    """sizes: samples of each client. owners: workers that have them; 0: everybody has them all."""
    return ClientPool(
        epoch_samples(sizes, drawn), drawn.clients, sizes=sizes, passes=drawn.passes, seed=seed,
        owners=owners,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ClientPool(PortionPool):
    """samples: of a data epoch, on average. portion_samples: its clients."""

    sizes: tuple[int, ...]
    passes: int
    seed: int
    owners: int

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
        if self.owners:
            return True
        newest = self.standing(self.next[0])
        return newest.under_way.get(slot, 0) * slots <= newest.left

    def _pick(self, slot: int) -> tuple[int, int] | None:
        """The first one that `slot` has the data of; of the next data epoch only if nobody has to
        begin one of this.
        """
        if not self.owners:
            return self._returned.pop(0) if self._returned else self._advance()
        while True:
            for key in self._returned:
                if self.client(*key) % self.owners == slot:
                    self._returned.remove(key)
                    return key
            if self._returned and self.next[0] > self._returned[0][0]:
                return None
            following = self._advance()
            if following is None:
                return None
            self._returned.append(following)
            self._changed[following] = None

    def _range(self, epoch: int, index: int) -> Range:
        client = self.client(epoch, index)
        return Range(epoch, index, 0, self.sizes[client] * self.passes, client)
