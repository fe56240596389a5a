"""The parts that a user's task may have: in which form each is taken, and names that are close.

A part is a function. One that would only return data may be the data itself. `None` stands for a
part that is not there. Everything else under the name of a part is an error, when a job uses it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Sampler

from dlctl.util.did_you_mean import closest

FUNCTIONS = {
    "model": "model(): return <the model>",
    "dataset": "dataset(): return <the dataset>",
    "loss": "loss(model, batch): return <a mean over the batch>",
    "evaluate": 'evaluate(model): return {"accuracy": ...}',
    "finish": "finish(model, metrics): return <text>",
    "collate": "collate(samples): return <the batch>",
    "rows": "rows(batch): return {...}",
    "change": "change(model, batch, rows, lr): return <loss>, {...}",
    "parallelize": "parallelize(model, mesh): ...",
}
"""Parts that have to be functions, and what to write."""
DATA = ("sampler", "sample_weights", "clients", "client_sizes", "tables", "stages", "tensor_plan")
"""Parts that may be the data themselves."""
NO_MODULES = {
    "model": "each process builds its own, from the job's seed: ",
    "loss": "dlctl calls it with the model and a batch: give it another name, and ",
}
"""Parts that cannot be a torch.nn.Module, although that can be called, and why."""
ALWAYS = ("evaluate", "finish", "collate", "sampler", "sample_weights")
"""Optional parts that every job uses; the others belong to some methods or settings."""
SECOND_NAMES = {"collate": "collate_fn"}
"""Part -> torch's name for it, which is taken as well."""
OTHER_NAMES = {
    "build-model": "model", "get-model": "model", "make-model": "model",
    "get-dataset": "dataset", "train-dataset": "dataset", "train-dataloader": "dataset",
    "compute-loss": "loss", "loss-fn": "loss", "training-step": "loss",
    "eval": "evaluate", "evaluation": "evaluate", "test": "evaluate", "validate": "evaluate",
    "validation": "evaluate", "validation-step": "evaluate",
    "collator": "collate", "collate-batch": "collate",
}  # fmt: skip
"""Names for parts in other libraries -> the part."""
OF_JOB_FILE = {
    "optimizer": "[inner] or [optimizer]", "optimizers": "[inner] or [optimizer]",
    "configure_optimizers": "[inner] or [optimizer]",
    "scheduler": "[schedule]", "lr_scheduler": "[schedule]",
    "batch_sampler": "workers.batch_size, and a sampler the order of the samples",
}  # fmt: skip
"""Names for what no part of a task is -> the key of the job file that sets it."""
LIKE = 0.8
"""How alike two names are, from 0 to 1, if one is taken for a typing error of the other."""
LIBRARIES = ("abc", "builtins", "torch", "types", "typing")
"""Packages whose classes a task may inherit from: their names are not its author's."""


def wrong_form(part: str, given: Any, user: Any) -> tuple[str, str]:
    """What is wrong with the form of a part, and what to write; ("", "") if it is right."""
    is_module = part in NO_MODULES and isinstance(given, nn.Module)
    if not is_module and (callable(given) or (part in DATA and isinstance(given, Iterable))):
        return "", ""
    what = "a torch.nn.Module, not a function" if is_module else "not a function"
    text = f"task.{part} is a value of type {type(given).__name__}, {what}"
    written = FUNCTIONS.get(part, f"{part}(...): return <the data>")
    if not isinstance(user, ModuleType):
        written = written.replace("(", "(self, ", 1).replace("(self, )", "(self)", 1)
    return text, f"{NO_MODULES[part] if is_module else ''}write `def {written}`"


def line_of(part: str, user: Any) -> str | None:
    """file:line where the task's source sets this name; None: not found."""
    source = user if isinstance(user, ModuleType | type) else type(user)
    try:
        file, (lines, first) = inspect.getsourcefile(source), inspect.getsourcelines(source)
    except (TypeError, OSError):
        return None
    sets = re.compile(rf"\s*(\w+\.)?{part}\s*(:[^=]*)?=(?!=)")
    at = next((number for number, line in enumerate(lines) if sets.match(line)), None)
    return None if at is None else f"{file}:{max(first, 1) + at}"


def unused(user: Any) -> list[str]:
    """A sentence for each name of a task that dlctl does not use, but that is close to one."""
    found = []
    for name, given in sorted(_own(user).items()):
        if key := OF_JOB_FILE.get(name):
            found.append(f"the task has {name}, which dlctl does not use: {key} sets it")
        elif part := _meant(name, given, user):
            found.append(f"the task has {name}, which dlctl does not use: did you mean {part}?")
    return found


def close_to(missing: Iterable[str], user: Any) -> str:
    """Names of a task that may stand for missing parts, as the end of a hint; "" for none."""
    found = [
        f"{name} may be its {part}"
        for name, given in sorted(_own(user).items())
        if (part := _meant(name, given, user)) in missing
    ]
    return f"; {', '.join(found)}" if found else ""


def _meant(name: str, given: Any, user: Any) -> str:
    """The part that the task lacks, and that this name is close to; "" if there is none."""
    is_function = callable(given) and not isinstance(given, nn.Module)
    is_data = isinstance(given, Tensor | np.ndarray | list | tuple | Sampler)
    known = [part for part in (*FUNCTIONS, *DATA) if _lacks(part, user)]
    known = [part for part in known if is_function or (is_data and part in DATA)]
    if name in FUNCTIONS or name in DATA or name in SECOND_NAMES.values():
        return ""
    return closest(name, known, OTHER_NAMES, alike=LIKE)


def _lacks(part: str, user: Any) -> bool:
    try:
        return getattr(user, part, None) is None
    except Exception:  # Raised by a property that the job may never use.
        return False


def _own(user: Any) -> Mapping[str, Any]:
    """The public names that the task's author has given: none that is inherited from a library, and
    none that a module has imported.
    """
    found = dict(_public(vars(user))) if hasattr(user, "__dict__") else {}
    if isinstance(user, ModuleType):
        return {name: each for name, each in found.items() if not _is_imported(each, user)}
    for kind in type(user).__mro__:
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            found = dict(_public(vars(kind))) | found
    return found


def _public(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in names.items():
        if not name.startswith("_"):
            is_bound = isinstance(value, staticmethod | classmethod)
            yield name, value.__func__ if is_bound else value


def _is_imported(value: Any, module: ModuleType) -> bool:
    is_named = inspect.isroutine(value) or isinstance(value, type)
    home = getattr(value, "__module__", None)  # `str.join` has none.
    return isinstance(value, ModuleType) or (is_named and home != module.__name__)
