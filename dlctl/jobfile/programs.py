"""What the workers of a job run, `[job]`: a task, or a program with a training loop of its own.

A resolved job has the full path of the user's file, in `task` or in `script`; so has a job with a
`module`, of the module's file.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlctl.algorithms.base import Method
from dlctl.algorithms.shapes import why_no_loop
from dlctl.job import inner
from dlctl.job.config import MAIN, Choice, Gradients, Job, JobFile, ReplicaProcesses
from dlctl.jobfile import parties
from dlctl.jobfile.faults import Fault
from dlctl.jobfile.positions import KeyPath, get
from dlctl.stores import addresses
from dlctl.util import regular
from dlctl.util.regular import NotRegular

PROGRAMS = ("script", "module")
KINDS = ("task", *PROGRAMS)

Verdict = tuple[str, str]
"""The fault and a suggestion; "" if there is none."""
FINE: Verdict = ("", "")


def has_loop(document: dict[str, Any]) -> bool:
    """Whether the job file names a program, valid or not."""
    return any(get(document, ("job", key)) is not None for key in PROGRAMS)


def check(document: dict[str, Any], directory: Path) -> Iterator[Fault]:
    """Faults of `task`, `script`, `module` and `args`. `directory`: where the job file is."""
    if not isinstance(get(document, ("job",)), dict) or parties.are_given(document):
        return  # The schema reports it, or each of the parties has its own.
    given = {key: value for key in KINDS if (value := get(document, ("job", key))) is not None}
    if not given:
        meant = 'as in task = "train.py:task"; or script = "train.py", with its own training loop'
        yield Fault(("job", "task"), '"task" is missing', meant, at_key=True)
    for key in given if len(given) > 1 else ():
        others = " and ".join(other for other in given if other != key)
        what = f"a job has one of task, script and module, and this one has {others}, too"
        yield Fault(("job", key), what, "keep one of them", at_key=True)
    verdicts = {"task": check_task, "script": _script, "module": _module}
    for key, text in given.items():
        if isinstance(text, str):
            message, suggestion = verdicts[key](text, directory)
            if message:
                yield Fault(("job", key), message, suggestion)
    if get(document, ("job", "args")) and not has_loop(document):
        what = "a task has no arguments: they are those of a script or a module"
        yield Fault(("job", "args"), what, "remove it", at_key=True)


def located(job: Job, home: Path) -> Job:
    """The job with the full paths of its files. `home`: the directory of the job file."""
    weights = addresses.located(job.weights, home)
    found = dataclasses.replace(job, weights=weights)
    if job.module:
        return dataclasses.replace(found, script=str(_module_file(job.module, home)))
    if job.script:
        return dataclasses.replace(found, script=str(home / job.script))
    return dataclasses.replace(found, task=str(home / job.task))


def inner_of(method: Method, *, has_loop: bool) -> Choice:
    """The replicas' own optimiser if the job file names none. A program brings its own where the
    method cannot do without: where replicas push the way that they have gone, or have the model.
    """
    if not has_loop:
        return method.inner
    is_displaced = method.push_kind(method.Options()).is_displacement
    is_needed = method.inner.name != inner.NONE and (is_displaced or method.shape.model != "tables")
    return Choice(name=inner.OF_SCRIPT if is_needed else inner.NONE)


def inner_fault(chosen: Choice, *, has_loop: bool) -> Verdict:
    """Whether the optimiser that the job file names can be that of its program, or its task."""
    if has_loop and chosen.name not in (inner.OF_SCRIPT, inner.NONE):
        what = "a script has its own optimizer, which is the inner one"
        return what, f'use "{inner.OF_SCRIPT}", or remove [inner]'
    if not has_loop and chosen.name == inner.OF_SCRIPT:
        return "a task has no optimizer of its own", 'use "adamw", for example'
    return FINE


def faults(job: JobFile, method: Method) -> Iterator[tuple[KeyPath, str, str]]:
    """(where, what, what to do) of each key that says what a program does itself, or what only a
    task can do.
    """
    if not job.has_loop:
        return
    name = job.algorithm.name
    if why := why_no_loop(method):
        yield ("algorithm", "name"), f"{name} needs a task: {why}", "use task, or another method"
    chosen, usual = job.gradient, Gradients()
    own = ["accumulate", "precision", "compile"]
    own += ["clip_norm"] if chosen.clip == usual.clip else []
    for key in own:
        if getattr(chosen, key) != getattr(usual, key):
            yield ("gradient", key), "the script does that itself", "remove it"
    workers = job.workers
    if workers.loader_processes:
        what = "the script starts the processes of its loaders"
        yield ("workers", "loader_processes"), what, "remove it"
    if workers.batch_size == "auto":
        what = "the script has its own batches; this says only how much data a portion has"
        yield ("workers", "batch_size"), what, "use a number, or remove it"
    if job.replica != ReplicaProcesses():
        what = "dlctl cannot split the model of a script"
        instead = "let the script do it (fully_shard), with processes in [workers]"
        yield ("replica",), what, instead
    if job.job.weights:
        yield ("job", "weights"), "the script loads its own weights", "load them in the script"
    if job.data.clients:
        what = "clients have their own data, which only a task can name"
        yield ("data", "clients"), what, "use task"
    if job.data.bad_samples_max:
        what = "the script loads its own samples, and their errors are its own"
        yield ("data", "bad_samples_max"), what, "remove it"
    if any(not group.train for group in job.parameters):
        what = "the script says which parameters are trained"
        yield ("parameters",), what, "set requires_grad = False there"


# ---------------------------------------------------------------- the files


def check_task(text: str, directory: Path) -> Verdict:
    """The file must exist; whether it has the name is checked when a worker imports it."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        is_script = text.endswith(".py") and _is_file(directory / text)
        meant = f'a program with its own training loop is script = "{text}"' if is_script else ""
        return 'must be a file and a name in it, as in "train.py:task"', meant
    return _exists(file, directory, f":{name}")


