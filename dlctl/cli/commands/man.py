"""`dlctl man`: open a manual page, wherever it was installed."""

from __future__ import annotations

import difflib
import shutil
import site
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.ui import console
from dlctl.errors import NotFound

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(topic) for topic in topics() if topic.startswith(incomplete)]


@make_command(
    "man",
    examples=[
        ("dlctl man", "the overview"),
        ("dlctl man job", "every key of the job file"),
        ("dlctl man hosts", "from one machine to three"),
        ("dlctl man slurm", "on the nodes of a cluster"),
        ("dlctl man logs", "one command"),
    ],
)
@click.argument("topic", required=False, metavar="[COMMAND]", shell_complete=_complete)
@click.option("--plain", is_flag=True, help="Print plain text; do not open man(1).")
def command(topic: str | None, plain: bool) -> None:
    """Open a manual page.

    The pages are found also where man(1) does not look for them. Where there is no man(1) they are
    printed as plain text.
    """
    page = find(topic)
    if plain or not _open(page):
        from dlctl.cli.roff import to_text

        console.out(to_text(page.read_text(encoding="utf-8")).rstrip("\n"))


def find(topic: str | None) -> Path:
    """The page of a command, of "job", "hosts" or "slurm", or (None) of dlctl itself.

    Raises NotFound, with a suggestion.
    """
    known = topics()
    if not known:
        raise NotFound("the manual pages are not installed", hint="dlctl --help")
    wanted = (topic or "").removeprefix("dlctl-")
    if wanted == "dlctl":
        wanted = ""
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, n=1)
        meant = f'; did you mean "{close[0]}"?' if close else ""
        raise NotFound(f'there is no manual page for "{wanted}"{meant}', hint="dlctl man")
    return known[wanted]


def topics() -> dict[str, Path]:
    """All pages: command (or "job", "hosts", "slurm", or "" for dlctl itself) -> file."""
    for folder in _folders():
        pages = sorted(folder.glob("man[157]/dlctl*.[157]"))
        if pages:
            return {page.stem.removeprefix("dlctl").removeprefix("-"): page for page in pages}
    return {}


def _folders() -> list[Path]:
    """The source tree first, then where wheels put their data."""
    data = [sysconfig.get_path("data"), site.getuserbase()]
    return [Path(__file__).parents[3] / "man", *(Path(base) / "share" / "man" for base in data)]


def _open(page: Path) -> bool:
    """Show it with man(1); False if that is not possible."""
    man = shutil.which("man")
    if man is None or not console.is_tty():
        return False
    return subprocess.run([man, str(page)], check=False).returncode == 0
