"""Which rules of the kernel stand between this machine and others, as far as we may read them."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from dlctl.launch import commands

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""Not in everybody's PATH."""
READ_S = 5.0
_INPUT_HOOK = re.compile(r"^\s*type filter hook input ", re.MULTILINE)
_REFUSES = re.compile(r"\b(?:drop|reject)\b", re.IGNORECASE)
_MANAGERS = {"firewalld": "firewall-cmd", "ufw": "ufw"}


def firewall() -> dict[str, Any]:
    """{family, is_active, words}: family is "ufw", "firewalld", "nft", "iptables" or "".

    `is_active`: whether some rule refuses what comes in; None: it cannot be read by this user.
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
            words = f"rules of {family} refuse some of what comes in"
            return {"family": family, "is_active": True, "words": words}
        if said is not None:
            return {"family": family, "is_active": False, "words": "no rule refuses what comes in"}
    words = "the rules can be read by root only" if is_there else "no tool to read rules is here"
    return {"family": "", "is_active": None, "words": words}


def _refuses(family: str, said: str) -> bool:
    has_hook = family != "nft" or _INPUT_HOOK.search(said) is not None
    return has_hook and _REFUSES.search(said) is not None


def _path(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def _read(tool: str, *arguments: str) -> str | None:
    """What a tool says of the rules; None if it is not here, or does not say it."""
    path = _path(tool)
    if path is None:
        return None
    try:
        said = commands.wait([path, *arguments], READ_S)
    except OSError:
        return None
    return said.out if said.status == 0 else None
