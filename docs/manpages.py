"""The manual of a wheel: `man/` as man pages, rendered by docutils (`hatch_build.py` calls it).

`python docs/manpages.py FOLDER` writes them there; `make docs` does, and fails on a warning.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MANUAL = Path(__file__).parents[1] / "man"
HEAD = re.compile(r"# (\S+)\((\d)\)\n\n(.+?)\n\n", re.DOTALL)
"""The beginning of a page: its name, its section, its summary."""


def write(folder: Path, version: str) -> list[Path]:
    """Write every page of the manual as FOLDER/manN/NAME.N; returns the paths."""
    written = []
    for source in sorted(MANUAL.glob("*.md")):
        text = source.read_text(encoding="utf-8")
        found = HEAD.match(text)
        if found is None:
            raise ValueError(f"{source}: does not begin with `# NAME(SECTION)` and a summary")
        name, section, summary = found.groups()
        page = folder / f"man{section}" / f"{name}.{section}"
        page.parent.mkdir(parents=True, exist_ok=True)
        about = {"title": name, "subtitle": summary, "manual_section": section}
        about |= {"manual_group": "dlctl manual", "version": f"dlctl {version}"}
        page.write_text(to_roff(about, text[found.end() :]), encoding="utf-8")
        written.append(page)
    return written


def to_roff(about: dict[str, str], body: str) -> str:
    """A man page; `body` starts with its first section. Raises SystemMessage on a warning."""
    import yaml
    from docutils.core import publish_string
    from myst_parser.parsers.docutils_ import Parser

    one_line = {key: re.sub(r"[`\n]+", " ", text).strip(" .") for key, text in about.items()}
    without_links = re.sub(r"\[([^\]]+)\]\([^)]+\.md[^)]*\)", r"\1", body)
    without_comments = re.sub(r"<!--.*?-->\n*", "", without_links, flags=re.DOTALL)
    sections = re.sub(r"^##(#?) ", r"#\1 ", without_comments, flags=re.MULTILINE)
    source = f"---\n{yaml.safe_dump(one_line)}---\n\n{sections}"
    settings = {"halt_level": 2, "output_encoding": "unicode", "myst_highlight_code_blocks": False}
    writer = "manpage"
    return str(publish_string(source, parser=Parser(), writer=writer, settings_overrides=settings))


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]), "dev"):
        print(path)
