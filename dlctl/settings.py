"""The settings that change while a run goes on: who has them and how their values are written.

Plain data and pure functions: the command line checks a value before it is sent, the roles read
the same text again. What `format_value` prints, `parse` reads back to the same value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from dlctl.errors import UsageError
from dlctl.util import bounds, hints, numeric_limits
from dlctl.util.did_you_mean import did_you_mean
from dlctl.util.units import format_rate, format_size, parse_rate, parse_size

LOG_LEVELS = ("debug", "info", "warning", "error")
AUTO = "auto"
"""An interval that a worker finds by itself."""


class Setting(NamedTuple):
    roles: tuple[str, ...]
    """The roles whose daemons have it."""
    kind: str
    """The name of its parser, as in `_PARSERS`."""
    help: str


SETTINGS: dict[str, Setting] = {
    "push_every_steps": Setting(
        ("worker",), "interval", 'steps from one push to the next, or "auto"'
    ),
    "fetch_every_steps": Setting(
        ("worker",), "interval", 'steps from one fetch to the next, or "auto"'
    ),
    "push": Setting(("worker",), "rate", 'the most a worker pushes: "5MB/s", "100Mbit/s" or "off"'),
    "fetch": Setting(
        ("worker",), "rate", 'the most a worker fetches: "5MB/s", "100Mbit/s" or "off"'
    ),
    "push_window": Setting(
        ("worker",),
        "size",
        'bytes of a worker\'s pushes that may be on their way: "128MB" or "off"',
    ),
    "lr": Setting(("server",), "learning rate", "learning rate of the servers' optimiser"),
    "local_lr": Setting(("worker",), "local rate", "rate of a replica's own steps between fetches"),
    "local_steps": Setting(
        ("worker",), "count", "steps of a replica alone from one mean to the next (local-sgd)"
    ),
    "density": Setting(
        ("worker",), "fraction", "part of the entries that a push carries, 0 < d <= 1"
    ),
    "log_level": Setting(("agent", "server", "worker"), "level", f"one of {', '.join(LOG_LEVELS)}"),
}


def parse(key: str, text: str) -> Any:
    """The value of a setting as people write it: an int, a float, a str, or None for "off".

    Raises UsageError for an unknown key (with a suggestion) or a value that the key cannot have.
    """
    find(key)
    try:
        return parse_value(key, text)
    except ValueError as error:
        raise UsageError(f"{key}: {error}", hint="dlctl set --list") from None


def parse_value(key: str, text: str) -> Any:
    """The same for a key that there is. Raises ValueError."""
    return _PARSERS[SETTINGS[key].kind](text.strip())


def find(key: str) -> Setting:
    """The setting of this name. Raises UsageError with a suggestion."""
    if key not in SETTINGS:
        meant = did_you_mean(key, SETTINGS)
        raise UsageError(f'no live setting is called "{key}"; {meant}', hint="dlctl set --list")
    return SETTINGS[key]


def require(name: str, reported: Any, keys: Iterable[str]) -> None:
    """Raises UsageError if a worker has not one of these, by what it says of its settings; whoever
    has not said anything yet may have them all.
    """
    for key in keys:
        if isinstance(reported, Mapping) and key not in reported:
            raise UsageError(
                f"{name} has no {key}: neither its method nor its compressor has it",
                hint=hints.told(f"dlctl get {name}", "shows what it has"),
            )


def require_decay(values: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Raises UsageError if weights would grow with a rate that is to be set, by the decay that the
    job file has among the options of its optimiser.
    """
    weight_decay = optimizer.get("weight_decay", 0.0)
    if fault := numeric_limits.decay_fault(values.get("lr", 0.0), weight_decay):
        most = numeric_limits.most_with(weight_decay)
        raise UsageError(
            f"lr: {fault}",
            hint=hints.told(f"dlctl set lr={most}", "that is the most with the job's weight_decay"),
        )


def format_value(key: str, value: Any) -> str:
    """A value as `parse` reads it. Text stays as it is; an unknown key's value is shown plainly."""
    if isinstance(value, str):
        return value
    if has_unit(key):
        return _FORMATS[SETTINGS[key].kind](value)
    return "-" if value is None else f"{value!r}"


def has_unit(key: str) -> bool:
    """Whether people write it with a unit, or as "off"."""
    return key in SETTINGS and SETTINGS[key].kind in _FORMATS


def _interval(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not _is_count(text):
        raise ValueError(f'"{text}" is neither a whole number from 1 to 1000000 nor "{AUTO}"')
    return int(text)


def _count(text: str) -> int:
    if not _is_count(text):
        raise ValueError(f'"{text}" is not a whole number from 1 to 1000000')
    return int(text)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 10**6


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f'"{text}" is not a number')
    return number


def _within(hint: Any, text: str) -> float:
    """A number as the job file may have it: the type says which."""
    number = _number(text)
    if not bounds.holds(hint, number):
        (ends,) = bounds.bounds(hint)
        raise ValueError(f"must be {' and '.join(ends)} (got {text})")
    return number


def _fraction(text: str) -> float:
    if not 0 < (number := _number(text)) <= 1:
        raise ValueError(f'"{text}" is not above 0 and at most 1')
    return number


def _level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise ValueError(f'"{text}" is not one of {", ".join(LOG_LEVELS)}')
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {
    "interval": _interval,
    "count": _count,
    "rate": parse_rate,
    "size": parse_size,
    "learning rate": partial(_within, numeric_limits.LearningRate),
    "local rate": partial(_within, numeric_limits.LocalRate),
    "fraction": _fraction,
    "level": _level,
}
_FORMATS: dict[str, Callable[[Any], str]] = {"rate": format_rate, "size": format_size}
"""Of the kinds that people write with a unit; all others are shown plainly."""
