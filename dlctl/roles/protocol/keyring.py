"""The keys of a run, as the coordinator's role needs them: one pair for every name.

A name keeps its keys across restarts; epochs and incarnations decide which of its processes is
authorized.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol


class Keyring(Protocol):
    @property
    def token_key(self) -> bytes:
        """Signs the tokens of epochs. Servers know it, too."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the run key without revealing it."""
        ...

    def public(self, name: str) -> str:
        """The public key of this name, as text; "" if the run's connections have no keys."""
        ...

    def secret(self, name: str) -> str:
        """The other half, for this name's own processes only."""
        ...


def fingerprint(token_key: bytes) -> str:
    """16 hexadecimal digits that identify a run key."""
    return hashlib.sha256(b"fingerprint" + token_key).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class NoKeys:
    """For connections that only this user can reach: unix sockets in a directory of mode 0700."""

    token_key: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.token_key)

    def public(self, name: str) -> str:
        return ""

    def secret(self, name: str) -> str:
        return ""
