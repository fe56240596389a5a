"""Numbers with units, as people write them: rates, sizes and durations.

A unit is required: a bare number is refused, because half of its readers would guess wrong. What
`format_*` prints, `parse_*` reads back to the same value; `short_*` is for people.
"""

from __future__ import annotations

import math
import re

_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_BITS = {"bit": 0.125, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6}
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_rate(text: str) -> float | None:
    """ "100Mbit/s", "5MB/s", "64KiB/s" as bytes per second; "off" (no limit) as None.

    Raises ValueError for a bare number, an unknown unit or a rate that is not positive.
    """
    if text.strip() == "off":
        return None
    body, slash, per = text.partition("/")
    if not slash or per.strip() != "s":
        raise ValueError(
            f'"{text}" is not a rate: write a number and a unit, as in "5MB/s", or "off"'
        )
    rate = _parse(body, {**_BYTES, **_BITS}, text, '"5MB/s" or "100Mbit/s"')
    if rate <= 0:
        raise ValueError(f'"{text}" is not a rate: it must be above zero; "off" means no limit')
    return rate


def parse_size(text: str) -> float | None:
    """ "128MB", "64KiB" as bytes; "off" (no limit) as None.

    Raises ValueError for a bare number, an unknown unit or a size that is not positive.
    """
    if text.strip() == "off":
        return None
    size_bytes = _parse(text, _BYTES, text, '"128MB" or "64KiB"; "off" means no limit')
    if size_bytes <= 0:
        raise ValueError(f'"{text}" is not a size: it must be above zero; "off" means no limit')
    return size_bytes


def format_rate(bytes_per_s: float | None) -> str:
    return "off" if bytes_per_s is None else f"{_scaled(bytes_per_s)}/s"


def format_size(size_bytes: float | None) -> str:
    return "off" if size_bytes is None else _scaled(size_bytes)


def short_rate(bytes_per_s: float) -> str:
    """A rate to three digits: "118 MB/s"."""
    return format_rate(_three_digits(bytes_per_s))


def short_size(size_bytes: float) -> str:
    """A size to three digits: "312 MB"."""
    return format_size(_three_digits(size_bytes))


def parse_duration(text: str) -> float:
    """ "90s", "5m", "1.5h" as seconds. Raises ValueError."""
    return _parse(text, _SECONDS, text, '"90s", "5m" or "1.5h"')


def format_duration(seconds: float) -> str:
    """A duration for people: "0.4s", "41s", "12m03s", "3h07m"."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _parse(body: str, units: dict[str, float], text: str, example: str) -> float:
    match = _NUMBER.match(body)
    if not match or match[2] not in units:
        raise ValueError(f'"{text}" needs a number and a unit, as in {example}')
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise ValueError(f'"{text}" is too large')
    return value


def _three_digits(value: float) -> float:
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded >= 100 else rounded


def _scaled(size_bytes: float) -> str:
    for unit in ("GB", "MB", "kB"):
        if size_bytes >= _BYTES[unit]:
            return f"{size_bytes / _BYTES[unit]!r}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes!r}".removesuffix(".0") + " B"
