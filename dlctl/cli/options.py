"""Options shared by several commands, and the global ones that every command takes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError
from dlctl.util import outfile, units

F = TypeVar("F", bound=Callable[..., Any])
Completion = Callable[[click.Context, click.Parameter, str], list[str]]
_CONSOLE = "dlctl.console"
JOB = "dlctl.job"
"""The key of the selected job in the context of a command line."""
_GIVEN = "dlctl.given"


def completing(words: Callable[[click.Context], Iterable[str]]) -> Completion:
    """A shell completion with these words. They come from local files, never from the network."""
    return lambda ctx, param, incomplete: [w for w in words(ctx) if w.startswith(incomplete)]


def _known_runs(ctx: click.Context) -> Iterable[str]:
    from dlctl.runs import paths

    return (directory.name for directory in paths.all_runs())


complete_runs = completing(_known_runs)


def number_or_all(text: str) -> int:
    """How many of the last items; "all" is `sys.maxsize`. Raises BadParameter."""
    if text == "all":
        return sys.maxsize
    if not text.isascii() or not text.isdigit():
        raise click.BadParameter(f'"{text}" is neither a number nor "all"')
    return int(text)


def moment(text: str) -> float:
    """A time from an option: "10m" (ago) or an ISO time, local unless it has a zone. Raises
    BadParameter.
    """
    with suppress(ValueError):
        return time.time() - units.parse_duration(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f'"{text}" is neither a duration ("10m") nor an ISO time'
        ) from None


def duration(text: str) -> float:
    """A time from an option, such as "90s" or "5m", in seconds. Raises BadParameter."""
    try:
        return units.parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _job(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The job from the command line, also before the name of a subcommand; else from the
    environment.

    Raises UsageError if different runs are named.
    """
    if value and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
        if (other := ctx.meta.setdefault(_GIVEN, value)) != value:
            raise UsageError(f'the run is given twice: "{other}" and "{value}"')
        ctx.meta[JOB] = value
    elif value is not None:
        ctx.meta.setdefault(JOB, value)
    found: str | None = ctx.meta.get(JOB)
    return found


def _set_up_console(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store a given value, also for subcommands, and configure the console."""
    chosen: dict[str, Any] = ctx.meta.setdefault(_CONSOLE, {})
    if value is not None and param.name is not None:
        chosen[param.name] = value
    console.setup(**chosen)


class _Output(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return outfile.STDOUT if value == "-" else super().convert(value, param, ctx)


PATH = click.Path(path_type=Path)
OUTPUT = _Output(path_type=Path)
"""A file to write, for `dlctl.util.outfile`; "-" is standard output."""
job_option = click.option(
    "-j",
    "--job",
    metavar="NAME",
    envvar="DLCTL_JOB",
    callback=_job,
    shell_complete=complete_runs,
    help="Name or run id of the job.  [default: the only running one, else the newest; of those "
    "in ./runs, if any]",
)
"""Passes the argument `job: str or None`; a group's applies to its commands."""
_run_argument = click.argument(
    "run",
    required=False,
    metavar="[RUN]",
    expose_value=False,
    callback=_job,
    shell_complete=complete_runs,
)
file_argument = click.argument("file", metavar="FILE", type=PATH)
"""The job file, as `file: Path`."""
fresh_option = click.option(
    "--fresh", is_flag=True, help="Start a new run even if one could be resumed."
)
from_option = click.option(
    "--from",
    "source",
    metavar="DIR|ADDRESS",
    help="A new run from this checkpoint, of any run, or from the newest good one at an address.",
)
json_option = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_set_up_console,
    help="Print JSON for programs.",
)
"""Makes `console.show` print JSON."""
force_option = click.option("--force", is_flag=True, help="Overwrite existing files.")
"""Passes `force: bool`, for `require_free`."""
follow_option = click.option(
    "-f", "--follow", is_flag=True, help="Wait for more until the job ends."
)
since_option = click.option(
    "--since", type=moment, metavar="TIME", help='Only since "10m" ago or an ISO time.'
)
"""Passes `since: float or None`, in seconds since 1970."""
_no_wait = click.option(
    "-d", "--no-wait", is_flag=True, help="Return once the request is accepted."
)


def run_argument(function: F) -> F:
    """`-j NAME`, or RUN instead, as the argument `job: str | None`."""
    return _run_argument(job_option(function))


def timeout_option(
    text: str = 'Give up waiting after "90s", "5m" (exit code 6).', default: str | None = None
) -> Callable[[F], F]:
    """`--timeout` as the argument `limit_s: float | None`."""
    return click.option(
        "--timeout", "limit_s", type=duration, metavar="TIME", default=default, help=text
    )


def wait_options(function: F) -> F:
    """`--timeout`, and `--no-wait` as the argument `no_wait: bool`."""
    return timeout_option()(_no_wait(function))


def tail_option(text: str) -> Callable[[F], F]:
    """`-n/--tail` as the argument `tail: int | None`."""
    return click.option("-n", "--tail", type=number_or_all, metavar="N", help=text)


def require_free(force: bool, *files: Path) -> None:
    """Raises DlctlError if one of these files exists, unless `force` is set. What is only written
    to, such as a device, is not overwritten.
    """
    for file in files if not force else ():
        if os.path.lexists(file) and not (file.is_dir() or outfile.is_stream(file)):
            raise DlctlError(
                f"{file.name} already exists; nothing was written",
                where=str(file),
                hint="write to another place, or overwrite with --force",
            )


def global_options(*, hidden: bool) -> list[click.Option]:
    """The options that are valid before and after a command's name.

    hidden: not in its help, and without environment variables, which would override a flag given
    before the command's name.
    """

    def option(*names: str, **more: Any) -> click.Option:
        more |= {"expose_value": False, "callback": _set_up_console, "hidden": hidden}
        return click.Option(names, **more)

    def choice(name: str, choices: Sequence[str], text: str) -> click.Option:
        variable = None if hidden else f"DLCTL_{name.upper()}"
        text = f"{text}  [default: auto]"
        return option(f"--{name}", type=click.Choice(choices), envvar=variable, help=text)

    def flag(letter: str, name: str, text: str) -> click.Option:
        return option(letter, name, is_flag=True, default=None, help=text)

    return [
        choice("color", ("auto", "always", "never"), "When to use colours."),
        choice("progress", ("auto", "tty", "plain", "json", "quiet"), "How to show progress."),
        flag("-q", "--quiet", "Print no notes; lists print only names."),
        flag("-v", "--verbose", "Print more notes."),
    ]
