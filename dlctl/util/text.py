"""Foreign text made harmless (what others wrote must not steer a terminal), lines of logs, and
counted nouns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

COORDINATOR_GONE = "the coordinator is gone: it is started again"
"""What an agent writes into its log when it does that; `status` knows when that was long ago."""
KILLED = "killed by dlctl stop --kill"
"""Why a run has ended, whether its coordinator says so or the command."""
NO_WORKER = "no worker is left"
"""How the reason begins of a run all of whose workers are quarantined."""
NOT_FINITE, REFUSED = "the loss or its gradient was not finite", "pushes in a row were refused"
"""What is said of a worker nothing of whose results can be used: as a rule the model is ruined."""
DISCARDED = f"{NOT_FINITE} or too large"
"""The first of these at its full length; runs of earlier versions have the short one on record."""
ENDED_BY_ITSELF = "it ended by itself"
"""How the words begin of a worker that did so again and again."""
BLAMED = "something in the task ends the process"
"""What is said of an end that is none of dlctl's."""
ALIKE_LIFE_S = 600.0
"""A worker that has lived longer is not counted with those before it. From its start, of seconds,
to where it ends takes minutes at most; and who ends every ten minutes has trained for nearly all of
its time, so that it is better to go on with it than without."""
PLACE_CHARS_MAX = 200
_EXITS = {
    70: "a bug in dlctl",
    75: "fenced: replaced by a newer process",
    76: "to be started again",
    79: "nothing that it computes can be used",
}
"""What the exit codes of daemons mean, which their commands do not have."""
_BIRTH = re.compile(r"INFO [\w-]+ starts, pid \d+")
_HARMLESS_SPACES = "\u00a0\u202f\u3000"


def is_poisoned(reason: str) -> bool:
    """Whether a run has failed because nobody could use what its workers computed."""
    return reason.startswith(NO_WORKER) and (NOT_FINITE in reason or REFUSED in reason)


def escape(text: str) -> str:
    """`text` with every control, bidi or otherwise invisible character as a visible escape.

    ESC becomes `\\x1b`, a line feed `\\n`, a right-to-left override `\\u202e`: one line stays one
    line, and what is shown is what is there.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _HARMLESS_SPACES else _visible(c) for c in text)


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def grave(lines: Iterable[str]) -> list[str]:
    """Of a log's lines, "LEVEL text" each, those that say more than that all is well."""
    return [line for line in lines if not line.startswith("INFO ")]


def is_birth(line: str) -> bool:
    """Whether a log's line is what every log begins with, which says nothing of an end."""
    return bool(_BIRTH.fullmatch(line))


def of_daemon(name: str, text: str) -> str:
    """What happened to a daemon, as the coordinator's log has it."""
    return text if name in text else f"{name}: {text}"


def describe_code(code: int) -> str:
    """Of a process that has exited by itself, as in "exit 75 (fenced: ...)"."""
    return f"exit {code}" + (f" ({_EXITS[code]})" if code in _EXITS else "")


def plural(count: int, noun: str) -> str:
    """As in "1 step", "2 steps", "12,345 steps"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ordinal(number: int) -> str:
    """As in "1st", "2nd", "11th", "23rd"."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    is_teen = number % 100 in (11, 12, 13)
    return f"{number:,}{'th' if is_teen else ends.get(number % 10, 'th')}"


def bounded_place(place: str) -> str:
    """A place as in "/home/me/train.py:51" as text that can be sent, and not too long: what is left
    out is of its beginning. A file may have any bytes as its name.
    """
    place = place.encode("utf-8", "backslashreplace").decode()
    return place if len(place) <= PLACE_CHARS_MAX else f"...{place[3 - PLACE_CHARS_MAX :]}"


def escape_lines(text: str) -> str:
    """The same for text that may have several lines: its line feeds stay."""
    return "\n".join(escape(line) for line in text.split("\n"))
