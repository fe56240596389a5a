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
_EXITS = {
    70: "a bug in dlctl",
    75: "fenced: replaced by a newer process",
    76: "to be started again",
    79: "nothing that it computes can be used",
}
"""What the exit codes of daemons mean, which their commands do not have."""
_BIRTH = re.compile(r"INFO \w+ [\w-]+ starts, pid \d+")
_HARMLESS_SPACES = "\u00a0\u202f\u3000"


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


def escape_lines(text: str) -> str:
    """The same for text that may have several lines: its line feeds stay."""
    return "\n".join(escape(line) for line in text.split("\n"))
