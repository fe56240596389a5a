"""Credentials in addresses and arguments: found, and replaced before they are shown or stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

HIDDEN = "***"
_NAMED = r"[\w-]*(?:password|passwd|secret|token|credential|api[_-]?key|access[_-]?key)[\w-]*"
_USER = re.compile(r"(?<=://)[^\s\"']*@")
"""What stands before the host; a password may have any character but a space or a quote."""
_QUERY = re.compile(rf"([?&;]{_NAMED}=)[^&;\s\"']+", re.IGNORECASE)
_FLAG = re.compile(rf"-+{_NAMED}", re.IGNORECASE)
_KEY = re.compile(rf"[-+]*(?:[\w-]+[./])*{_NAMED}", re.IGNORECASE)
"""What stands before "=": also without dashes, and as a path, as Hydra has it."""
_HTTP = ("http", "https")


def redacted(text: str) -> str:
    """A text with all that may be a credential in its addresses replaced."""
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def has_credentials(address: str) -> bool:
    """Whether an address has a password, or a user name that may be a token (http)."""
    if _QUERY.search(address):
        return True
    if not _USER.search(address):
        return False
    try:
        found = urlsplit(address)
    except ValueError:
        return True
    if not found.netloc:  # As of sqlite:///me@home.db.
        return False
    return bool(found.password) or found.scheme in _HTTP or "@" not in found.netloc


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program without the values of those like --api-key and api_key=."""
    return [*_without_values(arguments)]


def _without_values(arguments: Sequence[str]) -> Iterator[str]:
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_named = _FLAG.fullmatch(name) is not None
        if is_value and not argument.startswith("-"):
            yield HIDDEN
        else:
            is_hidden = equals and _KEY.fullmatch(name) is not None
            yield f"{name}={HIDDEN}" if is_hidden else redacted(argument)
        is_value = is_named and not equals
