"""The reference, as Markdown: commands, job file, methods. `make man`, or
`python docs/reference.py`.

It is generated from click's commands, from the dataclasses of the job file's keys, and from the
docstrings of the methods, into `man/`, `docs/methods/` and `docs/optimizers/`. The result is
committed, so that it can be read without a build; a test checks that it is current.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click

from dlctl import registry
from dlctl.cli.app import SECTIONS, cli
from dlctl.cli.commands.algorithms import default_of
from dlctl.cli.group import Documented, summary_and_body
from dlctl.job.config import Choice, JobFile, Launch
from dlctl.ops.problem_texts import CODES
from dlctl.optim.matrices import MatrixOptimizer
from dlctl.util.keydocs import KeyDoc, keys

ROOT = Path(__file__).parent.parent
WIDTH = 96
BEGIN, END = "<!-- generated: make man -->", "<!-- end -->"
"""Delimiters of the generated part of a handwritten page."""
ABOUT = {
    "job": "What to train, and until when. This section is required, with a name, and a task, a "
    "script or a module.",
    "algorithm": "The distributed optimisation method.",
    "inner": "The optimiser of a replica's local steps, for methods that have them; it is torch's. "
    "On the CPU, `adam`, `adamw` and `adagrad` use torch's fused kernels (`fused=True`). A name "
    "may also be a class of yours, `package.module:Class`: then `lr` is required, and all "
    "other keys are its arguments. Sparse gradients, as of `nn.Embedding(sparse=True)`, are taken "
    "by `sgd` and `adagrad` without `weight_decay`, and by `sparseadam` if all are sparse. With a "
    "`script` the only names are `script`, its own optimizer, which is the default where replicas "
    "make steps of their own, and `none`; then `inner_lr` is no live setting.",
    "gradient": "How a replica processes a gradient before it is used. A `script` does that "
    'itself: only `clip = "global"`, with `clip_norm`, goes with one.',
    "optimizer": "The rule by which the servers apply pushes.",
    "compression": "The part of an update that a worker sends. The residual stays in the worker "
    "and is added to the next update (error feedback).",
    "servers": "The daemons that own the parameters.",
    "workers": "The daemons that compute.",
    "data": "How the dataset is distributed to the workers. `task.dataset()` returns a map-style "
    "dataset (`__len__` and `__getitem__`) or a stream (`__iter__` alone): an IterableDataset, or "
    "that of `datasets` with streaming=True. A stream may also have `shards()`, which returns "
    "the names of its parts (text, paths, numbers, or tuples of them) or their number, and "
    "`open(shard, offset)`, which yields the samples of one part from an offset on. Workers then "
    "lease ranges of shards, and a resumed run skips finished ranges. The order of the list may "
    "differ between workers, the names may not. Without shards every worker reads everything and "
    "skips the samples of others. The order of a shard must be deterministic; it may depend on "
    "`set_epoch(epoch)`, so a stream shuffles itself, from a seed. A stream needs a `stop` in "
    "steps, samples, seconds or a target. If it ends earlier, it is read again, and an event "
    "reports it.",
    "checkpoints": "When the whole state of a run is saved, and where its copies are; see "
    "[dlctl-storage(7)](dlctl-storage.md).",
    "evaluation": "When the task's `evaluate` is called.",
    "network": "How the daemons reach each other.",
    "hosts": "The machines of the run, one section each; see [dlctl-hosts(7)](dlctl-hosts.md).",
    "launcher": "What starts the agents on other hosts; the agent of this machine is always local. "
    "This section is preferred. Two shorter forms, of earlier versions, mean the same: without it, "
    'hosts in `[[hosts]]` have `name = "ssh"`; and a section that is called as a launcher, such '
    "as `[slurm]`, is this section with that name and the same keys. Other packages may add "
    "launchers with entry points `dlctl.launchers`; `dlctl algorithms` lists all.",
}
PAGES = {"ssh": "dlctl-hosts", "slurm": "dlctl-slurm"}
"""Launcher -> its handwritten page."""


# ---------------------------------------------------------------- Markdown


def _code(text: str) -> str:
    return f"``{text}``" if "`" in text else f"`{text}`"


_STARTS = re.compile(r" ([-+*>#|]|\d+[.)]|\[\]:) ")
"""Markers that would start a list, a quotation or a heading at the beginning of a line."""


def _wrap(text: str, first: str = "", rest: str = "") -> str:
    """One paragraph in lines of `WIDTH`; a marker never starts a line."""
    glued = _STARTS.sub("\0\\1\0", " ".join(text.split()))
    lines = textwrap.wrap(
        glued, WIDTH, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def _paragraphs(text: str) -> str:
    """A docstring's prose, rewrapped; indented parts stay as they are."""
    parts = [part.strip("\n") for part in re.split(r"\n\s*\n", text.strip("\n"))]
    return "\n\n".join(part if part.startswith(" ") else _wrap(part) for part in parts)


