"""`dlctl`: the table of its commands, and their error handling and exit codes."""

from __future__ import annotations

import errno
import os
import sys
import time

import click
from click.exceptions import Exit, NoArgsIsHelpError

from dlctl import __version__
from dlctl.cli.group import LazyGroup
from dlctl.cli.options import JOB
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, UsageError
from dlctl.util import hints
from dlctl.util.outfile import BROKEN_PIPE_EXIT_CODE

SECTIONS = {
    "Jobs": {
        "init": "Write a commented job file and a runnable task.",
        "validate": "Check a job file offline; report every problem.",
        "plan": "Show what start would do; change nothing.",
        "doctor": "Check this machine, each host and the links between them for problems.",
        "start": "Start a job in the background; wait until it is ready.",
        "run": "Start a job, stream its logs, stop it on Ctrl-C.",
        "kubernetes": "Print a job as a manifest for Kubernetes.",
    },
    "Join": {
        "join": "Train in a run of somebody else, with an invitation.",
    },
    "Watch": {
        "ps": "List jobs.",
        "status": "Show a job's daemons, rates and problems.",
        "top": "Watch a job live: its daemons, rates and loss.",
        "logs": "Show or follow logs of all or some daemons.",
        "events": "Show faults, recoveries and changes in order.",
        "why": "Show which daemons wait for which, and the root cause.",
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
        "recover": "Recover a job that has died.",
        "keys": "Give a job new keys, create a read-only key, or invite workers.",
        "stop": "Stop a job, saving first.",
    },
    "Data": {
        "checkpoint": "Save one now; list, verify, prune and export existing ones.",
        "verify": "Check that no acknowledged push was lost.",
    },
    "Compare": {
        "advise": "Say which method reaches a target first on this job.",
        "compare": "Compare methods on a job, each tuned with the same budget.",
        "sweep": "Try values of keys: each trial a run, kept through kills.",
        "simulate": "Run a job in virtual time: how it would train, and how long.",
        "claims": "Try what papers claim: shown, not shown or refuted.",
    },
    "Setup": {
        "algorithms": "List the names that a job file can use, and their keys.",
        "compressors": "List the compressors of pushes; measure them on a job.",
        "completion": "Print the shell completion script.",
        "man": "Open a manual page.",
    },
}
"""Heading in the help -> commands -> their lines in the help."""
COMPLETION_VARIABLE = "_DLCTL_COMPLETE"
BUG_EXIT_CODE = 70
INTERRUPTED_EXIT_CODE = 130


@click.group(
    name="dlctl",
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=[
        "dlctl init demo  # write a job file and a task to start from",
        "dlctl run demo/job.toml  # train; Ctrl-C stops",
        "dlctl status  # show its progress, from another terminal",
    ],
)
@click.version_option(__version__, "-V", "--version", message="dlctl %(version)s")
def cli() -> None:
    """Train torch models with the distributed optimisation methods of the literature."""


def main() -> None:
    """The entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; raises nothing but SystemExit."""
    console.setup()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code = _run(arguments)
        console.flush()
        return code
    except click.ClickException as error:
        return _show_usage_error(error)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        console.abandon_stdout()
        return BROKEN_PIPE_EXIT_CODE
    except Exception as error:
        known = _known(error, arguments) or _bug(error, arguments)
        console.error(known)
        return known.exit_code


def _run(arguments: list[str]) -> int:
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "dlctl", COMPLETION_VARIABLE, instruction)
    try:
        with cli.make_context("dlctl", list(arguments)) as context:
            try:
                cli.invoke(context)
            except DlctlError as error:
                error.hint = hints.about(error.hint or "", context.meta.get(JOB) or "")
                raise
    except Exit as end:
        return end.exit_code
    return 0


def _show_usage_error(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    if isinstance(error, NoArgsIsHelpError):
        console.note(error.format_message())
        return UsageError.exit_code
    text = error.format_message()
    text = text[:1].lower() + text[1:].removesuffix(".")
    hint = f"{context.command_path if context else 'dlctl'} --help"
    console.error(UsageError(text, hint=hint))
    return UsageError.exit_code


def _known(error: Exception, arguments: list[str]) -> DlctlError | None:
    """The error for an exception that is not a bug: a DlctlError, a full disk, a damaged database;
    else None.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        console.abandon_stdout()
        return DlctlError(str(error))
    from dlctl.ops import next_step  # imported late: most commands do not need it
    from dlctl.runs.snapshot import Unreadable

    if isinstance(error, Unreadable):
        return next_step.explained(error)
    return error if isinstance(error, DlctlError) else next_step.damaged(arguments, error)


def _bug(error: Exception, arguments: list[str]) -> DlctlError:
    """Write the traceback to a file; the terminal shows it only with -v."""
    import traceback  # imported late: it takes 8 ms

    from dlctl.runs import paths

    text = f"dlctl {__version__}, Python {sys.version}\narguments: {arguments}\n"
    text += "".join(traceback.format_exception(error))
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    path = paths.index_dir().parent / "crash" / name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.write(path, text.encode("utf-8", "backslashreplace"), 0o600)
        where = f"the traceback is in {path}"
    except OSError as unwritable:
        console.note(text)
        where = f"the traceback is above, because it could not be saved: {unwritable}"
    if console.settings.verbose:
        console.note(text)
    problem = DlctlError(
        f"this is a bug in dlctl: {type(error).__name__}: {error}",
        where=where,
        hint="please report it together with the traceback",
    )
    problem.exit_code = BUG_EXIT_CODE
    return problem
