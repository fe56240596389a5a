"""DLCTL_FAILPOINT=NAME:COUNT makes a server kill itself at a named point, for tests of recovery.

The points are the steps of an update and a commit (`dlctl/shards/base.py`): with "commit half
written:20" it ends in the middle of its 20th commit.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping

from dlctl.errors import UsageError
from dlctl.shards.base import POINTS, no_point
from dlctl.shards.log import Point

VARIABLE = "DLCTL_FAILPOINT"
log = logging.getLogger("dlctl")


def from_environment(environment: Mapping[str, str]) -> Point:
    """The callback for every point. Raises UsageError for a value that is not NAME:COUNT."""
    wanted = environment.get(VARIABLE, "")
    if not wanted:
        return no_point
    name, _, count = wanted.rpartition(":")
    if name not in POINTS or not count.isdecimal() or int(count) < 1:
        raise UsageError(
            f'{VARIABLE} is "{wanted:.80}", not NAME:COUNT with a name out of {", ".join(POINTS)}',
            hint=f"unset {VARIABLE}",
        )
    log.warning("%s is set: this server kills itself at %r, time %s", VARIABLE, name, count)
    left = int(count)

    def point(at: str) -> None:
        nonlocal left
        left -= at == name
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    return point
