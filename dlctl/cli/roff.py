"""The little of roff that our manual pages need: written by `Page`, read back by `to_text`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

WIDTH = 78


class Page:
    """A manual page in the making. All text is plain; `code` marks text that is typed as it is."""

    def __init__(self, title: str, section: int, version: str) -> None:
        self._lines = [
            '.\\" Written by `make man`: change the sources, not this file.',
            f'.TH "{title.upper()}" "{section}" "" "dlctl {version}" "dlctl manual"',
        ]

    def heading(self, text: str) -> None:
        self._lines.append(f".SH {escape(text)}")

    def subheading(self, text: str) -> None:
        self._lines.append(f".SS {escape(text)}")

    def paragraphs(self, text: str) -> None:
        for paragraph in text.strip().split("\n\n"):
            self._lines += [".PP", _line(" ".join(paragraph.split()))]

    def item(self, term: str, text: str) -> None:
        """A term (an option, a key, a file) and what it is."""
        self._lines += [".TP", f"\\fB{_guarded(term)}\\fR", _line(text or "-")]

    def items(self, items: Iterable[tuple[str, str]]) -> None:
        for term, text in items:
            self.item(term, text)

    def code(self, text: str) -> None:
        self._lines += [".PP", ".RS 4", ".nf", *map(_line, text.split("\n")), ".fi", ".RE"]

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def escape(text: str) -> str:
    """Plain text for the inside of a line; dashes are escaped, so that options can be copied."""
    return text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")


def _line(text: str) -> str:
    """A whole line of plain text; `words` between backquotes become bold."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backquote
        return _guarded(text)
    marked = "".join(
        f"\\fB{escape(part)}\\fR" if i % 2 else escape(part) for i, part in enumerate(parts)
    )
    return marked if not marked.startswith((".", "'")) else f"\\&{marked}"


def _guarded(text: str) -> str:
    """A line that begins with a dot would be a command."""
    escaped = escape(text)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


# ---------------------------------------------------------------- reading, where there is no man(1)


def to_text(page: str) -> str:
    """A page of ours as plain text."""
    writer = _Writer()
    for line in page.splitlines():
        if line.startswith("."):
            writer.command(*line[1:].partition(" ")[::2])
        else:
            writer.text(_plain(line))
    return "\n".join(writer.lines).strip("\n") + "\n"


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._filled = True
        self._term = False
        self._indent = 7

    def command(self, name: str, argument: str) -> None:
        if name in ("SH", "SS"):
            self.lines += ["", " " * (0 if name == "SH" else 3) + _plain(argument)]
        elif name == "PP":
            self.lines.append("")
        elif name == "TP":
            self.lines.append("")
            self._term = True
        elif name in ("nf", "fi"):
            self._filled = name == "fi"
        self._indent = 14 if name == "TP" else 11 if name == "RS" else 7

    def text(self, text: str) -> None:
        if self._term:
            self._term = False
            self.lines.append(" " * 7 + text)
        elif self._filled:
            margin = " " * self._indent
            self.lines += textwrap.wrap(
                text, WIDTH, initial_indent=margin, subsequent_indent=margin
            )
        else:
            self.lines.append((" " * 11 + text).rstrip())


_ESCAPE = re.compile(r"\\(f[BRI]|\(aq|\(ga|[-e&])")
_MEANING = {"(aq": "'", "(ga": "`", "-": "-", "e": "\\"}


def _plain(line: str) -> str:
    return _ESCAPE.sub(lambda match: _MEANING.get(match[1], ""), line)
