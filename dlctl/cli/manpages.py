"""Writes the manual pages: `python -m dlctl.cli.manpages [--check]`, or `make man`.

The pages of section 1 come from click's commands, `dlctl-job(5)` from the dataclasses of the job
file (`manpage_job.py`). They are kept with the sources, so that an installation needs no generator;
`--check` (and a test) says whether they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dlctl import __version__
from dlctl.cli.app import cli
from dlctl.cli.group import Command, LazyGroup, summary_and_body
from dlctl.cli.manpage_hosts import hosts_page
from dlctl.cli.manpage_job import job_page
from dlctl.cli.manpage_slurm import slurm_page
from dlctl.cli.roff import Page

FOLDER = Path(__file__).parents[2] / "man"
EXIT_STATUS = [
    ("0", "Done, or nothing to do."),
    ("1", "The command failed."),
    ("2", "A wrong argument, or a job file that is not valid."),
    ("3", "Not (fully) running: only `dlctl status --check`, `wait`, and a stopped `run`."),
    ("4", "No such job, run or daemon."),
    ("5", "A daemon or a host does not answer."),
    ("6", "`--timeout` has passed; the work may go on."),
    ("7", "The job failed, while it started or while it trained."),
    ("8", "Done on some daemons and not on others; a list is printed."),
    ("9", "The other side speaks another version of the protocol."),
    ("10", "`dlctl plan --detailed-exitcode`: there is something to do."),
    ("70", "A bug in dlctl; the path of a traceback is printed."),
    ("77", "A key does not fit: somebody else listens there, or the run has other keys."),
    ("130", "Interrupted by Ctrl-C."),
    ("141", "Nobody reads stdout any more."),
    ("143", "Ended by SIGTERM."),
]
FILES = [
    ("runs/JOB-ID/", "A run, beside the job file: its job, state, logs and checkpoints."),
    ("$XDG_STATE_HOME/dlctl/runs/", "Links to all runs of this user (`~/.local/state`)."),
    ("$XDG_STATE_HOME/dlctl/crash/", "Tracebacks of bugs in dlctl."),
    ("$XDG_RUNTIME_DIR/dlctl/", "Sockets of running jobs (or `/tmp/dlctl-UID`)."),
]
ENVIRONMENT = [
    ("DLCTL_JOB", "The job that commands are about, as with `--job`."),
    ("DLCTL_COLOR, DLCTL_PROGRESS", "As `--color` and `--progress`."),
    ("NO_COLOR", "No colours, unless `--color always`."),
    ("FORCE_COLOR", "Colours also where output is not a terminal."),
    ("XDG_STATE_HOME, XDG_RUNTIME_DIR", "Where dlctl keeps its files; see above."),
]


def pages() -> dict[str, str]:
    """All manual pages: path below `man/` -> content."""
    root = cli.make_context("dlctl", [], resilient_parsing=True, color=False)
    found = {
        "man1/dlctl.1": _root_page(root),
        "man5/dlctl-job.5": job_page(__version__),
        "man7/dlctl-hosts.7": hosts_page(__version__),
        "man7/dlctl-slurm.7": slurm_page(__version__),
    }
    for name, command in _commands(cli, root):
        context = click.Context(command, info_name=name, parent=root)
        found[f"man1/dlctl-{name}.1"] = _command_page(command, context)
    return found


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            yield name, command


def _root_page(context: click.Context) -> str:
    page = Page("dlctl", 1, __version__)
    _name(page, "dlctl", cli)
    page.heading("SYNOPSIS")
    page.code("dlctl [OPTIONS] COMMAND [ARGUMENTS]")
    page.heading("DESCRIPTION")
    page.paragraphs(summary_and_body(cli)[0])
    page.paragraphs(
        "A job file says what to train and by which method; see dlctl-job(5). `dlctl start` or "
        "`dlctl run` makes a run of it: a coordinator, parameter servers and workers. stdout "
        "carries data only; notes, progress and errors go to stderr."
    )
    page.heading("COMMANDS")
    for heading in dict.fromkeys(entry.heading for entry in cli.entries.values()):
        page.subheading(heading)
        for name, entry in cli.entries.items():
            if entry.heading == heading:
                page.item(f"dlctl-{name}(1)", entry.help)
    _options(page, cli, context)
    page.paragraphs("--color, --progress, -q and -v may also stand behind the command's name.")
    names = [f"dlctl-{name}(1)" for name in cli.entries]
    _closing(page, cli, context, [*names, "dlctl-job(5)", "dlctl-hosts(7)", "dlctl-slurm(7)"])
    return str(page)


def _command_page(command: click.Command, context: click.Context) -> str:
    page = Page(f"dlctl-{context.info_name}", 1, __version__)
    _name(page, f"dlctl-{context.info_name}", command)
    page.heading("SYNOPSIS")
    page.code(_usage(command, context))
    page.heading("DESCRIPTION")
    page.paragraphs("\n\n".join(summary_and_body(command)))
    if isinstance(command, click.Group):
        page.heading("COMMANDS")
        for name, sub in _commands(command, context):
            _subcommand(page, sub, click.Context(sub, info_name=name, parent=context))
    _options(page, command, context)
    see_also = command.see_also if isinstance(command, Command | LazyGroup) else ()
    names = [f"dlctl-{name}(1)" for name in see_also]
    _closing(page, command, context, ["dlctl(1)", *names])
    return str(page)


def _subcommand(page: Page, command: click.Command, context: click.Context) -> None:
    page.subheading(_usage(command, context))
    page.paragraphs("\n\n".join(summary_and_body(command)))
    page.items(_option_items(command, context))


def _name(page: Page, name: str, command: click.Command) -> None:
    page.heading("NAME")
    summary = summary_and_body(command)[0].replace("\n", " ").removesuffix(".")
    page.paragraphs(f"{name} - {summary[:1].lower()}{summary[1:]}")


def _usage(command: click.Command, context: click.Context) -> str:
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def _options(page: Page, command: click.Command, context: click.Context) -> None:
    page.heading("OPTIONS")
    page.items(_option_items(command, context))
    if command is not cli:
        page.item("-h, --help", "Show a short help and exit.")
        page.paragraphs("The global options are in dlctl(1).")


def _option_items(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            names = ", ".join([*param.opts, *param.secondary_opts])
            takes_value = not param.is_flag and not param.count
            metavar = f" {param.make_metavar(context)}" if takes_value else ""
            yield names + metavar, " ".join((param.help or "").split())


def _examples(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for line, meaning in getattr(command, "examples", ()):
        yield line, f"{meaning[:1].upper()}{meaning[1:]}."
    if isinstance(command, click.Group) and command is not cli:
        for _, sub in _commands(command, context):
            yield from _examples(sub, context)


def _closing(
    page: Page, command: click.Command, context: click.Context, see_also: list[str]
) -> None:
    page.heading("EXAMPLES")
    examples = dict[str, str]()
    for example, what in _examples(command, context):
        examples.setdefault(example, what)  # A group shows some of its commands', too.
    page.items(examples.items())
    page.heading("EXIT STATUS")
    page.paragraphs("Every command ends with one of these:")
    page.items(EXIT_STATUS)
    page.heading("FILES")
    page.items(FILES)
    page.heading("ENVIRONMENT")
    page.items(ENVIRONMENT)
    page.heading("SEE ALSO")
    page.paragraphs(", ".join(see_also))


# ---------------------------------------------------------------- files


def differences(folder: Path = FOLDER) -> list[str]:
    """Paths below `folder` that are missing, out of date, or of no command any more."""
    wanted = pages()
    present = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.glob("man[157]/*")
    }
    return sorted(
        name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)
    )


def write(folder: Path = FOLDER) -> list[str]:
    """Bring the pages up to date; says which have changed."""
    changed = differences(folder)
    wanted = pages()
    for name in changed:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in wanted:
            path.write_text(wanted[name], encoding="utf-8")
        else:
            path.unlink()
    return changed


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check:
        print("usage: python -m dlctl.cli.manpages [--check]", file=sys.stderr)
        return 2
    changed = differences() if check else write()
    for name in changed:
        print(f"man/{name} is out of date: make man" if check else f"man/{name}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