def _items(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(_wrap(f"- {term}: {text or '-'}", "", "  ") for term, text in items)


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *filter(None, parts)]) + "\n"


def _section(title: str, body: str, level: int = 2) -> str:
    return f"{'#' * level} {title}\n\n{body}" if body else ""


# ---------------------------------------------------------------- commands


def _commands(context: click.Context) -> Iterator[tuple[Documented, click.Context]]:
    """The commands of the context's group."""
    if isinstance(group := context.command, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, Documented):
                yield command, click.Context(command, info_name=name, parent=context)


def _link(name: str) -> str:
    return f"[{name}(1)]({name}.md)"


def _command_page(command: Documented, context: click.Context) -> str:
    summary, body = summary_and_body(command)
    subcommands = []
    for sub, inside in _commands(context):
        text = _paragraphs("\n\n".join(summary_and_body(sub)))
        about = filter(None, [text, _items(_options(sub, inside))])
        subcommands.append(_section(_code(_usage(sub, inside)), "\n\n".join(about), 3))
    siblings = {**next(names for names in SECTIONS.values() if command.name in names)}
    del siblings[str(command.name)]
    options = [*_options(command, context), ("`-h, --help`", "Show a short help and exit.")]
    return _page(
        f"dlctl-{context.info_name}(1)",
        _wrap(summary),
        _section("Synopsis", f"    {_usage(command, context)}"),
        _section("Description", _paragraphs(body)),
        _section("Commands", "\n\n".join(subcommands)),
        _section("Options", _items(options)),
        "Global options, exit codes, files and environment variables: [dlctl(1)](dlctl.md).",
        _section("Examples", _items(dict(_examples(command, context)).items())),
        _section("See also", ", ".join(_link(f"dlctl-{name}") for name in siblings)),
    )


def _usage(command: click.Command, context: click.Context) -> str:
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            names = ", ".join([*param.opts, *param.secondary_opts])
            takes_value = not param.is_flag and not param.count
            metavar = f" {param.make_metavar(context)}" if takes_value else ""
            yield _code(names + metavar), param.help or ""


def _examples(command: Documented, context: click.Context) -> Iterator[tuple[str, str]]:
    for sub, inside in _commands(context):  # A group also shows those of its commands.
        yield from _examples(sub, inside)
    for line, meaning in command.examples:
        yield _code(line), _sentence(meaning)


def _overview(context: click.Context) -> str:
    """The generated part of dlctl(1): commands and global options."""
    groups = []
    for heading, lines in SECTIONS.items():
        rows = [(_link(f"dlctl-{name}"), line) for name, line in lines.items()]
        groups.append(_section(heading, _items(rows), 3))
    options = _section("Options", _items(_options(cli, context)))
    return "\n\n".join([_section("Commands", "\n\n".join(groups)), options])


# ---------------------------------------------------------------- job file