def _script(text: str, directory: Path) -> Verdict:
    file, colon, _ = text.rpartition(":")
    if colon and file.endswith(".py"):
        return "must be a file that is run as a program", f'did you mean task = "{text}"?'
    if not text.endswith(".py"):
        return 'must be a Python file, as in "train.py"', ""
    return _exists(text, directory)


def _module(text: str, directory: Path) -> Verdict:
    parts = text.split(".")
    if text.endswith(".py"):
        return 'must be a module\'s name, as in "pkg.train"', f'did you mean script = "{text}"?'
    if not all(part.isidentifier() for part in parts):
        return 'must be a module\'s name, as in "pkg.train"', ""
    if _is_file(_module_file(text, directory)):
        return FINE
    place = directory.joinpath(*parts)
    if _is_file(place / "__init__.py"):
        return f"{text} is a package without {MAIN}.py, and cannot be run", ""
    beside = [
        ".".join((*parts[:-1], path.stem))
        for path in _python_files(place.parent)
        if path.stem.isidentifier()
    ]
    close = difflib.get_close_matches(text, beside, n=1)
    meant = f'did you mean "{close[0]}"?' if close else ""
    return f'there is no file "{"/".join(parts)}.py" beside the job file', meant


def _module_file(name: str, home: Path) -> Path:
    """Of a module, or of a package that can be run."""
    place = home.joinpath(*name.split("."))
    return place / f"{MAIN}.py" if place.is_dir() else place.with_name(f"{place.name}.py")


def _exists(file: str, directory: Path, rest: str = "") -> Verdict:
    try:
        regular.check(directory / file)
        if (directory / file).is_file():
            return FINE
    except NotRegular as error:
        return f'"{file}" is {error.kind}, not a Python file', ""
    except (OSError, ValueError):
        pass  # As for a name that no file can have.
    beside = [path.name for path in _python_files(directory)]
    close = difflib.get_close_matches(file, beside, n=1)
    meant = f'did you mean "{close[0]}{rest}"?' if close else ""
    return f'there is no file "{file}" beside the job file', meant


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _python_files(directory: Path) -> list[Path]:
    try:
        return [*directory.glob("*.py")]
    except (OSError, ValueError):
        return []
