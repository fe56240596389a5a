"""The keys of a run, as the coordinator's role needs them: one pair for every name.

A name keeps its keys across restarts; terms and incarnations decide which of its processes is
authorized.
"""

from __future__ import annotations

import hashlib


class Keyring:
    """A keyring without keys: for connections that only this user can reach, unix sockets in a
    directory of mode 0700.
    """

    def __init__(self, token_key: bytes) -> None:
        self.token_key = token_key
        """Signs the tokens of terms. Servers know it, too."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the run key without revealing it."""
        return hashlib.sha256(b"fingerprint" + self.token_key).hexdigest()[:16]

    def public(self, name: str) -> str:
        """The public key of this name, as text; "" if the run's connections have no keys."""
        return ""

    def secret(self, name: str) -> str:
        """The other half, for this name's own processes only."""
        return ""
