"""The settings that may change during a run: which roles have them, and how values are written.

Keys of every run are here. An option of a method or a compressor says itself that it is live
(`Live`); optimisers declare their rates (`live`). `of_job` collects those of a job. The coordinator
checks values to be set; `parse` reads the output of `LiveSettings.format` back to the same value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dlctl import outdated, registry
from dlctl.errors import UsageError
from dlctl.util import bounds, keydocs
from dlctl.util.did_you_mean import did_you_mean
from dlctl.util.live import Live as Live
from dlctl.util.live import is_live
from dlctl.util.units import format_rate, format_size, parse_rate, parse_size

LOG_LEVELS = ("debug", "info", "warning", "error")
GROUPS = "parameters"
"""The section of a job whose groups of parameters have rates and decays of their own."""
AUTO = "auto"
"""An interval that a worker finds automatically."""
COUNT_MAX = 10**6


def plainly(value: Any) -> str:
    """Unchanged, "-" for None."""
    return "-" if value is None else f"{value!r}"


def accept_any(value: Any, options: Mapping[str, Any]) -> None:
    """Every parsed value is valid in every job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    help: str = ""
    """What the setting means; "": the first words about the option of that name."""
    parse: Callable[[str], Any]
    """The JSON value of a user's text. Raises ValueError with the fault, for example with the valid
    range."""
    format: Callable[[Any], str] = plainly
    """Text that `parse` reads back to the same value. Text values are not formatted."""
    roles: tuple[str, ...] = ("worker",)
    """The roles whose daemons have it."""
    option: str = ""
    """The key of the job file that it changes, if it has another name there."""
    check: Callable[[Any, Mapping[str, Any]], None] = accept_any
    """Raises UsageError if a value conflicts with the other options, in the job file, of the
    component that declares it."""


# ---------------------------------------------------------------- how values are written


def number(text: str) -> float:
    """Parse a finite number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f'"{text}" is not a number')
    return found


def number_within(hint: Any) -> Callable[[str], float]:
    """A number in the range of `hint`, the annotated type of the same key in the job file."""

    def parse(text: str) -> float:
        found = number(text)
        if not bounds.holds(hint, found):
            (ends,) = bounds.bounds(hint)
            raise ValueError(f"must be {' and '.join(ends)} (got {text})")
        return found

    return parse


class ValueForm(NamedTuple):
    """One way in which users may write a value."""

    what: str
    """What users may write, for errors: "a number > 0"."""
    read: Callable[[str], Any]
    """The value of a text. Raises ValueError."""


def written_as(hint: Any) -> Callable[[str], Any]:
    """How users write a value of an option's type: a whole number, a number, or one of some words,
    as "auto". Raises TypeError for another type.
    """
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    is_union = get_origin(inner) in (Union, UnionType)
    forms = [_form(part) for part in (get_args(inner) if is_union else (hint,))]

    def parse(text: str) -> Any:
        for form in forms:
            with suppress(ValueError):
                return form.read(text)
        raise ValueError(f'"{text}" is not {" or ".join(form.what for form in forms)}')

    return parse


def _form(hint: Any) -> ValueForm:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) is Literal:
        words = {word: word for word in get_args(kind)}
        return ValueForm(" or ".join(f'"{word}"' for word in words), partial(_one_of, words))
    ends = [end for found in bounds.bounds(hint) for end in found]
    if kind is float:
        return ValueForm(" ".join(["a number", " and ".join(ends)]).strip(), number_within(hint))
    if kind is not int:
        raise TypeError(f"what changes live is a number, or one of some words: {hint}")
    if not any(end.startswith("<") for end in ends):
        ends.append(f"<= {COUNT_MAX}")
    return ValueForm(f"a whole number {' and '.join(ends)}", partial(_whole, hint))


def _one_of(words: Mapping[str, str], text: str) -> str:
    if text not in words:
        raise ValueError(text)
    return words[text]


def _whole(hint: Any, text: str) -> int:
    """Parse a whole number. Longer texts than the largest number are slow, and refused."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(COUNT_MAX))):
        raise ValueError(text)
    if (found := int(text)) > COUNT_MAX or not bounds.holds(hint, found):
        raise ValueError(text)
    return found


def _level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise ValueError(f'"{text}" is not one of {", ".join(LOG_LEVELS)}')
    return text


# ---------------------------------------------------------------- keys of every run

GENERAL: Mapping[str, Setting] = MappingProxyType(
    {
        "push": Setting(
            help='largest push rate of a worker: "5MB/s", "100Mbit/s" or "off"',
            parse=parse_rate,
            format=format_rate,
        ),
        "fetch": Setting(
            help='largest fetch rate of a worker: "5MB/s", "100Mbit/s" or "off"',
            parse=parse_rate,
            format=format_rate,
        ),
        "push_window": Setting(
            help='bytes of a worker\'s pushes in flight: "128MB" or "off"',
            parse=parse_size,
            format=format_size,
        ),
        "log_level": Setting(
            help=f"one of {', '.join(LOG_LEVELS)}",
            parse=_level,
            roles=("agent", "server", "worker"),
        ),
    }
)
OF_MESSAGES = ("push", "fetch", "push_window")
"""Limits on the traffic of workers."""
GENERAL_SECTION = "limits"
"""The section whose keys have the names of settings of every run."""


