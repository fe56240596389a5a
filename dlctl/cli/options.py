"""Options that several commands share, and the global ones that every command takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlctl.cli.ui import console
from dlctl.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F")
COLORS = ("auto", "always", "never")
PROGRESS_STYLES = ("auto", "tty", "plain", "json", "quiet")
_META = "dlctl.console"


class Tail(click.ParamType):  # type: ignore[type-arg]
    """How many of the last ones of something: a number, or "all", which is `ALL`."""

    name = "N"
    ALL = -1

    def __init__(self, what: str) -> None:
        self.what = what

    def convert(self, value: object, param: object, ctx: object) -> int:
        if value == "all":
            return self.ALL
        text = str(value)
        if not text.isascii() or not text.isdigit():
            raise UsageError(f'"{text}" is neither a number of {self.what} nor "all"')
        return int(text)


def job_option(function: F) -> F:
    """`-j/--job NAME` as the argument `job: str | None`."""
    option = click.option(
        "-j",
        "--job",
        metavar="NAME",
        envvar="DLCTL_JOB",
        shell_complete=complete_runs,
        help="Name or run id of the job.  [default: the only one that runs, else the newest; of "
        "those in ./runs, if there are any]",
    )
    return option(function)  # type: ignore[type-var]


def json_option(function: F) -> F:
    """`--json` as the argument `as_json: bool`."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
    return option(function)  # type: ignore[type-var]


def complete_runs(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Run ids from the local index; never from the network."""
    from click.shell_completion import CompletionItem

    from dlctl.runs import paths

    found = (directory.name for directory in paths.all_runs())
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def add_global_options(command: click.Command, *, hidden: bool) -> None:
    """Give a command the global options, so that they may stand before or after its name.

    hidden: not in its help, and without environment variables, which would win over a flag that was
    given before the command's name. A command's own option of the same spelling wins.
    """
    taken = {spelling for param in command.params for spelling in param.opts}
    for option in _global_options(hidden):
        if not taken.intersection(option.opts):
            command.params.append(option)


def _global_options(hidden: bool) -> list[click.Option]:
    common: dict[str, Any] = {
        "expose_value": False,
        "callback": _set_up_console,
        "hidden": hidden,
    }
    return [
        click.Option(
            ["--color"],
            type=click.Choice(COLORS),
            envvar=None if hidden else "DLCTL_COLOR",
            help="When to use colours.  [default: auto]",
            **common,
        ),
        click.Option(
            ["--progress"],
            type=click.Choice(PROGRESS_STYLES),
            envvar=None if hidden else "DLCTL_PROGRESS",
            help="How to show progress.  [default: auto]",
            **common,
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            default=None,
            help="Print no notes; lists print only names.",
            **common,
        ),
        click.Option(
            ["-v", "--verbose"], is_flag=True, default=None, help="Print more notes.", **common
        ),
    ]


def _set_up_console(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Remember a given value (for the commands below, too) and tell the console."""
    chosen: dict[str, Any] = ctx.meta.setdefault(_META, {})
    if value is not None and param.name is not None:
        chosen[param.name] = value
    console.setup(**chosen)


def moment(text: str | None, now: float) -> float | None:
    """A time from an option; None if it was not given. Raises UsageError."""
    from dlctl.runs import logs  # only here: most commands have no use for it

    try:
        return None if text is None else logs.parse_time(text, now)
    except ValueError as error:
        raise UsageError(str(error)) from None
