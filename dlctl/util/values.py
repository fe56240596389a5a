"""Values as people read them in a terminal, and as programs read them in JSON.

A value that is missing, or of a type that another version writes, is shown as "-": a reading
command never fails because of what it reads.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlctl.util.names import MEASURED
from dlctl.util.text import describe_code
from dlctl.util.units import format_duration, short_rate, short_size

NOTHING = "-"
_TIME_KEYS = ("at", "ts", "since", "until")
_PLAIN_NAME = re.compile(r"[^\s,\"]+(?: [^\s,\"]+)*")


def number(value: Any) -> float | None:
    """A plain number, or None for anything else (no value, text, true, NaN, infinity)."""
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can be
        return None


def count(value: Any) -> str:
    """A whole number, as in "12,345"."""
    return NOTHING if number(value) is None else f"{int(value):,}"


def decimal(value: Any, digits: int = 3) -> str:
    """Significant digits: "0.213", "41.2", "1.3e-05"; NaN and infinity by their names."""
    if type(value) is float and not math.isfinite(value):
        return f"{value}"
    return NOTHING if number(value) is None else f"{value:.{digits}g}"


def fixed(value: Any, digits: int) -> str:
    """A fixed number of decimals, for columns: "41.2"."""
    return NOTHING if number(value) is None else f"{value:,.{digits}f}"


def rate(value: Any) -> str:
    """Bytes per second to three digits: "118 MB/s"."""
    return NOTHING if number(value) is None else short_rate(value)


def size(value: Any) -> str:
    """Bytes to three digits: "312 MB"."""
    return NOTHING if number(value) is None else short_size(value)


def duration(seconds: Any) -> str:
    """A duration, "0.4s" or "12m03s"; a negative time (two clocks differ) is zero."""
    return NOTHING if number(seconds) is None else format_duration(max(seconds, 0.0))


def ago(then: Any, now: float) -> str:
    """How long ago a moment was: "41s ago"."""
    return NOTHING if number(then) is None else f"{duration(now - then)} ago"


def clock(at: Any, now: float) -> str:
    """Local time of day with milliseconds, and the date in front of it unless it is today's."""
    if number(at) is None:
        return NOTHING
    try:
        when, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now).date()
    except (OverflowError, OSError, ValueError):
        return NOTHING
    text = when.strftime("%H:%M:%S.") + f"{when.microsecond // 1000:03d}"
    return text if when.date() == today else f"{when:%Y-%m-%d} {text}"


def rfc3339(at: float) -> str:
    """A moment in UTC: "2025-06-15T15:06:40.000Z"."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def timed(value: Any, key: str = "") -> Any:
    """A JSON value in which every time ("at", "started_at", "waiting_since") is RFC 3339 in UTC."""
    if key in MEASURED:
        return value
    if isinstance(value, Mapping):
        return {k: timed(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [timed(v) for v in value]
    if key.rpartition("_")[2] in _TIME_KEYS and (seconds := number(value)) is not None:
        try:
            return rfc3339(seconds)
        except (OverflowError, OSError, ValueError):
            return None
    return value


def path(path: str | Path) -> str:
    """A path as short as it can be typed here; an address as it is."""
    if "://" in str(path):
        return str(path)
    whole, here = Path(path).absolute(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def measured(table: Any) -> str:
    """A table of measured values, as in "accuracy 0.912, loss 0.31". It is not escaped."""
    if not isinstance(table, Mapping):
        return NOTHING
    return ", ".join(f"{name(key)} {decimal(value, 4)}" for key, value in table.items()) or NOTHING


def name(key: str) -> str:
    """A name that a task chose: quoted, if it could be taken for more than a name."""
    return key if _PLAIN_NAME.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def exit_in_words(code: Any) -> str:
    """A process's end: `code` as subprocess gives it, negative for the signal that killed it."""
    if type(code) is not int:
        return "ended"
    if code >= 0:
        return describe_code(code)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"
