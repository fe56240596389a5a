"""`dlctl`: the table of its commands, and how every one of them ends."""

from __future__ import annotations

import errno
import os
import sys
import time

import click
from click.exceptions import Exit, NoArgsIsHelpError

from dlctl import __version__
from dlctl.cli.group import Entry, LazyGroup
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError
from dlctl.runs import paths
from dlctl.util import hints

_HELP = {
    "Jobs": {
        "init": "Write a commented job file and a runnable task.",
        "validate": "Check a job file offline; report every problem.",
        "plan": "Show what start would do; change nothing.",
        "doctor": "Look for what is in the way: here, on each host, between them.",
        "start": "Start a job in the background; wait until it is ready.",
        "run": "Start a job, stream its logs, stop it on Ctrl-C.",
    },
    "Watch": {
        "ps": "List jobs.",
        "status": "Show a job's daemons, rates and troubles.",
        "top": "Watch a job live: its daemons, rates and loss.",
        "logs": "Show or follow logs of all or some daemons.",
        "events": "Show faults, recoveries and changes in order.",
        "why": "Show who waits for whom, and what they all wait for.",
        "explain": "Explain the code of a problem.",
        "wait": "Block until a job is ready, finished or at a step.",
        "report": "Write an HTML page about a run: loss, rates, staleness, events.",
        "plot": "Draw the loss, or another figure, of one or several runs.",
    },
    "Change": {
        "get": "Show live settings.",
        "set": "Change fetch/push limits and other live settings.",
        "scale": "Add or remove workers of a running job.",
        "restart": "Restart daemons in place, keeping their names.",
        "recover": "Bring back a job that has died.",
        "keys": "Give a job new keys, or somebody one to look on with.",
        "stop": "Stop a job, saving first.",
    },
    "Data": {
        "checkpoint": "Save one now; ls, verify, prune and export those that there are.",
        "verify": "Check that no acknowledged push was lost.",
    },
    "Setup": {
        "algorithms": "List the names that a job file can use, and their keys.",
        "compressors": "List the compressors of pushes; measure them on a job.",
        "completion": "Print the shell completion script.",
        "man": "Open a manual page.",
    },
}
COMMANDS = {
    name: Entry(f"dlctl.cli.commands.{name}:command", line, heading)
    for heading, lines in _HELP.items()
    for name, line in lines.items()
}
COMPLETION_VARIABLE = "_DLCTL_COMPLETE"
BUG_EXIT_CODE = 70
INTERRUPTED_EXIT_CODE = 130


@click.group(
    name="dlctl",
    cls=LazyGroup,
    entries=COMMANDS,
    examples=[
        ("dlctl init demo", "write a job file and a task to begin with"),
        ("dlctl run demo/job.toml", "train; Ctrl-C stops"),
        ("dlctl status", "see how it goes, from another terminal"),
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "-V", "--version", message="dlctl %(version)s")
def cli() -> None:
    """Train torch models with the distributed optimisation methods of the literature."""


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; nothing but SystemExit comes out of it."""
    console.setup()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code = _run(arguments)
        console.flush()
    except click.ClickException as error:
        _show_usage_error(error)
        return UsageError.exit_code
    except DlctlError as error:
        return _refused(_explained(error), arguments)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED_EXIT_CODE
    except OSError as error:
        return _os_error(error, arguments)
    except Exception as error:
        return _unforeseen(error, arguments)
    return code


def _refused(error: DlctlError, arguments: list[str]) -> int:
    error.hint = hints.about(error.hint or "", _run_named(arguments))
    console.error(error)
    return error.exit_code


def _explained(error: DlctlError) -> DlctlError:
    """Of a run that cannot be read: with what is still there of it."""
    from dlctl.runs.snapshot import Unreadable

    if not isinstance(error, Unreadable):
        return error
    from dlctl.ops import unreadable  # only here: it takes numpy along

    return unreadable.explained(error)


def _run(arguments: list[str]) -> int:
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "dlctl", COMPLETION_VARIABLE, instruction)
    try:
        with cli.make_context("dlctl", list(arguments)) as context:
            cli.invoke(context)
    except Exit as end:
        return end.exit_code
    return 0


def _run_named(arguments: list[str]) -> str:
    """The run that -j names in a command line; "" if there is none. Commands that an error names
    are about the same run.
    """
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word in ("-j", "--job"):
            return following
        for option in ("--job=", "-j"):
            if word.startswith(option) and word != option:
                return word.removeprefix(option)
    return ""


def _show_usage_error(error: click.ClickException) -> None:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "dlctl"
    if isinstance(error, NoArgsIsHelpError):
        console.note(error.format_message())
        return
    hint = _option_of_subcommand(error) or f"{path} --help"
    console.error(UsageError(_in_our_words(error), hint=hint))


def _option_of_subcommand(error: click.ClickException) -> str:
    """As in "dlctl checkpoint create --timeout": an option that the group itself has not; "" if no
    command of the group has it. Of dlctl itself none is looked for: it has too many.
    """
    context = getattr(error, "ctx", None)
    if not isinstance(error, click.NoSuchOption) or context is None or context.parent is None:
        return ""
    group = context.command
    for name in group.list_commands(context) if isinstance(group, LazyGroup) else ():
        command = group.get_command(context, name)
        if command and any(error.option_name in param.opts for param in command.params):
            return f"{context.command_path} {name} {error.option_name}"
    return ""


def _in_our_words(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        meant = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
        return f"no such option {error.option_name}{meant}"
    text = error.format_message()
    return text[:1].lower() + text[1:].removesuffix(".")


def _os_error(error: OSError, arguments: list[str]) -> int:
    """A full disk or a closed pipe is nobody's bug; any other that nobody caught is ours."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
        _report_bug(error, arguments)
        return BUG_EXIT_CODE
    console.abandon_stdout()
    if error.errno == errno.EPIPE:
        return console.SIGPIPE_EXIT_CODE
    console.error(DlctlError(str(error)))
    return DlctlError.exit_code


def _unforeseen(error: Exception, arguments: list[str]) -> int:
    """A damaged page of a run's database is nobody's bug, either; all others are ours."""
    from dlctl.ops import unreadable  # only here: most commands never need it

    if (damaged := unreadable.damaged(arguments, error)) is not None:
        console.error(damaged)
        return damaged.exit_code
    _report_bug(error, arguments)
    return BUG_EXIT_CODE


def _report_bug(error: Exception, arguments: list[str]) -> None:
    """Keep the traceback in a file: it is for us, not for the terminal (unless -v asks for it)."""
    import traceback  # only here: it takes 8 ms to import

    text = f"dlctl {__version__}, Python {sys.version}\narguments: {arguments}\n"
    text += "".join(traceback.format_exception(error))
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    directory = paths.index_dir().parent / "crash"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / name).touch(mode=0o600)
        (directory / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        where = f"the traceback is in {directory / name}"
    except OSError as unwritable:
        console.note(console.escape_lines(text))
        where = f"the traceback is above, because it could not be kept: {unwritable}"
    console.detail(console.escape_lines(text))
    problem = DlctlError(
        f"this is a bug in dlctl: {type(error).__name__}: {error}",
        where=where,
        hint="please report it together with the traceback",
    )
    console.error(problem)
