"""Syntax of names, addresses and paths of machines, checked before they are used."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

HERE = "this machine"
"""What a host without a name is called."""
FULL_PATH = re.compile(r"/[^\0\n]*|~/[^\0\n]*")
"""A path on another machine."""
NAME_CHARS_MAX = 253
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def ssh_fault(text: str) -> str:
    """Why this is no host for ssh; "" if it is one: a name, an alias or an address, optionally with
    a user's name before it, as in "me@10.0.0.7" or "2001:db8::7".
    """
    if text.startswith("-"):
        return "begins with a dash: ssh would take it for an option"
    if text.startswith("[") or "%" in text or "://" in text:
        return "is not what ssh takes as a name: write an address as it is, a port in ~/.ssh/config"
    user, at, name = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        return "has before @ what is no user's name"
    return address_fault(name)


def address_fault(text: str) -> str:
    """Why this is neither a host's name nor an IP address (an IPv6 one without a scope); or ""."""
    if not text:
        return "is empty"
    if len(text) > NAME_CHARS_MAX:
        return f"has {len(text)} characters; a name has at most {NAME_CHARS_MAX}"
    with suppress(ValueError):
        if "%" not in text and ipaddress.ip_address(text):
            return ""
    if _NAME.fullmatch(text):
        return ""
    return "is no name of a host: letters, digits, dot, underscore, dash; and no IP address"
