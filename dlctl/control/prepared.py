"""A run whose name, key and invitations are fixed before it begins.

Whoever sets up a run elsewhere, as a manifest of Kubernetes does, hands the file of the control
process (`PreparedRun`) and the invitations of its workers over together: both come from one key.
`dlctl start` and `dlctl run` take name and key from the file that `DLCTL_PREPARED` names.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from dlctl import __version__
from dlctl.control import keys
from dlctl.control.invitation import InvitationFile
from dlctl.errors import UsageError
from dlctl.roles.protocol.context import COORDINATOR

VARIABLE = "DLCTL_PREPARED"
SCHEMA = "dlctl.prepared/1"
FILE_BYTES_MAX = 1 << 20
AGAIN = "make it again: dlctl kubernetes"
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}", re.ASCII | re.IGNORECASE)


class Invited(NamedTuple):
    """What `dlctl keys invite` tells the coordinator."""

    name: str
    serial: str
    expires: float
    """Seconds since 1970."""
    slot: int
    """The worker that it becomes: worker-<slot>."""


class PreparedRun(NamedTuple):
    run: str
    key: bytes
    """The run key: 32 random bytes."""
    invited: tuple[Invited, ...]

    def to_bytes(self) -> bytes:
        """The content of the file."""
        rows = [each._asdict() for each in self.invited]
        content = {"schema": SCHEMA, "run": self.run, "key": self.key.hex(), "invited": rows}
        return json.dumps(content).encode() + b"\n"

    def invitations(self, address: str) -> list[InvitationFile]:
        """The files of its workers; address: of the coordinator, tcp://HOST:PORT."""
        pairs = keys.CurveKeys(self.key)
        made = []
        for name, serial, expires, slot in self.invited:
            guest = f"guest-{slot}"
            secret = pairs.secret(f"{guest} of invitation {serial}")
            made.append(
                InvitationFile(
                    self.run, name, guest, address, pairs.public(COORDINATOR), secret, expires,
                    __version__, "",
                )
            )  # fmt: skip
        return made


def prepare(job: str, first_slot: int, count: int, expires: float) -> PreparedRun:
    """A new run of the job called `job`, with invitations for `count` workers that take the slots
    from `first_slot` on.
    """
    invited = (
        Invited(f"worker-{slot}", secrets.token_hex(8), expires, slot)
        for slot in range(first_slot, first_slot + count)
    )
    key = secrets.token_bytes(keys.KEY_BYTES)
    return PreparedRun(f"{job}-{secrets.token_hex(2)}", key, tuple(invited))


def load(path: Path) -> PreparedRun:
    """Raises DlctlError if it is invalid, or other users may have read it."""
    data = keys.read_private(path, FILE_BYTES_MAX, "the prepared run", AGAIN)
    try:
        content = json.loads(data)
        invited = tuple(
            Invited(str(row["name"]), str(row["serial"]), float(row["expires"]), int(row["slot"]))
            for row in content["invited"]
        )
        found = PreparedRun(str(content["run"]), bytes.fromhex(content["key"]), invited)
        is_ours = content["schema"] == SCHEMA and len(found.key) == keys.KEY_BYTES
        is_ours = is_ours and bool(_RUN.fullmatch(found.run))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise UsageError("this is not a prepared run", where=str(path), hint=AGAIN)
    return found


def given() -> PreparedRun | None:
    """The prepared run that the environment names; None: there is none. Raises DlctlError."""
    path = os.environ.get(VARIABLE)
    return load(Path(path)) if path else None
