"""`dlctl algorithms`: the names that a job file can use, from the registry."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from dlctl import registry
from dlctl.cli.group import make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console
from dlctl.errors import NotFound
from dlctl.util.did_you_mean import meant
from dlctl.util.keydocs import keys, to_toml

SECTIONS = {kind: section for section, kind in registry.SECTIONS.items()} | {
    "launchers": "launcher"
}
"""Kind -> the section of the job file that uses its names."""
WIDTH = 70


@make_command(
    "dlctl algorithms  # algorithms, optimizers, compressors, launchers",
    "dlctl algorithms optimizers  # one kind",
    "dlctl algorithms downpour  # the keys of one entry, with their defaults",
)
@click.argument("name", required=False)
@json_option
def command(name: str | None) -> None:
    found = [(kind, entry) for kind in registry.BUILT_IN for entry in registry.names(kind)]
    is_kind = name in registry.BUILT_IN
    chosen = [(kind, entry) for kind, entry in found if name in (None, kind, entry)]
    if not chosen:
        known = [*registry.BUILT_IN, *(entry for _, entry in found)]
        close = meant(name or "", known, registry.ALIASES)
        raise NotFound(f'there is no "{name}"{close}', hint="dlctl algorithms")
    has_keys = name is not None and not is_kind
    described = [_describe(kind, entry, with_keys=has_keys) for kind, entry in chosen]
    if has_keys:
        text = "\n\n".join(map(_details, described))
    else:
        rows = []
        for one in described:
            what = one["summary"] + (f" ({one['note']})" if one["note"] else "")
            rows.append({"KIND": one["kind"], "NAME": one["name"], "WHAT IT IS": what})
        text = console.table(rows)
    names = [one["name"] for one in described]
    console.show("dlctl.algorithms/1", {"entries": described}, text, names)


def _describe(kind: str, name: str, *, with_keys: bool) -> dict[str, Any]:
    entry = registry.find(kind, name)
    described: dict[str, Any] = {"kind": kind, "name": name, "summary": entry.summary}
    described |= {"note": entry.note, "section": SECTIONS.get(kind)}
    if with_keys:
        options = getattr(registry.load(kind, name), "Options", None)
        described["keys"] = [key._asdict() for key in keys(options)] if options else []
    return described


def _details(one: dict[str, Any]) -> str:
    kind, name = one["kind"], one["name"]
    lines = [f"{console.style(name, bold=True)} ({registry.singular(kind)}): {one['summary']}"]
    lines += [one["note"]] if one["note"] else []
    if one["section"]:
        lines += ["", f"[{one['section']}]", f'name = "{name}"']
    for key in one["keys"]:
        limits = f", {key['limits']}" if key["limits"] else ""
        default = f" = {key['default']}" if key["default"] else "   (required)"
        text = f"{key['type']}{limits}. {key['text']}"
        lines += [key["name"] + default, textwrap.indent(textwrap.fill(text, WIDTH), "    # ")]
    if kind == "algorithms":
        for section in ("optimizer", "inner"):
            lines += ["", f"[{section}]", *default_of(section, name)]
    return "\n".join(lines)


def default_of(section: str, algorithm: str) -> list[str]:
    """The defaults of [optimizer] or [inner] with this method."""
    choice = getattr(registry.load("algorithms", algorithm), section)
    given = {"name": choice.name} | choice.options
    return [f"{key} = {to_toml(value)}" for key, value in given.items()]
