"""Makes the manual, `man/`, a part of the site, as `manual/`: links are right in both places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

MANUAL = Path(__file__).parents[1] / "man"


def on_files(files: Files, config: Any) -> Files:
    for page in sorted(MANUAL.glob("*.md")):
        uri = f"manual/{page.name}"
        files.append(File.generated(config, uri, abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("manual/"):
        return markdown.replace("](../docs/", "](../")
    return re.sub(r"\]\(((?:\.\./)*)\.\./man/", r"](\1manual/", markdown)
