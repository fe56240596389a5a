"""The keys of a run, as the coordinator's role needs them: one pair for every name.

Names keep their keys across restarts; which process of a name may speak, epochs and incarnations
decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Keyring(Protocol):
    @property
    def token_key(self) -> bytes:
        """Signs the tokens of epochs. Servers know it, too."""
        ...

    def public(self, name: str) -> str:
        """The public key of this name, as text; "" if the run's connections have no keys."""
        ...

    def secret(self, name: str) -> str:
        """The other half, for this name's own processes only."""
        ...


@dataclass(frozen=True, slots=True)
class NoKeys:
    """For connections that only this user can reach: unix sockets in a directory of mode 0700."""

    token_key: bytes

    def public(self, name: str) -> str:
        return ""

    def secret(self, name: str) -> str:
        return ""
