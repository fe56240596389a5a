"""`dlctl man`: show a page of the manual, wherever dlctl was installed."""

from __future__ import annotations

import re
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import completing
from dlctl.cli.ui import console
from dlctl.errors import NotFound
from dlctl.util.did_you_mean import meant

FOLDERS = (Path(__file__).parents[2] / "manual", Path(__file__).parents[3] / "man")
"""Where the manual is: in a wheel, and in the source tree."""
_WIDTH_MAX = 100


@make_command(
    "dlctl man  # the overview",
    "dlctl man job  # every key of the job file",
    "dlctl man logs  # one command",
)
@click.argument(
    "topic", default="", metavar="[TOPIC]", shell_complete=completing(lambda ctx: topics())
)
@click.option("--plain", is_flag=True, help="Print the page as it is, in Markdown; use no pager.")
def command(topic: str, plain: bool) -> None:
    """TOPIC is a command, job, hosts or problems, or a launcher that has a page. On a terminal the
    page opens in $PAGER. Elsewhere it is printed as Markdown.
    """
    text = text_of(find(topic))
    if plain or not console.is_tty():
        console.out(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    terminal = Console(no_color=not console.shows_color(), highlight=False)
    with terminal.capture() as captured:
        terminal.print(Markdown(text), width=min(terminal.width, _WIDTH_MAX))
    click.echo_via_pager(captured.get())


def find(topic: str) -> Path:
    """The page of a topic; see `topics`. Raises NotFound, with a suggestion."""
    known = topics()
    if not known:
        raise NotFound("the manual is not installed", hint="dlctl --help")
    wanted = topic.removeprefix("dlctl").removeprefix("-")
    if wanted not in known:
        text = f'there is no manual page for "{wanted}"{meant(wanted, known)}'
        raise NotFound(text, hint="dlctl man")
    return known[wanted]


def topics() -> dict[str, Path]:
    """All pages: command (or "job", "hosts", ..., or "" for dlctl itself) -> file."""
    pages = next(filter(None, (sorted(folder.glob("dlctl*.md")) for folder in FOLDERS)), [])
    return {page.stem.removeprefix("dlctl").removeprefix("-"): page for page in pages}


def text_of(page: Path) -> str:
    """A page's Markdown, without comments and links to other files of the manual."""
    text = re.sub(r"<!--.*?-->\n*", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\([^)]+\.md[^)]*\)", r"\1", text).rstrip("\n")
