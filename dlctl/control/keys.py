"""The keys of a run: 32 random bytes in its directory, from which all others are derived.

Every name (coordinator, each daemon, the command line) has its own CURVE key pair, derived by
HMAC-SHA256(run key, purpose). So no pair is stored, and the next coordinator derives the same ones.
Only the coordinator and the command line read the run key. A daemon receives only its own secret,
on its standard input, from the process that starts it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from dlctl.errors import DlctlError, os_errors_as
from dlctl.roles.protocol.keyring import Keyring
from dlctl.runs import paths
from dlctl.util import regular

FILE = "key"
KEY_BYTES = 32
KEY_LETTERS = 40
"""The length of a CURVE key as text (Z85)."""


class KeyPair(NamedTuple):
    public: str
    secret: str


class CurveKeys(Keyring):
    """The keyring of a run whose connections are encrypted."""

    def __init__(self, run_key: bytes) -> None:
        super().__init__(token_key(run_key))
        self._run_key = run_key
        self._pairs: dict[str, KeyPair] = {}

    def public(self, name: str) -> str:
        return self.pair(name).public

    def secret(self, name: str) -> str:
        return self.pair(name).secret

    def pair(self, name: str) -> KeyPair:
        if name not in self._pairs:
            self._pairs[name] = _pair(_derive(self._run_key, f"curve {name}"))
        return self._pairs[name]


def token_key(run_key: bytes) -> bytes:
    """The key that signs term tokens; the servers receive it."""
    return _derive(run_key, "tokens")


def keyring(directory: Path, is_encrypted: bool) -> Keyring:
    """The keys of the run in `directory`. Raises DlctlError if other users may have read them."""
    run_key = read(directory)
    return CurveKeys(run_key) if is_encrypted else Keyring(token_key(run_key))


def read(directory: Path) -> bytes:
    """The run key. Raises DlctlError, which never contains the file's content, if other users may
    have read the key.
    """
    path = directory / FILE
    data = read_private(path, KEY_BYTES, "the run's key", "begin a new run: dlctl start --fresh")
    if len(data) != KEY_BYTES:
        words = f"the run's key is damaged: it has to be {KEY_BYTES} bytes"
        raise DlctlError(words, where=str(path))
    return data


def read_private(path: Path, bytes_max: int, what: str, if_known: str) -> bytes:
    """Read at most one byte more than `bytes_max` of a key file. Raises DlctlError, which never
    contains the content, if other users may have read the file. what: its name in errors, "the
    run's key". if_known: what to do if another user has read it.
    """
    with os_errors_as(f"cannot read {what}", path):
        descriptor = regular.descriptor(path, os.O_NOFOLLOW)
    try:
        _check_private(os.fstat(descriptor), path, what, if_known)
        return os.read(descriptor, bytes_max + 1)
    finally:
        os.close(descriptor)


def renew(directory: Path, key: bytes | None = None) -> None:
    """Replace the run's key atomically; None: by random bytes. Raises OSError; then the old key
    stays.
    """
    for left in directory.glob(f".{FILE}.*.tmp"):  # From a killed process.
        left.unlink(missing_ok=True)
    paths.write(directory / FILE, key or secrets.token_bytes(KEY_BYTES), 0o600)


def _check_private(info: os.stat_result, path: Path, what: str, if_known: str) -> None:
    if info.st_uid != os.getuid():
        raise DlctlError(f"{what} belongs to another user (uid {info.st_uid})", where=str(path))
    if info.st_mode & 0o077:
        raise DlctlError(
            f"others may read {what} (mode {info.st_mode & 0o777:04o})",
            where=str(path),
            hint=f"if no other user has read it: chmod 600 {path}; else {if_known}",
        )


def _derive(run_key: bytes, purpose: str) -> bytes:
    return hmac.new(run_key, f"dlctl 1 {purpose}".encode(), hashlib.sha256).digest()


def _pair(secret: bytes) -> KeyPair:
    import zmq
    from zmq.utils import z85

    text = z85.encode(secret)
    return KeyPair(zmq.curve_public(text).decode(), text.decode())
