"""The firewall rules of this machine, if this user may read them."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from dlctl.launch import commands

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""The directories of firewall programs, which are not in every user's PATH."""
READ_S = 5.0
_REFUSES = r".*\b(?:drop|reject)\b"
_FAMILIES = {
    "firewalld": ("firewall-cmd --state", "running"),
    "ufw": ("ufw status", "status: active"),
    "nft": ("nft list ruleset", r"(?=.*^\s*type filter hook input )" + _REFUSES),
    "iptables": ("iptables -S INPUT", _REFUSES),
}
"""Family -> a command, and how its output begins if some rule blocks incoming packets."""


def firewall() -> dict[str, Any]:
    """{family, is_active, words}: family is the active one of `_FAMILIES`, or "".

    `is_active`: whether some rule blocks incoming packets; None: this user cannot read the rules.
    """
    is_active, words = None, "no tool to read rules found"
    for family, (command, sign) in _FAMILIES.items():
        tool, *arguments = command.split()
        path = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SBIN}")
        output = _output([path, *arguments]) if path is not None else None
        if output is not None and re.match(sign, output, re.IGNORECASE | re.MULTILINE | re.DOTALL):
            words = f"{family} blocks some incoming packets"
            return {"family": family, "is_active": True, "words": words}
        if output is not None:
            is_active, words = False, "no rule blocks incoming packets"
        elif path is not None and is_active is None:
            words = "only root can read the rules"
    return {"family": "", "is_active": is_active, "words": words}


def _output(command: list[str]) -> str | None:
    """The output of a tool; None if it fails."""
    try:
        output = commands.wait(command, READ_S)
    except OSError:
        return None
    return output.out if output.status == 0 else None
