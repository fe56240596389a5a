"""The firewall rules of this machine, if this user may read them."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from dlctl.launch import commands

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""Not in every user's PATH."""
READ_S = 5.0
_INPUT_HOOK = re.compile(r"^\s*type filter hook input ", re.MULTILINE)
_REFUSES = re.compile(r"\b(?:drop|reject)\b", re.IGNORECASE)
_MANAGERS = {"firewalld": "firewall-cmd", "ufw": "ufw"}


def firewall() -> dict[str, Any]:
    """{family, is_active, words}: family is "ufw", "firewalld", "nft", "iptables" or "".

    `is_active`: whether some rule blocks incoming packets; None: this user cannot read the rules.
    """
    for family, tool in _MANAGERS.items():
        if (said := _read(tool, "status" if family == "ufw" else "--state")) is not None and (
            re.search(r"^(?:status: active|running)", said, re.IGNORECASE | re.MULTILINE)
        ):
            return {"family": family, "is_active": True, "words": f"{family} is active"}
    is_there = False
    for family, command in {"nft": ["list", "ruleset"], "iptables": ["-S", "INPUT"]}.items():
        is_there = is_there or _path(family) is not None
        said = _read(family, *command)
        if said is not None and _refuses(family, said):
            words = f"rules of {family} block some incoming packets"
            return {"family": family, "is_active": True, "words": words}
        if said is not None:
            words = "no rule blocks incoming packets"
            return {"family": family, "is_active": False, "words": words}
    words = "only root can read the rules" if is_there else "no tool to read rules found"
    return {"family": "", "is_active": None, "words": words}


def _refuses(family: str, said: str) -> bool:
    has_hook = family != "nft" or _INPUT_HOOK.search(said) is not None
    return has_hook and _REFUSES.search(said) is not None


def _path(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def _read(tool: str, *arguments: str) -> str | None:
    """A tool's output about the rules; None if it is not installed or fails."""
    path = _path(tool)
    if path is None:
        return None
    try:
        said = commands.wait([path, *arguments], READ_S)
    except OSError:
        return None
    return said.out if said.status == 0 else None
