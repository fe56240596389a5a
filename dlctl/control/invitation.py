"""An invitation: the file with which a worker joins a run from anywhere (`dlctl join`).

`dlctl keys invite NAME` writes all that this takes: the coordinator's address and public key, a
secret key that the coordinator knows, the worker's slot, and the versions that it has to have.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import NamedTuple

from dlctl.control import keys
from dlctl.errors import NotPermitted, UsageError, VersionMismatch

FILE_BYTES_MAX = 8192
SCHEMA = "dlctl.invitation/1"
SUFFIX = ".invite"
ASK = "ask the owner of the run for another one: dlctl keys invite NAME"
_GUEST = re.compile(r"guest-[0-9]{1,9}", re.ASCII)
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}", re.ASCII | re.IGNORECASE)


class Expired(NotPermitted):
    exit_code = 78


class InvitationFile(NamedTuple):
    run: str
    name: str
    guest: str
    """Under which name it connects."""
    address: str
    coordinator: str
    """The coordinator's public key."""
    secret: str
    expires: float
    """Seconds since 1970."""
    dlctl: str
    """The version of the run's dlctl."""
    torch: str
    """The release of the run's torch, as in "2.4"; "": it has none."""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps({"schema": SCHEMA, **self._asdict()}, indent=1).encode() + b"\n"


def load(path: Path) -> InvitationFile:
    """Read an invitation. Raises DlctlError if it is invalid, or other users may have read it."""
    data = keys.read_private(path, FILE_BYTES_MAX, "the invitation", ASK)
    try:
        content = json.loads(data)
        found = InvitationFile(*(content[name] for name in InvitationFile._fields))
        texts = [value for name, value in found._asdict().items() if name != "expires"]
        is_ours = content["schema"] == SCHEMA and all(type(text) is str for text in texts)
        is_ours = is_ours and type(found.expires) in (int, float)
        is_ours = is_ours and len(found.secret) == len(found.coordinator) == keys.KEY_LETTERS
        is_ours = is_ours and bool(_GUEST.fullmatch(found.guest) and _RUN.fullmatch(found.run))
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise UsageError("this is not an invitation", where=str(path), hint=ASK)
    return found


def refusal(invitation: InvitationFile, where: str, now: float) -> NotPermitted:
    """Why the run does not accept an invitation, as far as it can be known here. The run judges by
    its own clock, and does not say why; `now`, by this machine's clock, only serves the message.
    """
    if now < invitation.expires:
        return NotPermitted(
            f"{invitation.run} does not accept this invitation: it was revoked, or has expired, "
            "or the run has new keys",
            where=where,
            hint=f"{ASK} (or is the clock of this machine slow?)",
        )
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(invitation.expires))
    what = f"the invitation of {invitation.name} has expired, at {at} by this machine's clock"
    return Expired(what, where=where, hint=ASK)


def check(invitation: InvitationFile, dlctl: str, torch: str) -> None:
    """Raises VersionMismatch for another dlctl or torch than that of the run."""
    if dlctl != invitation.dlctl:
        raise VersionMismatch(
            f"this machine has dlctl {dlctl}, the run {invitation.dlctl}: they have to be the same",
            hint=f"install dlctl {invitation.dlctl} here",
        )
    if invitation.torch and torch != invitation.torch:
        raise VersionMismatch(
            f"this machine has torch {torch or 'missing'}, the run {invitation.torch}: they have "
            "to be of the same release",
            hint=f"install torch {invitation.torch} here",
        )


def release(version: str) -> str:
    """The release of a version: "2.4" of "2.4.1+cpu"."""
    return ".".join(version.partition("+")[0].split(".")[:2])
