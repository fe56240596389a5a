"""Keys of a simulated run: words that say whose they are, handed on by the same rules as real ones.

What the simulator finds out with them: a key that is not handed on, or to somebody else, and a
listener that does not know whom to let in. Whether keys can be forged is no question of time.
"""

from __future__ import annotations

_SECRET, _PUBLIC = "secret of ", "public key of "


class SimulatedKeys:
    """The keyring of a coordinator (`dlctl.roles.keyring`)."""

    def __init__(self, token_key: bytes) -> None:
        self.token_key = token_key

    def public(self, name: str) -> str:
        return _PUBLIC + name

    def secret(self, name: str) -> str:
        return _SECRET + name


def public_of(secret: str) -> str:
    """ "" for a process that has no keys."""
    return secret.replace(_SECRET, _PUBLIC, 1)
