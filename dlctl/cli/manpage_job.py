"""`dlctl-job(5)`: every key of the job file, from the dataclasses that own them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dlctl import registry
from dlctl.cli.commands.algorithms import default_of
from dlctl.cli.keydocs import Key, keys
from dlctl.cli.roff import Page
from dlctl.config import Choice, JobFile

EXAMPLE = Path(__file__).with_name("template") / "job.toml"
_ABOUT = {
    "job": "What to train, and until when. This section and its name and task must be there.",
    "algorithm": "The distributed optimisation method.",
    "inner": "The optimiser by which a replica makes steps of its own, for methods whose replicas "
    "do; it is torch's. A name may also be a class of yours, `package.module:Class`; it needs an "
    "lr then, and all other keys are its arguments.",
    "gradient": "What a replica does with a gradient before it is used.",
    "optimizer": "The rule by which the servers apply what is pushed.",
    "compression": "What a worker sends of an update; what it does not send stays with it and is "
    "added to the next one.",
    "servers": "The daemons that own the parameters.",
    "workers": "The daemons that compute.",
    "data": "How the dataset is dealt out to the workers. What task.dataset() gives is map-style, "
    "with `__len__` and `__getitem__`; or a stream, with `__iter__` alone: an IterableDataset, or "
    "what `datasets` gives with streaming=True. A stream may also have `shards()`, which gives the "
    "names of its parts or their number, and `open(shard, offset)`, which gives the samples of one "
    "from a place on. Workers lease ranges of shards, each goes on with the one that it reads, and "
    "a run that is resumed skips what is done; without shards every worker reads everything and "
    "skips what others compute. The order of a shard must always be the same, but may follow "
    "`set_epoch(epoch)`: what shuffles does so by itself, from a seed. A stream needs a job.stop "
    "in steps, samples, seconds or a target. If it ends before, that is told in the events, and it "
    "is read again.",
    "checkpoints": "When the whole state of a run is saved.",
    "evaluation": "When the task's evaluate is called.",
    "network": "How the daemons reach each other.",
    "hosts": "The machines that take part, one section each; see dlctl-hosts(7).",
    "slurm": "What to ask Slurm for; the daemons run in one job of it, see dlctl-slurm(7).",
}


def job_page(version: str) -> str:
    page = Page("dlctl-job", 5, version)
    page.heading("NAME")
    page.paragraphs("dlctl-job - the job file of dlctl")
    page.heading("DESCRIPTION")
    page.paragraphs(
        "A job file is TOML. All sections but [job] may be left out, and all keys that have a "
        "default. An unknown key is an error; `dlctl validate` reports everything that is wrong, "
        "with line numbers.\n\nRates need a unit: `100Mbit/s`, `5MB/s`, `64KiB/s`, or `off` for no "
        "limit. Paths are relative to the job file."
    )
    page.heading("SECTIONS")
    hints = get_type_hints(JobFile)
    for field in dataclasses.fields(JobFile):
        section, is_list = section_of(hints[field.name])
        page.subheading(f"[[{field.name}]]" if is_list else f"[{field.name}]")
        page.paragraphs(_about(field.name, section))
        if section is Choice:
            default = "" if field.default is dataclasses.MISSING else field.default.name
            _choices(page, field.name, default)
        else:
            _keys(page, keys(section))
    page.heading("EXAMPLES")
    page.code(EXAMPLE.read_text(encoding="utf-8").rstrip("\n"))
    page.heading("SEE ALSO")
    page.paragraphs("dlctl(1), dlctl-validate(1), dlctl-algorithms(1), dlctl-run(1)")
    return str(page)


def section_of(hint: Any) -> tuple[Any, bool]:
    """The dataclass of a section, and whether there may be several."""
    return (get_args(hint)[0], True) if get_origin(hint) is tuple else (hint, False)


def _about(section: str, owner: type[Any]) -> str:
    """Our words, or the dataclass's own (the docstring that Python makes up says nothing)."""
    own = owner.__doc__ or ""
    return _ABOUT.get(section) or ("" if own.startswith(f"{owner.__name__}(") else own)


def _choices(page: Page, section: str, default: str) -> None:
    kind = registry.SECTIONS[section]
    known = registry.BUILT_IN[kind]
    page.item(f'name = "{default}"', f"One of {', '.join(known)}. The other keys depend on it:")
    for name, entry in known.items():
        page.paragraphs(f'`name = "{name}"`: {entry.summary}')
        _keys(page, keys(entry.load().Options))
        for other in ("optimizer", "inner") if kind == "algorithms" else ():
            lines = default_of(other, name)
            if len(lines) > 1:
                written = ", ".join(f"`{line}`" for line in lines)
                page.paragraphs(f"Without a section [{other}]: {written}.")


def _keys(page: Page, found: list[Key]) -> None:
    for key in found:
        term = f"{key.name} = {key.default}" if key.default else f"{key.name} (required)"
        term = term.replace(" = none", " (no default)")
        limits = f", {key.limits}" if key.limits else ""
        page.item(term, f"({key.type}{limits}) {key.text}")
