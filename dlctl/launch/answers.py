"""Parses the result of a call to another machine: an answer in JSON, or output that explains why
there is none.

`python -m daemons.node` prints a marker line (`MARK`) and its answer in the next line: a login
shell may print anything before that. The standard error of the command that was run, such as ssh,
and of the remote Python is shown unchanged; dlctl's error only adds what it means.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from dlctl import errors
from dlctl.errors import DlctlError, Unreachable
from dlctl.util.text import escape

MARK = b"=== dlctl answers ==="
ANSWER_BYTES_MAX = 1 << 20
SHOWN_CHARS_MAX = 300
"""Characters that an error shows of one line of another program's output."""
NO_COMMAND, NO_ANSWER, TOO_MUCH, NOT_OURS = -1001, -1002, -1003, -1004
"""Statuses that no process has: the command could not be started; it was killed after the timeout,
because its output was too long, or because its output is not an answer of dlctl."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a shell."""


class CallResult(NamedTuple):
    """The result of one call to another machine."""

    host: str
    """The host's name in the job file."""
    value: dict[str, Any] | None
    """The answer of `daemons.node`; None: none was received."""
    status: int
    """The exit code of the command, or one of the above."""
    words: str
    """Standard error of both commands; without a value, also standard output."""

    @property
    def is_good(self) -> bool:
        """Whether the call succeeded."""
        return self.value is not None and "error" not in self.value

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.words.splitlines() if line.strip()]


def read(host: str, status: int, output: bytes, words: bytes) -> CallResult:
    """The answer in standard output: the line after the mark."""
    text = words.decode(errors="replace")
    _, mark, rest = output.rpartition(MARK + b"\n")
    line, end, _ = rest.partition(b"\n")
    try:
        value = json.loads(line) if mark and end else None
    except (ValueError, RecursionError):
        value = None
    if type(value) is dict:
        return CallResult(host, value, status, text)
    # `last` shows the last line, so standard error (ssh, the shell or Python) goes last.
    return CallResult(
        host, None, status, f"{output[:2000].decode(errors='replace')}\n{text}".strip()
    )


def value_of(
    answer: CallResult, explained: Callable[[CallResult], DlctlError] | None = None
) -> dict[str, Any]:
    """The value of a successful answer. Raises DlctlError for any other: `explained`, or as
    `explain` does.
    """
    if answer.value is None or not answer.is_good:
        raise (explained or explain)(answer)
    return answer.value


def as_value(error: DlctlError) -> dict[str, Any]:
    """An error as the remote end sends it."""
    kind = type(error).__name__
    return {"error": [kind, error.message, error.where or "", error.hint or ""]}


def explain(answer: CallResult, trial: str = "") -> DlctlError:
    """What failed, where, why (if known), and what to do next. `trial`: a command line that runs
    nothing but `true` on the host, if there is one.
    """
    if answer.value is not None:
        return _remote_error(answer.host, answer.value.get("error"))
    host, last_line = answer.host, last(answer.words)
    shown = f"see what a login prints there: {trial}" if trial else None
    if answer.status == NO_COMMAND:
        return DlctlError(f"the command for {host} cannot be run{last_line}", where="this machine")
    if answer.status == NO_ANSWER:
        return Unreachable(
            f"{host} has not answered in time{last_line}", where=host, hint=trial or None
        )
    if answer.status == TOO_MUCH:
        text = (
            f"{host} has sent more than {ANSWER_BYTES_MAX:,} bytes: this is not an answer of dlctl"
        )
        return DlctlError(text, where=host, hint=shown)
    if answer.status == NOT_OURS:
        return _not_ours(host, answer.words)
    return _shell_error(answer, trial, shown)


def of_launcher(error: DlctlError, launcher: str, *, directory: str = "dir") -> DlctlError:
    """Replace the keys of [[hosts]] in the hint by those of a launcher that brings its own hosts;
    `directory`: its key for the directory on a host.
    """
    for theirs, ours in (
        ("dir of this host in [[hosts]]", f"{directory} of {launcher}"),
        ("of this host in [[hosts]]", f"of {launcher}"),
        ("[[hosts]]", "[launcher]"),
    ):
        error.hint = error.hint.replace(theirs, ours) if error.hint else error.hint
    return error


# ---------------------------------------------------------------- from the remote end


def _remote_error(host: str, error: Any) -> DlctlError:
    if type(error) is not list or [type(part) for part in error] != [str] * 4:
        return _not_ours(host, "")
    kind, message, where, hint = error
    known = getattr(errors, kind, None)
    is_ours = isinstance(known, type) and issubclass(known, DlctlError)
    raised: type[DlctlError] = known if is_ours else DlctlError  # type: ignore[assignment]
    place = f"{host}:{where}" if where else host
    return raised(f"{host}: {message}", where=escape(place), hint=hint or None)


def _not_ours(host: str, words: str) -> DlctlError:
    text = f"{host} has sent an answer that this version of dlctl does not know{last(words)}"
    return DlctlError(text, where=host)


# ---------------------------------------------------------------- from the remote shell and Python


def _shell_error(answer: CallResult, trial: str, shown: str | None) -> DlctlError:
    host, words = answer.host, answer.words
    python = "set python of this host in [[hosts]]"
    if trial:
        there = f"{trial.removesuffix('true')}'which -a python3; ls -d */bin/python'"
        python = f"{python}; to list candidates: {there}"
    if answer.status in (NOT_EXECUTABLE, NOT_FOUND):
        text = f"{host} does not have this Python{last(words)}"
        return DlctlError(text, where=host, hint=python)
    if "unknown option: -p" in words.lower():
        text = f"{host} has a Python that is too old: dlctl needs 3.11"
        return DlctlError(text, where=host, hint=python)
    if "No module named" in words:
        return DlctlError(
            f"{host} has no dlctl, or lacks a dependency{last(words)}",
            where=host,
            hint=f"install dlctl {_version()} for that Python, or set python in [[hosts]]",
        )
    return DlctlError(
        f"{host} has sent no answer of dlctl (exit {answer.status}){last(words)}",
        where=host,
        hint=shown,
    )


def _version() -> str:
    from dlctl import __version__

    return __version__


def last(words: str) -> str:
    """The last line of the output, in parentheses, to append to a message."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f" ({escape(lines[-1][:SHOWN_CHARS_MAX])})" if lines else ""
