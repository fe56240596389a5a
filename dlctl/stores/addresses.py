"""An address in an object store, as "s3://bucket/prefix". It is text, never a `Path`: that would
turn "gs://" into "gs:/".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dlctl import registry
from dlctl.errors import UsageError
from dlctl.util import extras
from dlctl.util.did_you_mean import did_you_mean
from dlctl.util.redact import has_credentials, redacted

KIND = "stores"
FILE = "file"
_LIKE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/", re.ASCII)
_WHOLE = re.compile(r"([a-z][a-z0-9+.-]+)://([^/]*)(?:/(.*))?", re.ASCII | re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
CHARS_MAX = 900
"""Of a key: stores take 1,024 bytes, and names of checkpoints and files follow."""

Verdict = tuple[str, str]
"""The fault and a suggestion; "" if there is none."""
FINE: Verdict = ("", "")


@dataclass(frozen=True, slots=True)
class Address:
    scheme: str
    bucket: str
    """"" for a file."""
    key: str
    """Without a slash at its end; of a file the full path."""

    def __str__(self) -> str:
        if self.scheme == FILE:
            return f"{self.scheme}://{self.key}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    def split(self) -> tuple[Address, str]:
        """The address above it, and its last name."""
        above, _, name = self.key.rpartition("/")
        return Address(self.scheme, self.bucket, above), name


def is_like(text: str) -> bool:
    """Whether a text is meant as an address, right or wrong, and not as a path."""
    return _LIKE.match(text) is not None


def located(text: str, home: Path) -> str:
    """The full path of what is named relative to `home`; an address, or "", as it is."""
    return text if not text or is_like(text) else str(home / text)


def parse(text: str) -> Address:
    """Raises UsageError."""
    fault, suggestion = verdict(text)
    if fault:
        raise UsageError(f'"{redacted(text):.200}": the address {fault}', hint=suggestion or None)
    found = _WHOLE.fullmatch(text)
    assert found is not None
    scheme, bucket, key = found[1], found[2], (found[3] or "").rstrip("/")
    return Address(scheme, bucket, f"/{key}" if scheme == FILE else key)


def verdict(text: str) -> Verdict:
    """What is wrong with an address. No message repeats a password."""
    if has_credentials(text):
        return "must not have credentials", "set the variables of the store, as AWS_ACCESS_KEY_ID"
    if not text.isprintable() or any(character.isspace() for character in text):
        return "must be without spaces", ""
    found = _WHOLE.fullmatch(text)
    if found is None:
        return _without_scheme(text)
    scheme, bucket, key = found[1], found[2], found[3] or ""
    if not registry.is_known(KIND, scheme):
        meant = did_you_mean(scheme, registry.names(KIND), registry.ALIASES)
        return f'has the unknown scheme "{scheme:.20}"', meant
    if scheme == FILE and bucket:
        return (
            "must be a full path, as file:///mnt/store",
            f'did you mean "file:///{bucket}/{key}"?',
        )
    if scheme == FILE and not key.strip("/"):
        return "names no directory", 'as in "file:///mnt/store/digits"'
    if scheme != FILE and not _BUCKET.fullmatch(bucket):
        return "names no bucket", f'as in "{scheme}://bucket/prefix"'
    if "?" in text or "#" in text:
        return "must be without ? and #", ""
    if any(part in ("", ".", "..") for part in key.rstrip("/").split("/")) and key:
        return "has an empty part, or . or ..", ""
    if len(key) > CHARS_MAX:
        return f"has more than {CHARS_MAX} characters", ""
    return FINE


def _without_scheme(text: str) -> Verdict:
    what = 'must have a scheme, as in "s3://bucket/prefix"'
    scheme, mark, rest = text.partition(":")
    if not mark:
        scheme, mark, rest = text.partition("//")
    if mark and registry.is_known(KIND, scheme.lower()):
        scheme = scheme.lower()
        slashes = "///" if scheme == FILE else "//"
        return what, f'did you mean "{scheme}:{slashes}{rest.lstrip("/"):.200}"?'
    if text.startswith("/"):
        return what, f'did you mean "file://{text:.200}"?'
    return what, f'did you mean "s3://{text:.200}"?' if text else ""


def missing_package(text: str) -> Verdict:
    """The fault if the package for the scheme of a right address is not installed."""
    scheme = parse(text).scheme
    if scheme not in extras.PACKAGES or extras.is_there(scheme):
        return FINE
    return extras.missing(scheme), extras.how_to_install(scheme)