def section_of(hint: Any) -> tuple[Any, bool]:
    """The dataclass of a section, and whether there may be several."""
    return (get_args(hint)[0], True) if get_origin(hint) is tuple else (hint, False)


def _sections() -> str:
    """The generated part of dlctl-job(5): every section with its keys."""
    hints, found = get_type_hints(JobFile), []
    for field in dataclasses.fields(JobFile):
        section, is_list = section_of(hints[field.name])
        if section in (Choice, Launch):
            default = "" if field.default is dataclasses.MISSING else field.default.name
            body = _choices(field.name, default)
        else:
            body = key_items(keys(section))
        title = f"[[{field.name}]]" if is_list else f"[{field.name}]"
        about = _wrap(_about(field.name, section))
        found.append(_section(_code(title), "\n\n".join(filter(None, [about, body]))))
    return "\n\n".join(found)


def _about(section: str, owner: type[Any]) -> str:
    """From `ABOUT`, or the dataclass's docstring, unless it is Python's default."""
    own = owner.__doc__ or ""
    return ABOUT.get(section) or ("" if own.startswith(f"{owner.__name__}(") else own)


def _choices(section: str, default: str) -> str:
    kind = "launchers" if section == "launcher" else registry.SECTIONS[section]
    names = ", ".join(_code(name) for name in registry.BUILT_IN[kind])
    parts = [
        _items([(_code(f'name = "{default}"'), f"One of {names}. The other keys depend on it.")])
    ]
    for name, entry in registry.BUILT_IN[kind].items():
        text = [_wrap(f"{_sentence(entry.summary)} {_sentence(entry.note)}")]
        if kind == "algorithms":
            text = [_wrap(f"{_sentence(entry.summary)} See [{name}](../docs/methods/{name}.md).")]
        elif kind == "optimizers" and issubclass(entry.load(), MatrixOptimizer):
            page = f"[{name}](../docs/optimizers/{name}.md)"
            text = [_wrap(f"{_sentence(entry.summary)} See {page}.")]
        elif kind == "launchers" and name in PAGES:
            text = [_wrap(f"{_sentence(entry.summary)} See [{PAGES[name]}(7)]({PAGES[name]}.md).")]
        text += [key_items(keys(entry.load().Options))]
        text += _defaults(name) if kind == "algorithms" else []
        heading = _code(f'name = "{name}"')
        parts.append(_section(heading, "\n\n".join(filter(None, text)), 3))
    return "\n\n".join(parts)


def _defaults(algorithm: str) -> list[str]:
    """The defaults of [optimizer], [inner] and [compression]."""
    sections = ("optimizer", "inner", "compression")
    found = [(section, default_of(section, algorithm)) for section in sections]
    return [
        _wrap(f"Without a section `[{section}]`: {', '.join(map(_code, lines))}.")
        for section, lines in found
        if len(lines) > 1
    ]


def key_items(found: list[KeyDoc]) -> str:
    """A list of keys with their types, limits, defaults and texts."""
    items = []
    for key in found:
        hint = {"": "; required", "none": "; no default"}.get(key.default, "")
        term = key.name if hint else f"{key.name} = {key.default}"
        limits = f", {key.limits}" if key.limits else ""
        items.append((f"{_code(term)} ({key.type}{limits}{hint})", key.text))
    return _items(items)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


# ---------------------------------------------------------------- methods


def _figure(name: str, *, has_parties: bool) -> tuple[str, str]:
    """The figure of a method's page, and what it shows."""
    if has_parties:
        shown = f"![{name}: leakage, error of an attacker and accuracy by alpha]({name}.svg)"
        text = (
            "The digits on real daemons, five seeds for each weight `alpha` of NoPeek, and their "
            "mean: the chapter `nopeek` of the benchmarks."
        )
    else:
        shown = f"![{name}: loss against time and bytes in a simulated run]({name}.svg)"
        text = (
            "Four workers, one of which is three times as slow, in the simulator: see "
            "[how the figures are made](index.md#figures)."
        )
    return shown, _wrap(text)


