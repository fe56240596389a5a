"""`dlctl join`: train in a run of somebody else, from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.control import invitation
from dlctl.errors import DlctlError, UsageError
from dlctl.util import regular

VERSIONS_S = 60.0
TORCHRUN = "torchrun"
_VERSIONS = "import dlctl, importlib.metadata as m; print(dlctl.__version__, m.version('torch'))"


@make_command(
    "dlctl join --invite bob.invite -- python train.py  # one worker more",
    "dlctl join gpu.lab:4100 --invite bob.invite -- python -m my.run  # at another address",
    "dlctl join --invite bob.invite -- torchrun --standalone --nproc-per-node 2 train.py  # on two "
    "GPUs",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ADDRESS] -- python PROGRAM...")
@click.option(
    "--invite",
    "file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help='The file that "dlctl keys invite" has written.',
)
def command(words: tuple[str, ...], file: Path) -> None:
    """Train in a run as one of its workers, from any machine that can reach its coordinator and its
    servers: only outgoing connections are made. PROGRAM calls dlctl.attach, as in the run itself.
    ADDRESS is for a run that is reached in another way than its invitation says, through a tunnel
    for example: servers beside its coordinator are then reached at the same host.
    With torchrun, on one machine, its processes are one worker: dlctl.attach(..., group=True).

    The worker waits in line if the run has no free slot. It is restarted after a crash, returns
    after a lost connection, waits half an hour for a coordinator that has crashed, and ends with
    the run: exit code 0 if that has finished or was stopped, 1 if it has failed. Ctrl-C leaves the
    run in order, a second one at once. What the program prints is shown here, and is in the run's
    logs.

    Exit codes of what is refused at the start: 2 wrong use, 5 no run at this address, 9 another
    version of dlctl or torch, 10 the invitation of another run, 77 an invitation that the run does
    not accept (any more), 78 one that it does not accept and that has expired by this machine's
    clock. The run's clock decides: that of this machine may be wrong.
    """
    address, program = ("", words) if _starts(words) else (words[0] if words else "", words[1:])
    if not _starts(program):
        what = (
            "after --, write the command that trains: python train.py, python -m NAME, or "
            "torchrun --standalone --nproc-per-node 2 train.py"
        )
        raise UsageError(what, hint="dlctl join --help")
    made = invitation.load(file)
    python, arguments = _python(*program)
    dlctl, torch = _versions(python)
    invitation.check(made, dlctl, torch)
    begin = [python, "-P", "-m", "daemons.guest.begin", str(file), address, *arguments]
    os.execv(python, begin)  # noqa: S606  (no shell is meant)


def _starts(words: tuple[str, ...]) -> bool:
    """Whether it is a command that runs a program of Python's."""
    name = Path(words[0]).name if words else ""
    return name.startswith("python") or name == TORCHRUN


def _python(command: str, *arguments: str) -> tuple[str, list[str]]:
    """The Python of a command, and its arguments. Raises UsageError."""
    path = shutil.which(command)
    if path is None:
        raise UsageError(f"there is no {command}")
    if Path(path).name != TORCHRUN:
        return path, list(arguments)
    first = regular.read_bytes(Path(path)).partition(b"\n")[0]
    python = os.fsdecode(first.removeprefix(b"#!").strip())
    if not first.startswith(b"#!") or not Path(python).name.startswith("python"):
        raise UsageError(
            f"the Python of {path} is unknown", hint="write python -m torch.distributed.run ..."
        )
    return python, ["-m", "torch.distributed.run", *arguments]


def _versions(python: str) -> tuple[str, str]:
    """The versions of dlctl and of torch that a Python has. Raises DlctlError."""
    command = [python, "-P", "-c", _VERSIONS]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=VERSIONS_S)
        dlctl, torch = found.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError):
        hint = "install dlctl, and torch, beside what the program needs"
        raise DlctlError("this Python does not have dlctl", where=python, hint=hint) from None
    return dlctl, invitation.release(torch)
