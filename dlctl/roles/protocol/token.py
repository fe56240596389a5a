"""A worker's proof that the coordinator has issued its term.

Servers verify it on their own, so a worker can join while the coordinator is down, and a forged
term cannot fence the issued one.
"""

from __future__ import annotations

import hashlib
import hmac


def sign(key: bytes, run_id: str, slot: int, term: int) -> bytes:
    """HMAC-SHA256 over (run, slot, term) under the run's key."""
    text = f"dlctl worker {run_id} {slot} {term}".encode()
    return hmac.new(key, text, hashlib.sha256).digest()


def is_genuine(key: bytes, run_id: str, slot: int, term: int, token: bytes) -> bool:
    return hmac.compare_digest(sign(key, run_id, slot, term), token)
