"""The only module that writes to the terminal.

stdout is for data only, so that it can be piped; everything else (notes, warnings, progress,
errors) goes to stderr. Foreign text is escaped before it is shown: by every function here except
`out`, whose caller uses `escape` or `style`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dlctl.errors import DlctlError
from dlctl.util import hints, notes, outfile, values
from dlctl.util.outfile import BROKEN_PIPE_EXIT_CODE
from dlctl.util.text import escape as escape
from dlctl.util.text import escape_lines as escape_lines


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """The global options, and --json."""

    color: str = "auto"
    """auto, always or never."""
    progress: str = "auto"
    """auto, tty, plain, json or quiet."""
    quiet: bool = False
    """Notes and hints are dropped, and lists print only names."""
    verbose: bool = False
    json: bool = False
    """The result is for programs."""


settings = ConsoleOptions()
ERASE = "\r\x1b[K"
_live = ""
"""The line of progress on a terminal; see `put_live`."""


def setup(**options: Any) -> None:
    """Replace `settings`; those not given have their defaults."""
    global settings
    settings = ConsoleOptions(**options)
    notes.listen(note, warn)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_tty(*, err: bool = False) -> bool:
    """Whether stdout (or stderr) is a terminal."""
    stream = sys.stderr if err else sys.stdout
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def progress_style() -> str:
    """How to show progress on stderr: "tty", "plain", "json" or "quiet"."""
    if settings.progress != "auto":
        return settings.progress
    if settings.quiet:
        return "quiet"
    return "tty" if is_tty(err=True) and os.environ.get("TERM") != "dumb" else "plain"


def out(text: str = "", *, flush: bool = False) -> None:
    """Write one or more lines of data to stdout; use `flush=True` for a stream.

    Exits silently with 141 if stdout has no reader any more; output to a closed terminal is
    dropped. Raises DlctlError if stdout cannot be written (the disk is full).
    """
    _write_out(f"{text}\n", flush)


def written(file: Path, more: str = "") -> None:
    """A file that was written, and more about it; a note if that file is stdout."""
    text = "  ".join(filter(None, (str(file), more)))
    if outfile.is_stdout(file):
        note(text)
    else:
        out(escape(text))


def show(
    schema: str, data: Mapping[str, Any], text: str, names: Iterable[object] | None = None
) -> None:
    """The result of a command: `data` with --json; of a list only the names with -q; else `text`,
    unless it is empty.
    """
    if settings.json:
        out_json(schema, data)
    elif settings.quiet and names is not None:
        for name in names:
            out(escape(str(name)))
    elif text:
        out(text)


def out_json(schema: str, value: Mapping[str, Any]) -> None:
    """One JSON object on one line: `{"schema": "dlctl.ps/1", ...}`; NaN and infinity are null."""
    out(json.dumps(_finite({"schema": schema, **value}), allow_nan=False))


def flush() -> None:
    """Flush the buffer of stdout; errors as in `out`."""
    _write_out("", flush=True)


def _write_out(text: str, flush: bool) -> None:
    if sys.stdout is None:  # The program was started without it.
        return
    try:
        sys.stdout.write(text)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()
        raise SystemExit(BROKEN_PIPE_EXIT_CODE) from None
    except OSError as error:
        abandon_stdout()
        if error.errno == errno.EIO:  # The terminal is closed.
            return
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


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def note(text: str) -> None:
    """A message for people; dropped with -q."""
    if not settings.quiet:
        write_err(escape_lines(text))


def commands(rows: Sequence[tuple[str, str]]) -> None:
    """The next commands, a note each: the command, and what it does."""
    width = max(len(command) for command, _ in rows)
    for command, what in rows:
        note(f"  {command:<{width}}  {what}")


def warn(text: str) -> None:
    write_err(style("warning: ", fg="yellow", bold=True, err=True) + escape_lines(text))


def error(problem: DlctlError) -> None:
    """What went wrong, where, and what to do next:

    error: worker-3 did not become ready in 60s (state: starting)
      --> runs/mnist-7f3a
      next: dlctl logs worker-3 --previous

    Alternatives and what a command does are on separate lines (see `dlctl.util.hints`).
    """
    write_err(style("error: ", fg="red", bold=True, err=True) + escape_lines(problem.message))
    if problem.where:
        write_err("  --> " + escape(problem.where))
    if problem.hint:
        write_err(next_lines(problem.hint, "  "))


def next_lines(hint: str, indent: str, label: str = hints.NEXT) -> str:
    """The next command as indented lines; see `hints.lines`."""
    return "\n".join(indent + escape(line) for line in hints.lines(hint, label))


def write_err(text: str) -> None:
    """Write a line to stderr, above the live line. It is escaped, and may be styled."""
    _write_err(f"{ERASE}{text}\n{_live}" if _live else f"{text}\n")


def put_live(text: str) -> None:
    """Draw the live line again, below everything else on a terminal; "" removes it. Escaped, and
    not longer than the terminal is wide.
    """
    global _live
    if text or _live:
        _write_err(ERASE + text)
    _live = text


def _write_err(text: str) -> None:
    """Flushes stdout first: both may have the same destination. Errors are ignored, as there is no
    other stream to report them.
    """
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError, AttributeError):  # The next write to stdout raises it.
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def fact(label: str, text: str, *, is_warning: bool = False) -> str:
    """An escaped line, as in "  checkpoint  step 90", or "! code        changed"."""
    mark = style("!", fg="yellow") if is_warning else " "
    return f"{mark} {label:<10}  {escape(text)}"


class Styled(str):
    """Escaped text with colour codes."""


def style(
    text: str, fg: str | int | None = None, bold: bool = False, dim: bool = False, err: bool = False
) -> str:
    """Escape `text`, and colour it if stdout (or stderr) shows colours. `fg` is a name or one of
    256 numbers.
    """
    if not shows_color(err=err):
        return escape(text)
    return Styled(click.style(escape(text), fg=fg, bold=bold or None, dim=dim or None))


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows (header -> cell, the same headers in each) as columns with two spaces between them,
    never truncated. A cell is escaped unless it is `Styled`; None is shown as "-". A header that
    begins with ">" aligns its column to the right. "" if there are no rows.
    """
    lines, headers = list[list[str]](), list[str]()
    for row in rows:
        headers = list(row)
        cells = [values.NOTHING if cell is None else cell for cell in row.values()]
        lines.append([c if isinstance(c, Styled) else escape(str(c)) for c in cells])
    if not lines:
        return ""
    lines.insert(0, [header.removeprefix(">") for header in headers])
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    to_the_right = [header.startswith(">") for header in headers]
    return "\n".join("  ".join(map(_pad, line, widths, to_the_right)).rstrip() for line in lines)


def _pad(cell: str, width: int, to_the_right: bool) -> str:
    spaces = " " * (width - _width(cell))
    return spaces + cell if to_the_right else cell + spaces


def _width(cell: str) -> int:
    return len(click.unstyle(cell))


def shows_color(*, err: bool = False) -> bool:
    """--color, then NO_COLOR, FORCE_COLOR, TERM=dumb, then whether the stream is a terminal."""
    if settings.color != "auto":
        return settings.color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and is_tty(err=err)
