"""The user's task: loaded from a file, checked, and guarded in every call.

A task is any object, class or module with these; there is no base class to inherit:

    model() -> torch.nn.Module
    dataset() -> map-style dataset: __len__ and __getitem__; or a stream, __iter__: see
                                             `daemons/worker/data/stream_loader.py`
    loss(model, batch) -> 0-d tensor, the mean over the batch; or (that, dict of numbers), which
                          are means over the batch, too; or (those two, a number >= 0), the weight
                          of this batch in its step. It may also take step, epoch by name
    evaluate(model) -> dict of numbers       optional
    finish(model, metrics) -> text or None   optional; once, when the run has finished
    collate(samples) -> batch                optional; torch's default_collate if absent. The name
                                             may be collate_fn, too
    sampler(dataset, epoch) -> rows          optional; the indices of an epoch's samples in their
                                             order: as many in every epoch, the same in all workers.
                                             It may be a torch Sampler
    sample_weights(dataset) -> weights       optional, instead: one number >= 0 for each sample

With tables of rows that only the servers hold (`daemons/worker/row_tables.py`), it also has

    tables() -> {name: (rows, width, init)}  init: a number, ("uniform", from, to) or
                                             ("normal", mean, standard deviation)
    rows(batch) -> {name: row indices}       int64 tensors of any shape; rows may repeat
    loss(model, batch, rows)                 rows: name -> float32[shape of its indices, width]
    change(model, batch, rows, lr)           optional, instead: (loss, {name: what is added to its
                                             rows}), or a dict of numbers behind these
    evaluate(model, rows)                    rows(name, row indices) fetches and returns them:
    finish(model, metrics, rows)             float32[shape of the indices, width]

and may do without model().

A replica of several processes (`[replica]`) may use more functions, all optional. They get a model
whose parameters have no values (they are on torch's meta device):

    stages(model) -> names of modules, a list for each stage of `replica.pipeline`
    tensor_plan(model) -> {names of modules: "colwise", "rowwise" or a ParallelStyle of torch's}
    parallelize(model, mesh)                 instead of what `fsdp` or `tensor` would do with it

Parts that only return data may be the data themselves (`task_parts.py`).

Every error of the user's code becomes a TaskError: what was called, what it raised, and where in
the user's files. This includes SystemExit and the like; only KeyboardInterrupt passes through.
"""

from __future__ import annotations

import importlib.util
import inspect
import numbers
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import dlctl
from daemons.worker.task import task_parts
from daemons.worker.task.stored_code import KeptSource, import_kept
from dlctl.errors import JobFailed
from dlctl.roles.protocol.limits import METRIC_NAME_CHARS_MAX, METRICS_MAX
from dlctl.runs import task_code
from dlctl.util.did_you_mean import closest

_LOSS_RETURNS = 'it returns the loss, (the loss, {"name": value}) or (both, weight)'
MESSAGE_CHARS_MAX = 2_000
DETAIL_CHARS_MAX = 7_000
"""Characters of an error's detail, 4 bytes each: with its message it fits into a header."""
CPU_ALLOCATOR = "DefaultCPUAllocator"
"""A part of the RuntimeError that torch raises if it cannot allocate a tensor on the CPU."""
NAMES_MAX = 20
"""Names of a task's file that an error lists at most."""
FOLDERS = 4
"""How many folders, from a file's upward, an error searches for a module that is not found."""
TOLD = ("step", "epoch", "rows")
"""Arguments that a task's loss gets by name, behind model and batch, if it takes them."""


class TaskError(JobFailed):
    """The user's task has raised an exception, or returned something invalid."""

    call = ""
    """The call that raised, as in "task.loss"; empty if nothing raised, and a part or what it
    returned is wrong.
    """
    detail = ""
    """The traceback of the user's error, without dlctl's own frames."""


