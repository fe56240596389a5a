"""What to do next, as lines that can be pasted into a shell.

    next: dlctl recover -j mnist-7f3a
          continues at step 90: nothing is lost
      or: dlctl start --fresh job.toml
          starts over

A hint (`DlctlError.hint`) is such text without the labels: a command per line, below it its effect,
and "or: " before every alternative. So no line has two commands, or prose after a command: a pasted
line does what it shows. A pipe between two alternatives would run both of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

OR = "or: "
NEXT = "next: "
OF_A_RUN = (
    *("status", "logs", "events", "why", "wait", "get", "set", "scale", "restart", "recover"),
    *("stop", "checkpoint", "verify", "report"),
)
"""Commands that take -j."""


def either(*hints: str | None) -> str:
    """Alternatives, the best one first; empty ones are left out."""
    return f"\n{OR}".join(hint for hint in hints if hint)


def command(text: str, what: str) -> str:
    """A command, and its effect, or when to use it."""
    return f"{text}\n{what}" if what else text


def lines(hint: str, label: str = NEXT) -> list[str]:
    """The hint as it is shown: every alternative on its own lines, below the first one."""
    width = len(label)
    other = OR.rjust(width) if label.rstrip().endswith(":") else "or".ljust(width)
    shown: list[str] = []
    for line in hint.split("\n"):
        before = other if line.startswith(OR) else " " * width
        shown.append((before if shown else label) + line.removeprefix(OR))
    return shown


def each(hint: str) -> list[str]:
    """Every alternative as one line, for programs: the effect after the command."""
    return [" ".join(way.split("\n")) for way in hint.split(f"\n{OR}")] if hint else []


def as_data(hint: str) -> dict[str, Any]:
    """The hint for `--json`: `next` is the best alternative, and `or` are the others."""
    first, *others = each(hint) or [""]
    return {"next": first, "or": others}


def in_a_line(hint: str | None) -> str:
    """The hint in one line, for a log, and for the end of a sentence."""
    return f"; {OR}".join(each(hint or ""))


def about(hint: str, run: str) -> str:
    """The hint's commands with the name of the run that the user has given; without it they would
    refer to the newest run. run: "" if the user has not given any.
    """
    return "\n".join(_about(line, run) for line in hint.split("\n")) if run else hint


def _about(line: str, run: str) -> str:
    words = line.removeprefix(OR).split()
    if words[:1] != ["dlctl"] or words[1:2] == [] or words[1] not in OF_A_RUN:
        return line
    return line if _names_one(words) else f"{line} -j {shlex.quote(run)}"


def _names_one(words: Iterable[str]) -> bool:
    """A path names a run, too."""
    return any(word.startswith(("-j", "--job", "--help")) or "/" in word for word in words)
