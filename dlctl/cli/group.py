"""Commands that are imported on first use, and help texts that begin with examples.

`LazyGroup` has a table of its commands, so that `--help`, suggestions and completion import none of
them. `make_command` defines one, in `dlctl/cli/commands/logs.py`:

    @make_command("dlctl logs -f  # follow all daemons")
    @job_option
    def command(job): ...

Its docstring is the rest of its help, below the line in the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli.options import global_options
from dlctl.util.did_you_mean import meant

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Documented(click.Command):
    """A command whose help shows what it does, then examples, then everything else."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        """examples: "command line  # what it does"."""
        super().__init__(*args, **kwargs)
        self.examples = [(line, what) for line, _, what in (e.partition("  # ") for e in examples)]
        self.params += global_options(hidden=self.name != "dlctl")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        summary, body = summary_and_body(self)
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(summary)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write_dl(self.examples, col_max=44)
        if body:
            formatter.write_paragraph()
            formatter.write_text(body)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)


class CommandGroup(Documented, click.Group):
    """A group of commands, which stay in the order in which they are defined."""

    def subcommand(self, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
        """A command of this group, from a function, with its name; see `Documented`."""
        return self.command(cls=Documented, examples=examples)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f'no such command "{name}"{meant(name, known)}', ctx=ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(CommandGroup):
    """A group whose commands are imported when they are used."""

    def __init__(
        self, *args: Any, sections: Mapping[str, Mapping[str, str]], **kwargs: Any
    ) -> None:
        """sections: heading in the help -> commands -> their lines in the help."""
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.lines = {name: line for lines in sections.values() for name, line in lines.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lines:
            return None
        found: click.Command = import_module(f"dlctl.cli.commands.{cmd_name}").command
        found.help = f"{self.lines[cmd_name]}\n\n{inspect.getdoc(found.callback) or ''}"
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        known = [(name, line) for name, line in self.lines.items() if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=line) for name, line in known]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.lines)
        for heading, lines in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in lines.items()])


def make_command(*examples: str) -> Callable[[Callable[..., Any]], Documented]:
    """A click command from a function, with the name of its module; see `Documented`."""

    def made(function: Callable[..., Any]) -> Documented:
        name = function.__module__.rpartition(".")[2]
        return click.command(name, Documented, examples=examples)(function)

    return made


def summary_and_body(command: click.Command) -> tuple[str, str]:
    """The first paragraph of a command's help and the rest of it."""
    summary, _, body = inspect.cleandoc(command.help or "").partition("\n\n")
    return summary, body