class LossResult(NamedTuple):
    """What a task's loss has returned for one batch."""

    value: Tensor
    """The loss: a 0-d tensor with a gradient."""
    metrics: dict[str, Any]
    """Numbers, and tensors and arrays of one element, which may be on a device."""
    weight: Any = None
    """The weight of this batch among those of its step, one of the metrics. None: its samples."""


ReadRows = Callable[[str, Tensor], Tensor]
"""Name of a table and row indices -> these rows: float32[shape of the indices, width]."""


class Task:
    """A user's task with every call guarded and every result checked.

    Raises only TaskError for errors of the user's code, and for a missing part.
    """

    def __init__(self, user: Any, name: str = "task", needed: Sequence[str] = ()) -> None:
        """needed: the parts that it must have; (): those of a task that is trained in one piece."""
        self._user = user
        self._names = {part: _name_of(part, user) for part in task_parts.SECOND_NAMES}
        self._weighs: bool | None = None
        """Whether the task's loss returns a weight; None: it was not called so far."""
        self.has_rows = self.has("tables")
        self.has_change = self.has_rows and self.has("change")
        needed = [*needed] or self._needed()
        missing = [part for part in needed if not self.has(part)]
        if missing:
            raise TaskError(
                f"{name} lacks {' and '.join(f'{part}()' for part in missing)}",
                where=_place(user),
                hint="a task has model(), dataset() and loss(model, batch)"
                + task_parts.close_to(missing, user),
            )
        for (
            part
        ) in task_parts.ALWAYS:  # What is wrong with one is said now, not when it is first used.
            self.has(part)
        has_loss = not self.has_change and "loss" in needed
        self._loss_takes = _taken(_get(user, "loss")) if has_loss else ()
        """The names in `TOLD` that the task's loss takes."""

    def _needed(self) -> list[str]:
        needed = ["dataset"] if self.has_rows else ["model", "dataset"]
        needed += ["rows"] if self.has_rows else []
        return [*needed, *([] if self.has_change else ["loss"])]

    @property
    def user(self) -> Any:
        """The user's object."""
        return self._user

    def has(self, part: str) -> bool:
        """Whether the user's task has this part. Raises TaskError if it has none of the forms that
        the part may have.
        """
        given = self._part(part)
        if given is None:
            return False
        wrong, hint = task_parts.wrong_form(part, given, self._user)
        if wrong:
            raise TaskError(wrong, where=self.place(part), hint=hint)
        return True

    def unused(self) -> list[str]:
        """A sentence for each of the task's names that look like a part, and are none."""
        with calling("reading the names in the task", partial(_place, self._user)):
            return task_parts.unused(self._user)

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """The user's collate function; None: use torch's."""
        collate: Callable[[list[Any]], Any] | None = self._part("collate")
        return collate

    def _part(self, part: str) -> Any:
        """An attribute of the user's task; None: it has none."""
        return _get(self._user, self._names.get(part, part))

    def _call(self, part: str, *arguments: Any, **by_name: Any) -> Any:
        """What the part returns, or the part itself if it is data."""
        with calling(f"task.{part}", self.at(part)):
            given = getattr(self._user, part)
            return given(*arguments, **by_name) if callable(given) else given

    def _numbers(self, part: str, *arguments: Any) -> tuple[Any, npt.NDArray[Any]]:
        """What the user's part returns, as it is and as an array: it may be a tensor, an array or
        any iterable.
        """
        returned = self._call(part, *arguments)
        with calling(f"task.{part}", self.at(part)):
            if isinstance(returned, Tensor):
                return returned, returned.detach().cpu().numpy()
            if isinstance(returned, np.ndarray):
                return returned, returned
            return returned, np.array(list(returned))

    def _need(self, part: str, of: str, key: str, hint: str) -> None:
        """Raises TaskError if the task lacks a part that the job file requires."""
        if not self.has(part):
            raise TaskError(
                f"the job file has {key}, but the task has no {part}",
                where=self.place(of),
                hint=f"write one that returns {hint}",
            )

    def place(self, part: str) -> str | None:
        """file:line of the user's `part`; None if Python does not know."""
        name = self._names.get(part, part)
        given = _get(self._user, name)
        if given is None or inspect.isroutine(given) or isinstance(given, type):
            return _place(given)
        return task_parts.line_of(name, self._user) or _place(self._user) or _place(given)

    def at(self, part: str) -> Place:
        """`place`, evaluated only when it is needed: it takes milliseconds."""
        return partial(self.place, part)

    def model(self) -> nn.Module:
        if self.has_rows and not self.has("model"):
            return nn.Module()
        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise self._wrong("model", model, "a torch.nn.Module")
        return model

    def dataset(self) -> Any:
        dataset = self._call("dataset")
        if is_stream(dataset):
            return dataset
        if not _is_map_style(dataset):
            raise self._wrong(
                "dataset",
                dataset,
                "a map-style dataset with __len__ and __getitem__, or a stream with __iter__",
                hint="a generator is neither: return an object whose __iter__ is the generator"
                if hasattr(dataset, "__next__")
                else None,
            )
        with calling("len(task.dataset())", self.at("dataset")):
            size = len(dataset)
        if size == 0:
            raise TaskError("task.dataset() has no samples", where=self.place("dataset"))
        return dataset

    def sampler(self, dataset: Any, epoch: int, seed: int) -> npt.NDArray[np.int64]:
        """The indices of an epoch's samples in their order: at least one. seed: for the generator
        of a torch Sampler.
        """
        if not callable(given := self._part("sampler")):
            with calling("task.sampler", self.at("sampler")):
                if isinstance(own := getattr(given, "generator", None), torch.Generator):
                    own.manual_seed(seed)
                if callable(set_epoch := getattr(given, "set_epoch", None)):
                    set_epoch(epoch)
        returned, rows = self._numbers("sampler", dataset, epoch)
        for order in (given, returned):
            self._refuse_one_ranks(order)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
            raise self._wrong("sampler", returned, "the numbers of samples, at least one")
        return self._below("sampler", rows, len(dataset), "the dataset has {} samples")

    def _refuse_one_ranks(self, order: object) -> None:
        """Raises TaskError for a sampler such as torch's DistributedSampler, which has the samples
        of one process among several.
        """
        ranks = getattr(order, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            raise TaskError(
                f"task.sampler has the samples of one process of {ranks}, as "
                f"{type(order).__name__} does; the others would never be trained on",
                where=self.place("sampler"),
                hint="dlctl shuffles the samples and deals them to the workers: remove it, or "
                "return the order of all samples, for example RandomSampler(dataset)",
            )

    def _below(
        self, part: str, numbers: npt.NDArray[Any], limit: int, what: str
    ) -> npt.NDArray[np.int64]:
        """The numbers as int64. Raises TaskError unless 0 <= number < limit for all."""
        if wrong := numbers[(numbers < 0) | (numbers >= limit)].tolist():
            raise TaskError(
                f"task.{part} returned the number {wrong[0]}; {what.format(limit)}",
                where=self.place(part),
                hint=f"numbers are 0 to {limit - 1}",
            )
        return numbers.astype(np.int64)

    def sample_weights(self, dataset: Any) -> npt.NDArray[np.float64]:
        """One for each sample, >= 0; their sum is positive and finite."""
        returned, weights = self._numbers("sample_weights", dataset)
        size, is_right = len(dataset), False
        if weights.shape == (size,) and weights.dtype.kind in "iuf":
            weights = weights.astype(np.float64)
            is_right = bool((weights >= 0).all()) and 0 < weights.sum() < np.inf
        if not is_right:
            wanted = f"{size} numbers, one for each sample, 0 or more and not all of them 0"
            raise self._wrong("sample_weights", returned, wanted)
        return weights

    def clients(self, dataset: Any, count: int) -> npt.NDArray[np.int64]:
        """int64[samples], the client of each sample: 0 <= n < count."""
        key, hint = 'partition = "task"', "a number for each sample, or another partition"
        self._need("clients", "dataset", key, hint)
        returned, owners = self._numbers("clients", dataset)
        if owners.shape != (len(dataset),) or owners.dtype.kind not in "iu":
            raise self._wrong("clients", returned, "one whole number for each sample")
        return self._below("clients", owners, count, "data.clients is {}")

    def client_sizes(self, count: int) -> npt.NDArray[np.int64]:
        """int64[count], at least 1 each."""
        key, hint = 'partition = "workers"', "the number of samples of each client"
        self._need("client_sizes", "dataset", key, hint)
        returned, sizes = self._numbers("client_sizes")
        if sizes.shape != (count,) or sizes.dtype.kind not in "iu" or sizes.min() < 1:
            expected = f"{count} whole numbers of 1 or more, one for each of data.clients"
            raise self._wrong("client_sizes", returned, expected)
        return sizes.astype(np.int64)

    def client_dataset(self, client: int, size: int) -> Any:
        """What the task's dataset(client) returns; size: its length by `client_sizes`."""
        with calling(f"task.dataset({client})", self.at("dataset")):
            dataset = self._user.dataset(client)
            samples = len(dataset)
        if samples != size:
            raise TaskError(
                f"task.dataset({client}) has {samples} samples, but client_sizes() returned {size}",
                where=self.place("dataset"),
                hint="client_sizes() must return the true sizes, the same in every worker",
            )
        return dataset

    def tables(self) -> dict[str, tuple[int, int, Any]]:
        """What the user's `tables` returns; {} if there is none."""
        if not self.has_rows:
            return {}
        tables = self._call("tables")
        with calling("task.tables", self.at("tables")):
            return dict(tables)

    def rows(self, batch: Any) -> dict[str, Tensor]:
        """What the user's `rows` returns for a batch."""
        with calling("task.rows", self.at("rows")):
            return dict(self._user.rows(batch))

    def change(
        self, model: nn.Module, batch: Any, rows: dict[str, Tensor], lr: float
    ) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
        """The loss, what is added to the rows, and other numbers."""
        with calling("task.change", self.at("change")), torch.no_grad():
            returned = self._user.change(model, batch, rows, lr)
            if type(returned) is not tuple or len(returned) not in (2, 3):
                wanted = "(loss, changes) or (loss, changes, dict of numbers)"
                raise self._wrong("change", returned, wanted)
            loss, changes, metrics = (*returned, {})[:3]
            for name, change in changes.items():
                if name not in rows or change.shape != rows[name].shape:
                    raise self._wrong("change", change, "shaped as its rows", item=f'["{name}"]')
        self._check_metrics("change", metrics)
        return number_of(loss), changes, {n: number_of(value) for n, value in metrics.items()}

    def loss(
        self,
        model: nn.Module,
        batch: Any,
        step: int = 0,
        epoch: int = 0,
        rows: dict[str, Tensor] | None = None,
    ) -> LossResult:
        """step: the number of steps that this worker has made before. epoch: of the data. rows:
        those that the batch has named."""
        values = {"step": step, "epoch": epoch, "rows": rows} if self._loss_takes else {}
        taken = {name: values[name] for name in self._loss_takes}
        returned = self._call("loss", model, batch, **taken)
        loss, metrics, weight = returned, dict[str, Any](), None
        if type(returned) is tuple and len(returned) in (2, 3):
            loss, metrics, weight = (*returned, None)[:3]
            self._check_metrics("loss", metrics)
        self._check_weight(weight)
        if not isinstance(loss, Tensor):
            raise self._wrong("loss", loss, "a torch.Tensor", hint=_LOSS_RETURNS)
        if loss.ndim != 0 or not loss.is_floating_point():
            raise self._wrong("loss", loss, "one real number", hint="take the mean over the batch")
        if not loss.requires_grad:
            raise TaskError(
                "task.loss returned a tensor without a gradient",
                where=self.place("loss"),
                hint="no detach(), item() or no_grad() between the model's output and the loss",
            )
        return LossResult(loss, metrics, weight)

    def _check_weight(self, weight: Any) -> None:
        """Raises TaskError. It copies nothing from a device: `in_numbers` checks the value."""
        if weight is not None and not _is_number(weight):
            raise self._wrong("loss", weight, "a weight, one number", item="[2]")
        if weight is not None and self.has_rows:
            raise TaskError(
                "task.loss returned a weight, but rows step along the sum over a batch's samples",
                where=self.place("loss"),
                hint="return (loss, metrics)",
            )
        if self._weighs is None:
            self._weighs = weight is not None
        if self._weighs != (weight is not None):
            raise TaskError(
                "task.loss returned a weight for one batch, and none for another",
                where=self.place("loss"),
                hint="return (loss, metrics, weight) for every batch, or for none",
            )

    def stages(self, model: nn.Module) -> list[list[str]]:
        """The names of the modules of each stage."""
        returned = self._call("stages", model)
        with calling("task.stages", self.at("stages")):
            stages = [list(stage) for stage in returned]
        if not all(isinstance(name, str) for stage in stages for name in stage) or any(
            isinstance(stage, str) for stage in returned
        ):
            raise self._wrong("stages", returned, "a list of names of modules for each stage")
        return stages

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        hint = '{"blocks.*.hidden": "colwise", "blocks.*.out": "rowwise"} for a model with such '
        hint += "modules, or parallelize(model, mesh)"
        self._need("tensor_plan", "model", "replica.tensor", hint)
        plan = self._call("tensor_plan", model)
        if not isinstance(plan, dict) or not plan or not all(isinstance(key, str) for key in plan):
            raise self._wrong("tensor_plan", plan, "a dict of names of modules and styles")
        return plan

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        self._call("parallelize", model, mesh)

    def evaluate(self, model: nn.Module, rows: ReadRows | None = None) -> dict[str, float]:
        """The task's metrics, at most `METRICS_MAX`."""
        metrics = self._call("evaluate", model, **self._with_rows("evaluate", 1, rows))
        self._check_metrics("evaluate", metrics)
        return {key: number_of(value) for key, value in metrics.items()}

    def finish(
        self, model: nn.Module, metrics: dict[str, float], rows: ReadRows | None = None
    ) -> str:
        """Call the task's `finish`; returns its text, "" for None."""
        text = self._call("finish", model, metrics, **self._with_rows("finish", 2, rows))
        if text is not None and not isinstance(text, str):
            raise self._wrong("finish", text, "text or None")
        return text or ""

    def _with_rows(self, part: str, behind: int, rows: ReadRows | None) -> dict[str, Any]:
        """The keyword arguments of the user's `part` behind so many positional ones."""
        takes = rows is not None and "rows" in _taken(_get(self._user, part), behind)
        return {"rows": rows} if takes else {}

    def _check_metrics(self, part: str, metrics: Any) -> None:
        """Raises TaskError. It copies nothing from a device."""
        if not isinstance(metrics, dict) or not all(isinstance(key, str) for key in metrics):
            hint = _LOSS_RETURNS if part == "loss" else None
            raise self._wrong(part, metrics, "a dict of names and numbers", hint=hint)
        if len(metrics) > METRICS_MAX:
            raise TaskError(
                f"task.{part} returned {len(metrics)} metrics; at most {METRICS_MAX} can be stored",
                where=self.place(part),
                hint="return averages over classes or layers",
            )
        longest = max(metrics, key=len, default="")
        if len(longest) > METRIC_NAME_CHARS_MAX:
            raise TaskError(
                f'task.{part} returned a name of {len(longest)} characters, "{longest[:20]}..."; '
                f"at most {METRIC_NAME_CHARS_MAX} are allowed",
                where=self.place(part),
            )
        for key, value in metrics.items():
            if not _is_number(value):
                raise self._wrong(part, value, "a number up to 1.8e308", item=f'["{key}"]')

    def _wrong(
        self, part: str, value: object, wanted: str, *, item: str = "", hint: str | None = None
    ) -> TaskError:
        does = "returned" if callable(self._part(part)) else "is"
        text = f"task.{part}{item} {does} {_describe(value)}, not {wanted}"
        return TaskError(text, where=self.place(part), hint=hint)


# ---------------------------------------------------------------- loading


def load_task(spec: str, directory: Path, run: Path | None = None) -> Task:
    """The task that "train.py:task" names, as `load_user`. Raises TaskError."""
    return Task(*load_user(spec, directory, run))


def load_user(spec: str, directory: Path, run: Path | None = None) -> tuple[Any, str]:
    """The user's object, and how messages call it, of the task that "train.py:task" names: a path
    relative to `directory`, and a name in that file.
    run: directory of a run, whose stored copy of the task's files is used.

    The name may stand for an instance, a class (made without arguments) or a module; without a name
    the file itself is the task. Its directory is first on sys.path, as with `python train.py`.
    Raises TaskError.
    """
    file, _, attribute = spec.partition(":")
    path = (directory / file).resolve()
    module = _import(path, directory.resolve(), run)
    if not attribute:
        return module, file
    try:
        user = attrgetter(attribute)(module)
    except AttributeError:
        raise TaskError(
            f'{file} has no "{attribute}"', where=str(path), hint=_meant(attribute, module)
        ) from None
    if isinstance(user, type):
        with calling(f"{attribute}()"):
            user = user()
    return user, f"the task {spec}"


def _import(path: Path, directory: Path, run: Path | None) -> ModuleType:
    is_kept = run is not None and task_code.as_it_was(run, path, None) is not None
    if not (path.is_file() or is_kept) or path.suffix != ".py":
        raise TaskError(
            f"there is no Python file {path.name}",
            where=str(path),
            hint='job.task is a path beside the job file and a name in it: "train.py:task"',
        )
    for folder in dict.fromkeys((str(directory), str(path.parent))):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    # With the plain name, unless it is taken, the loader processes can import the file as well.
    taken = getattr(sys.modules.get(path.stem), "__file__", str(path)) != str(path)
    name = f"dlctl_task_{path.stem}" if taken else path.stem
    loader = None
    if run is not None:
        import_kept(run, path.parent)
        loader = KeptSource(run, name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with calling(f"importing {path.name}"):
            spec.loader.exec_module(module)
    except TaskError:
        del sys.modules[name]
        raise
    return module


def _meant(attribute: str, module: ModuleType) -> str:
    if close := closest(attribute, vars(module)):
        return f'did you mean "{close}"?'
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    return f"it has {', '.join(own[:NAMES_MAX])}" if own else "the file defines nothing"


# ---------------------------------------------------------------- guarding


Place = str | Callable[[], str | None] | None
"""file:line of what was called, or a function that returns it; None: unknown."""


class calling:  # noqa: N801  it reads like a function, and is a class because that is faster
    """Turn any exception that the user's code raises inside into a TaskError: "`what` raised ...".

    place: the user's code to name if the error was raised by a library that got something wrong
    from it. A TaskError passes through unchanged, so the innermost call is named.
    """

    __slots__ = ("place", "what")

    def __init__(self, what: str, place: Place = None) -> None:
        self.what, self.place = what, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is not None and not isinstance(error, TaskError | KeyboardInterrupt):
            raise blame(self.what, error, self.place) from error


def blame(what: str, error: BaseException, place: Place = None) -> TaskError:
    """The TaskError for an error of the user's code."""
    report = traceback.TracebackException.from_exception(error)
    _cut(report)
    text = (error.msg if isinstance(error, SyntaxError) else str(report)) or "(it gives no reason)"
    where = _where(error, report.stack, place)
    failed = TaskError(
        plain(f"{what} raised {type(error).__name__}: {text}", MESSAGE_CHARS_MAX),
        where=where,
        hint=_hint(error, where),
    )
    failed.call = what
    # The end of a long traceback is more useful than its beginning.
    failed.detail = plain("".join(report.format())[-DETAIL_CHARS_MAX:], DETAIL_CHARS_MAX)
    return failed


def _cut(report: traceback.TracebackException | None) -> None:
    """Remove the frames of dlctl, torch and the import system, unless there are no others.

    An error of the import system itself is about a file (unreadable, or not Python) and names that
    file: it needs no frames at all.
    """
    while report is not None:
        kept = without_machinery(report.stack)
        if not kept and not any(frame.filename.startswith(_IMPORTS) for frame in report.stack):
            kept = report.stack
        report.stack = kept
        _cut(report.__cause__)
        report = report.__context__


_IMPORTS = "<frozen "
_MACHINERY = (
    _IMPORTS,
    *(
        f"{Path(file).parent}/"
        for file in (Path(__file__).parents[1], dlctl.__file__, torch.__file__)
        if file
    ),
)
_LIBRARIES = tuple(
    f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def without_machinery(stack: traceback.StackSummary) -> traceback.StackSummary:
    return traceback.StackSummary.from_list(
        [frame for frame in stack if not frame.filename.startswith(_MACHINERY)]
    )


def _where(error: BaseException, stack: traceback.StackSummary, place: Place) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return (
        user_line(stack) or (place() if callable(place) else place) or _line_of(stack, _MACHINERY)
    )


def whereabouts(thread: threading.Thread) -> tuple[str, str]:
    """Where a hanging task is, by its thread: (file:line of the innermost frame of the user's code,
    all frames that are not dlctl's).
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "an unknown place: its thread has ended", ""
    whole = traceback.StackSummary.extract(traceback.walk_stack(frame))
    whole.reverse()
    stack = without_machinery(whole) or whole
    place = user_line(stack) or _line_of(stack, _MACHINERY)
    return place or "an unknown place", "".join(stack.format())


def user_line(stack: traceback.StackSummary) -> str | None:
    """file:line of the innermost frame of the user's code, which is last; None: there is none."""
    return _line_of(stack, _MACHINERY + _LIBRARIES)


def _line_of(stack: traceback.StackSummary, beyond: tuple[str, ...]) -> str | None:
    """file:line of the innermost frame in a file that is in none of these directories."""
    for frame in reversed(stack):
        if not frame.filename.startswith(beyond):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _hint(error: BaseException, where: str | None) -> str | None:
    if isinstance(error, ModuleNotFoundError) and error.name:
        near = _near(error.name, where)
        return near or f'install what provides "{error.name}" for {sys.executable}'
    if isinstance(error, ImportError) and "no known parent package" in text_of(error):
        return 'the task\'s file is in no package: write "import x" in place of "from . import x"'
    if is_for_want_of_memory(error):
        return "try fewer workers on this device"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "remove compile from [gradient]: torch cannot compile this model here"
    return None


def _near(name: str, where: str | None) -> str:
    """How to import a module that lies near the file that imports it, but where Python does not
    search; "" if there is none. where: file:line.
    """
    package = name.partition(".")[0]
    folders = Path((where or "").rpartition(":")[0]).parents
    for folder in folders[:FOLDERS]:
        inside = folder / package
        is_here = inside.with_suffix(".py").is_file() or any(inside.glob("*.py"))
        if not is_here or str(folder) in sys.path:
            continue
        if any((folder / file).is_file() for file in ("pyproject.toml", "setup.py")):
            how = f"{sys.executable} -m pip install -e {folder}"
        else:
            how = f"`import sys; sys.path.insert(0, {str(folder)!r})` before that import"
        return f'"{package}" is in {folder}, where Python does not search: {how}'
    return ""


def is_for_want_of_memory(error: BaseException | None) -> bool:
    """Whether an error is an out-of-memory error, or a TaskError caused by one."""
    if isinstance(error, TaskError):
        error = error.__cause__
    if isinstance(error, RuntimeError) and CPU_ALLOCATOR in text_of(error):
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def text_of(error: BaseException) -> str:
    """The text of an error, also if its `__str__` fails."""
    return str(traceback.TracebackException.from_exception(error))


def plain(text: str, chars_max: int) -> str:
    """The text in a form that UTF-8 can always encode, cut to `chars_max`."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


# ---------------------------------------------------------------- describing


def is_stream(dataset: object) -> bool:
    """Whether its samples have no index. An IterableDataset may have a length all the same. An
    object that is its own iterator is none: it can be read only once, and a run may restart it.
    """
    if isinstance(dataset, IterableDataset):
        return True
    opens = callable(getattr(dataset, "shards", None)) and callable(getattr(dataset, "open", None))
    again = hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__")
    return (opens or again) and not hasattr(dataset, "__len__")


def _is_map_style(dataset: object) -> bool:
    """A torch Dataset without its own `__getitem__` inherits one that only raises."""
    inherited = getattr(type(dataset), "__getitem__", None) is Dataset.__getitem__
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not inherited


def _name_of(part: str, user: object) -> str:
    """The name under which the task has a part: its own or torch's. Raises TaskError for both."""
    second = task_parts.SECOND_NAMES[part]
    own, torchs = _get(user, part), _get(user, second)
    # Each access to a method makes another object.
    if torchs is None or getattr(own, "__func__", own) is getattr(torchs, "__func__", torchs):
        return part
    if own is not None:
        raise TaskError(
            f"the task has both {part} and {second}, which are names of one part",
            where=_place(torchs) or _place(user),
            hint="keep one of them",
        )
    return second


def _get(user: object, name: str) -> Any:
    with calling(f"task.{name}"):
        return getattr(user, name, None)


def _place(thing: object) -> str | None:
    """file:line where a function, method, class or an instance's class is defined."""
    if isinstance(thing, ModuleType):
        return getattr(thing, "__file__", None)
    named = thing if inspect.isroutine(thing) or isinstance(thing, type) else type(thing)
    try:
        file = inspect.getsourcefile(inspect.unwrap(named))
        line = inspect.getsourcelines(named)[1]
    except (TypeError, OSError, ValueError):
        return None
    return f"{file}:{line}"


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        shape = ", ".join(map(str, value.shape))
        return f"a {dtype_name(value)} tensor of shape [{shape}]"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _taken(function: Callable[..., Any], behind_them: int = 2) -> tuple[str, ...]:
    """The names in `TOLD` among a function's parameters behind the first ones: for a loss, model
    and batch.
    """
    try:
        behind = list(inspect.signature(function).parameters.values())[behind_them:]
    except (TypeError, ValueError):  # not every callable has a signature
        return ()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in behind if p.name in TOLD and p.kind in by_name)


def _is_number(value: object) -> bool:
    """Whether a value is one that `number_of` accepts."""
    if isinstance(value, Tensor) and not value.is_cpu:  # It may not be computed yet.
        return value.numel() == 1 and not value.is_complex()
    try:
        number_of(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def number_of(value: Any) -> float:
    """The float of a Python or numpy number, or of a tensor or array of one element. Raises for
    anything else, and for a number that is too large for a float.
    """
    number = value if isinstance(value, numbers.Real) else value.item()
    if not isinstance(number, numbers.Real):
        raise TypeError(f"{type(value).__name__} is no number")
    return float(number)
