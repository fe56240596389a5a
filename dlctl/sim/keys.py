"""Keys of a simulated run: words that name their owners, distributed by the rules of real keys.

They detect a key that is not distributed, or sent to the wrong process, and a listener that does
not know which peers to admit. The simulator does not test whether keys can be forged.
"""

from __future__ import annotations

from dlctl.roles.protocol.keyring import Keyring

_SECRET, _PUBLIC = "secret ", "public key "


class SimulatedKeys(Keyring):
    """The keyring of a coordinator (`dlctl.roles.protocol.keyring`)."""

    def __init__(self, token_key: bytes, number: int = 0) -> None:
        """`number`: how often the run's key has been renewed."""
        super().__init__(token_key + bytes([number]) * bool(number))
        self._number = number

    def public(self, name: str) -> str:
        return f"{_PUBLIC}{self._number} of {name}"

    def secret(self, name: str) -> str:
        return f"{_SECRET}{self._number} of {name}"


def public_of(secret: str) -> str:
    """The public key of a secret one; "" for a process that has no keys."""
    return secret.replace(_SECRET, _PUBLIC, 1)
