"""What the next coordinator must not be without, and which messages wait until it is on the disk.

Whoever waits for one of these messages asks again.

- Terms that were issued: two processes with one term would cost pushes that were acknowledged.
- Servers that have served: so would a shard that is begun anew because nobody remembers that it
  had begun.
- That all workers are at work: the next coordinator would have them begin once more, with the
  residuals of the checkpoint, which are in the shards by then.
"""

from __future__ import annotations

from typing import Any

from dlctl.messages import Lease, Message, Topology, Welcome
from dlctl.roles.coordinator.persistence import has_released


class Lasting:
    def __init__(self) -> None:
        self.is_on_disk = False
        """All of it. Of what the coordinator before this one wrote, nobody knows."""
        self._served: set[str] = set()
        self._is_before_release = False
        """Known to be: of a run that is gone on with, the release is on record already."""
        self._release_waits = False
        self._is_awaited = False

    def issues_term(self) -> None:
        self.is_on_disk = False

    def await_all(self) -> None:
        """Somebody asks to be told when everything so far is on the disk."""
        self._is_awaited, self.is_on_disk = True, False

    def remembers(self, key: str, value: Any) -> None:
        """A piece of the coordinator's memory is to be written."""
        if isinstance(value, dict) and value.get("has_served") and key not in self._served:
            self._served.add(key)
            self.is_on_disk = False
        if key != "run":
            return
        is_released = has_released({key: value})
        if is_released and self._is_before_release:
            self._release_waits, self.is_on_disk = True, False
        self._is_before_release = not is_released

    def written(self) -> bool:
        """Everything so far is on the disk; whether somebody has asked to be told."""
        was_awaited, self._is_awaited = self._is_awaited, False
        self.is_on_disk, self._release_waits = True, False
        return was_awaited

    def may_leave(self, message: Message) -> bool:
        """Portions are leased while other things wait for room: training goes on."""
        if isinstance(message, Lease):
            return not self._release_waits
        waits = isinstance(message, Topology) or (isinstance(message, Welcome) and message.term)
        return self.is_on_disk or not waits