def _method_page(name: str) -> str:
    entry = registry.BUILT_IN["algorithms"][name]
    text = inspect.getdoc(import_module(entry.target.partition(":")[0])) or ""
    method = entry.load()
    options = key_items(keys(method.Options))
    live = ", ".join(_code(key) for key in method.live)
    return _page(
        name,
        _wrap(_sentence(entry.summary)),
        *_figure(name, has_parties=method.shape.is_divided),
        text,
        _section("Keys of `[algorithm]`", options),
        *_defaults(name),
        _wrap(f"`dlctl set` changes {live} during the run.") if live else "",
    )


def matrix_optimizers() -> list[str]:
    """Optimisers whose rule is for whole matrices, which have a page each."""
    built_in = registry.BUILT_IN["optimizers"].items()
    return [name for name, entry in built_in if issubclass(entry.load(), MatrixOptimizer)]


def _optimizer_page(name: str) -> str:
    entry = registry.BUILT_IN["optimizers"][name]
    what = (
        "`sync` with four workers, one of which is three times as slow, and two servers, in the "
        "simulator; in grey with AdamW. Its rates are not tuned. Steps and times on a small GPT: "
        "`python -m benchmarks matrices`."
    )
    return _page(
        name,
        _wrap(_sentence(entry.summary)),
        f"![{name}: loss against time and bytes in a simulated run]({name}.svg)",
        _wrap(what),
        inspect.getdoc(import_module(entry.target.partition(":")[0])) or "",
        _section("Keys of `[optimizer]`", key_items(keys(entry.load().Options))),
    )


def _problems_page() -> str:
    return _page(
        "dlctl-problems(7)",
        "The codes of problems.",
        _section(
            "Description",
            _wrap(
                "`dlctl status`, `dlctl why` and their `--json` show a code with each problem, and "
                "below it the remedy as a command for your run. `dlctl explain CODE` prints the "
                "entries below."
            ),
        ),
        *(
            _section(
                f"`{code}`",
                _paragraphs(f"{known.what}\n\nCause: {known.cause}\n\nRemedy: {known.remedy}"),
            )
            for code, known in CODES.items()
        ),
    )


# ---------------------------------------------------------------- files


def pages(folder: Path = ROOT) -> dict[str, str]:
    """All pages with generated parts: path in the repository -> content."""
    root = cli.make_context("dlctl", [], resilient_parsing=True, color=False)
    found = {
        "man/dlctl.md": _with_block(folder / "man/dlctl.md", _overview(root)),
        "man/dlctl-job.md": _with_block(folder / "man/dlctl-job.md", _sections()),
    }
    for command, context in _commands(root):
        found[f"man/dlctl-{command.name}.md"] = _command_page(command, context)
    found["man/dlctl-problems.md"] = _problems_page()
    for name in registry.BUILT_IN["algorithms"]:
        found[f"docs/methods/{name}.md"] = _method_page(name)
    for name in matrix_optimizers():
        found[f"docs/optimizers/{name}.md"] = _optimizer_page(name)
    return found


def _with_block(page: Path, block: str) -> str:
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n\n{block}\n\n{END}{rest.partition(END)[2]}"


BY_HAND = {
    "man/dlctl-hosts.md",
    "man/dlctl-slurm.md",
    "man/dlctl-storage.md",
    "docs/methods/index.md",
}


def differences(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Paths below `folder` that are missing, out of date, or obsolete."""
    present = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for part in ("man", "docs/methods", "docs/optimizers")
        for path in folder.glob(f"{part}/*.md")
    }
    names = (wanted.keys() | present.keys()) - BY_HAND
    return sorted(name for name in names if wanted.get(name) != present.get(name))


def write(folder: Path = ROOT) -> list[str]:
    """Update the pages; returns the paths of the changed ones."""
    wanted = pages(folder)
    changed = differences(folder, wanted)
    for name in changed:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return changed


if __name__ == "__main__":
    for name in write():
        print(name)
