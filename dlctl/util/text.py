"""Escaping of untrusted text (it must not control a terminal), lines of logs, and counted nouns."""

from __future__ import annotations

import re
from collections.abc import Iterable

COORDINATOR_GONE = "the coordinator is gone: it is started again"
"""An agent logs this when it restarts the coordinator; `status` detects that it was long ago."""
KILLED = "killed by dlctl stop --kill"
"""Why a run has ended, whether the coordinator or the command reports it."""
NO_WORKER = "no worker is left"
"""The beginning of the reason of a failed run whose workers are all quarantined."""
NOT_FINITE, REFUSED = "the loss or its gradient was not finite", "pushes in a row were refused"
"""Reported of a worker whose results are all unusable: usually its model is ruined."""
DISCARDED = f"{NOT_FINITE} or too large"
"""The long form of the first; runs of earlier versions have recorded the short one."""
ENDED_BY_ITSELF = "it ended by itself"
"""The beginning of the reason for a worker that repeatedly exited on its own."""
HAS_LEFT = "it has left its training loop"
"""How a worker has ended whose script went on although the run does."""
OTHER_NUMBERS = "the shards in the records of this run are numbered by their places in the list"
"""Part of the reason of a run from an earlier version, whose records do not fit its shards."""
BLAMED = "something in the task ends the process"
"""Reported of an exit that dlctl did not cause."""
ALIKE_LIFE_S = 600.0
"""A worker that has run longer is not counted with its predecessors. A deterministic crash happens
minutes after the start at most; and a worker that crashes every ten minutes still trains for nearly
all of its time, so it is better to keep it."""
PLACE_CHARS_MAX = 200
_EXITS = {
    70: "a bug in dlctl",
    75: "fenced: replaced by a newer process",
    76: "to be started again",
    79: "nothing that it computes can be used",
}
"""The meanings of exit codes that only daemons use."""
_FIRST_LINE = re.compile(r"INFO (?:\w+ )?[\w-]+ starts, pid \d+")
_HARMLESS_SPACES = "\u00a0\u202f\u3000"


def is_poisoned(reason: str) -> bool:
    """Whether a run has failed because its workers' results were unusable."""
    return reason.startswith(NO_WORKER) and (NOT_FINITE in reason or REFUSED in reason)


def escape(text: str) -> str:
    """`text` with every control, bidi or otherwise invisible character as a visible escape.

    ESC becomes `\\x1b`, a line feed `\\n`, a right-to-left override `\\u202e`: one line stays one
    line, and the output shows every character.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS_SPACES else _visible(c) for c in text)


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def grave(lines: Iterable[str]) -> list[str]:
    """The lines of a log, "LEVEL text" each, above level INFO."""
    return [line for line in lines if not line.startswith("INFO ")]


def is_first_line(line: str) -> bool:
    """Whether this is the line that every log begins with, which does not explain an exit."""
    return bool(_FIRST_LINE.fullmatch(line))


def of_daemon(name: str, text: str) -> str:
    """An event of a daemon, as in the coordinator's log."""
    return text if name in text else f"{name}: {text}"


def describe_code(code: int) -> str:
    """Describe the exit code of a process, as in "exit 75 (fenced: ...)"."""
    return f"exit {code}" + (f" ({_EXITS[code]})" if code in _EXITS else "")


def plural(count: int, noun: str) -> str:
    """A number with its noun: "1 step", "2 steps", "12,345 steps"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ordinal(number: int) -> str:
    """An ordinal number: "1st", "2nd", "11th", "23rd"."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    is_teen = number % 100 in (11, 12, 13)
    return f"{number:,}{'th' if is_teen else ends.get(number % 10, 'th')}"


def bounded_place(place: str) -> str:
    """A place as in "/home/me/train.py:51" as text that can be sent, and not too long: its
    beginning is cut off. A file name may contain any bytes.
    """
    place = place.encode("utf-8", "backslashreplace").decode()
    return place if len(place) <= PLACE_CHARS_MAX else f"...{place[3 - PLACE_CHARS_MAX :]}"


def escape_lines(text: str) -> str:
    """`escape` for text with several lines: line feeds are not escaped."""
    return "\n".join(escape(line) for line in text.split("\n"))
