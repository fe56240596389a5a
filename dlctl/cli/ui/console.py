"""The only module that writes to the terminal.

stdout is for data only, so that it can be piped; everything else (notes, warnings, progress,
errors) goes to stderr. Foreign text goes through `escape` before it is shown: `error`, `warn` and
`hint` do so themselves; for `out`, `note` and `table` the caller does, because their input may be
styled.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import click

from dlctl.errors import DlctlError
from dlctl.util import hints, notes
from dlctl.util.text import escape as escape
from dlctl.util.text import escape_lines as escape_lines

SIGPIPE_EXIT_CODE = 141
"""The exit status of a program that wrote to a pipe without a reader: 128 + SIGPIPE."""


@dataclass(slots=True)
class _Settings:
    color: str = "auto"
    progress: str = "auto"
    quiet: bool = False
    verbose: bool = False


_settings = _Settings()


def setup(
    color: str = "auto", progress: str = "auto", quiet: bool = False, verbose: bool = False
) -> None:
    """Apply the global options.

    color: auto, always or never. progress: auto, tty, plain, json or quiet.
    """
    global _settings
    _settings = _Settings(color, progress, quiet, verbose)
    notes.listen(_Listener())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Listener:
    """Shows the notes and warnings of operations."""

    def note(self, text: str) -> None:
        note(escape(text))

    def warn(self, text: str) -> None:
        warn(text)


def is_quiet() -> bool:
    """-q: notes and hints are dropped, and lists print only names."""
    return _settings.quiet


def is_tty(*, err: bool = False) -> bool:
    """Whether stdout (or stderr) is a terminal."""
    stream = _stream(err)
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def progress_style() -> str:
    """How to show progress on stderr: "tty", "plain", "json" or "quiet"."""
    if _settings.progress != "auto":
        return _settings.progress
    if _settings.quiet:
        return "quiet"
    return "tty" if is_tty(err=True) and os.environ.get("TERM") != "dumb" else "plain"


# ---------------------------------------------------------------- stdout: data


def out(text: str = "", *, flush: bool = False) -> None:
    """Write one or more lines of data to stdout; use `flush=True` for a stream.

    Exits silently with 141 if stdout has no reader any more. Stops writing to a terminal that is
    gone. Raises DlctlError if stdout cannot be written (the disk is full).
    """
    _write_out(f"{text}\n", flush)


def out_json(schema: str, value: dict[str, Any], *, flush: bool = False) -> None:
    """One JSON object on one line: `{"schema": "dlctl.ps/1", ...}`; NaN and infinity are null."""
    _write_out(json.dumps(_finite({"schema": schema, **value}), allow_nan=False) + "\n", flush)


def flush() -> None:
    """Flush the buffer of stdout; errors as in `out`."""
    _write_out("", flush=True)


def _write_out(text: str, flush: bool) -> None:
    stream = _stream(err=False)
    if stream is None:
        return
    try:
        stream.write(text)
        if flush:
            stream.flush()
    except OSError as error:
        is_gone = error.errno == errno.EIO and _was_terminal(stream)
        abandon_stdout()
        if is_gone:
            return
        if error.errno == errno.EPIPE:
            raise SystemExit(SIGPIPE_EXIT_CODE) from None
        raise DlctlError(f"cannot write to stdout: {error.strerror}") from error


def abandon_stdout() -> None:
    """Discard buffered output, so that the interpreter exits without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until exit
    finally:
        os.close(nowhere)


def _was_terminal(stream: TextIO) -> bool:
    """Whether an unwritable stream was a terminal: `isatty` is false after its window closes."""
    try:
        return stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ---------------------------------------------------------------- stderr: everything else


def note(text: str) -> None:
    """A progress message for people. May be styled; dropped with -q."""
    if not _settings.quiet:
        _write_err(text)


def commands(rows: Sequence[tuple[str, str]]) -> None:
    """The next commands, a note each: the command, and what it does."""
    width = max(len(command) for command, _ in rows)
    for command, what in rows:
        note(escape(f"  {command:<{width}}  {what}"))


def detail(text: str) -> None:
    """A note that only -v shows."""
    if _settings.verbose:
        _write_err(text)


def warn(text: str) -> None:
    _write_err(style("warning: ", fg="yellow", bold=True, err=True) + escape_lines(text))


def hint(text: str) -> None:
    """A suggestion for the next command; dropped with -q."""
    if not _settings.quiet:
        _write_err(style("hint: ", fg="cyan", err=True) + escape_lines(text))


def error(problem: DlctlError) -> None:
    """What went wrong, where, and what to do next:

    error: worker-3 did not become ready in 60s (state: starting)
      --> runs/mnist-7f3a
      next: dlctl logs worker-3 --previous

    Alternatives and what a command does are on separate lines (see `dlctl.util.hints`).
    """
    _write_err(style("error: ", fg="red", bold=True, err=True) + escape_lines(problem.message))
    if problem.where:
        _write_err("  --> " + escape(problem.where))
    if problem.hint:
        _write_err(next_lines(problem.hint, "  "))


def next_lines(hint: str, indent: str, label: str = hints.NEXT) -> str:
    """The next command as indented lines; see `hints.lines`."""
    return "\n".join(indent + escape(line) for line in hints.lines(hint, label))


def _write_err(text: str) -> None:
    """Write a line to stderr, after flushing stdout: both may have the same destination. Errors are
    ignored, as there is no other stream to report them.
    """
    if sys.stderr is None:
        return
    if (stream := _stream(err=False)) is not None:
        with suppress(OSError, ValueError):  # The next write to stdout raises it.
            stream.flush()
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return


# ---------------------------------------------------------------- shapes and colours


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> str:
    """Columns with two spaces between them, never truncated; `right` names those aligned right."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(headers))]
    aligned_right = [header in set(right) for header in headers]
    return "\n".join("  ".join(map(_pad, line, widths, aligned_right)).rstrip() for line in lines)


def _pad(cell: str, width: int, to_the_right: bool) -> str:
    spaces = " " * (width - _width(cell))
    return spaces + cell if to_the_right else cell + spaces


def _width(cell: str) -> int:
    return len(click.unstyle(cell))


def style(
    text: str, fg: str | int | None = None, bold: bool = False, dim: bool = False, err: bool = False
) -> str:
    """Colour `text` if stdout (or stderr) shows colours. `fg` is a name or one of 256 numbers."""
    if not shows_color(err=err):
        return text
    return click.style(text, fg=fg, bold=bold or None, dim=dim or None)


def shows_color(*, err: bool = False) -> bool:
    """--color, then NO_COLOR, FORCE_COLOR, TERM=dumb, then whether the stream is a terminal."""
    if _settings.color != "auto":
        return _settings.color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and is_tty(err=err)


def _stream(err: bool) -> TextIO | None:
    """The current stream (tests replace it); None if the program was started without it."""
    return sys.stderr if err else sys.stdout