# ---------------------------------------------------------------- keys of one job


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """All settings that may change while one job runs."""

    by_key: Mapping[str, Setting] = field(default_factory=lambda: GENERAL)
    section: Mapping[str, str] = field(default_factory=dict)
    """Key -> the section of the job file that has it, for keys that components declare."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> the options of its component in the job file; those of the servers' optimiser with
    the groups of parameters, if there are any, as `GROUPS`."""

    def find(self, key: str) -> Setting:
        """The setting with this key. Raises UsageError with a suggestion if there is none."""
        if key not in self.by_key:
            meant = did_you_mean(key, self.by_key, registry.ALIASES)
            raise UsageError(
                f'no live setting of this job is called "{key:.80}"; {meant}',
                hint="dlctl set --list",
            )
        return self.by_key[key]

    def parse(self, key: str, text: str) -> Any:
        """The value of a user's text, None for "off".

        Raises UsageError for an unknown key, or a value that the key cannot have in this job.
        """
        setting = self.find(key)
        try:
            value = setting.parse(text.strip())
        except ValueError as error:
            raise UsageError(f"{key}: {error}", hint="dlctl set --list") from None
        setting.check(value, self.options.get(self.section.get(key, ""), {}))
        return value

    def format(self, key: str, value: Any) -> str:
        """A value as `parse` reads it. For an unknown key of another version it is unformatted."""
        if isinstance(value, str):
            return value
        setting = self.by_key.get(key)
        return plainly(value) if setting is None else setting.format(value)

    def has_unit(self, key: str) -> bool:
        """Whether users write it differently from programs."""
        return key in self.by_key and self.by_key[key].format is not plainly

    def called(self, path: str) -> str:
        """The setting whose initial value a job-file key, "optimizer.lr", has; "" if none."""
        section, _, option = path.partition(".")
        for key, setting in self.by_key.items():
            own = self.section.get(key, GENERAL_SECTION)
            if own == section and (setting.option or key) == option:
                return key
        return ""


EVERY_RUN = LiveSettings()


def _general(algorithm: Any) -> dict[str, Setting]:
    """The settings of every run that have an effect with this method."""
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else ""
    is_known = name in registry.names("algorithms")
    sends = not is_known or registry.load("algorithms", str(name)).shape.sends
    return {key: own for key, own in GENERAL.items() if sends or key not in OF_MESSAGES}


def of_job(
    job: Mapping[str, Any], live_of_method: Mapping[str, Setting] | None = None
) -> LiveSettings:
    """The settings of a job, which is given as plain data.

    live_of_method: the method's declarations, if known; else they are looked up in the registry.
    """
    by_key, sections = _general(job.get("algorithm")), {}
    options: dict[str, Mapping[str, Any]] = {}
    for section, kind in registry.SECTIONS.items():
        choice = job.get(section)
        if not isinstance(choice, Mapping):
            continue
        options[section] = choice.get("options") or {}
        is_at_hand = section == "algorithm" and live_of_method is not None
        own = live_of_method if is_at_hand else declared(kind, str(choice.get("name")))
        for key, setting in (own or {}).items():
            if key not in GENERAL:
                by_key[key], sections[key] = setting, section
    if groups := job.get(GROUPS):
        options["optimizer"] = {**options.get("optimizer", {}), GROUPS: groups}
    return LiveSettings(by_key, sections, options)


def of_options(options: Any) -> Mapping[str, Setting]:
    """The options of a component that say that they are live (`Live`). options: their class."""
    return _of_options(options)


@cache
def _of_options(options: Any) -> Mapping[str, Setting]:
    if not is_dataclass(options):
        return MappingProxyType({})
    hints = get_type_hints(options, include_extras=True)
    keys = [option.name for option in fields(options) if is_live(hints[option.name])]
    return MappingProxyType({key: Setting(parse=written_as(hints[key])) for key in keys})


def declared(kind: str, name: str) -> Mapping[str, Setting]:
    """The live settings of a component of the registry; none if it does not exist any more."""
    try:
        live: Mapping[str, Setting] = registry.load(kind, name).live
    except (UsageError, ImportError, AttributeError):
        return {}
    return live


def _explained(key: str, setting: Setting, options: type[Any]) -> Setting:
    """The setting with the first words about its option, where it has no text of its own."""
    if setting.help:
        return setting
    (option,) = (option for option in keydocs.keys(options) if option.name == key)
    text = option.text.removesuffix(keydocs.CHANGES).rstrip(" .")
    clause = re.split(r"[.;:] ", text)[0] or key
    words = [word for word in option.type.split(" or ") if word.startswith('"')]
    return replace(setting, help=", or ".join([f"{clause[:1].lower()}{clause[1:]}", *words]))


def every() -> Iterator[tuple[str, Setting, list[str]]]:
    """(key, setting, names of components that declare it) of all settings; no names: every run has
    it.
    """
    owners: dict[str, list[str]] = {key: [] for key in GENERAL}
    found = dict(GENERAL)
    for kind in registry.SECTIONS.values():
        for name in registry.names(kind):
            for key, setting in declared(kind, name).items():
                if key in GENERAL:
                    continue
                if key not in found:
                    found[key] = _explained(key, setting, registry.load(kind, name).Options)
                owners.setdefault(key, []).append(name)
    for key, setting in found.items():
        yield key, setting, owners[key]


def flat(job: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of a job, for example "optimizer.lr": "options" is an internal level, its keys
    are beside the name in a job file.
    """
    for key, item in job.items():
        here = path if key == "options" and path else f"{path}.{key}" if path else key
        if isinstance(item, Mapping):
            yield from flat(item, here)
        else:
            yield here, item


if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
