"""A worker's proof that the coordinator has issued its epoch.

Servers verify it on their own, so a worker can join while the coordinator is down, and a forged
epoch cannot fence the issued one.
"""

from __future__ import annotations

import hashlib
import hmac


def sign(key: bytes, run_id: str, slot: int, epoch: int) -> bytes:
    """HMAC-SHA256 over (run, slot, epoch) under the run's key."""
    text = f"dlctl worker {run_id} {slot} {epoch}".encode()
    return hmac.new(key, text, hashlib.sha256).digest()


def is_genuine(key: bytes, run_id: str, slot: int, epoch: int, token: bytes) -> bool:
    return hmac.compare_digest(sign(key, run_id, slot, epoch), token)
