"""`[job] weights`: initial values from .safetensors files, by the names of a state_dict.

All names and shapes are compared before the first value is read, so that one error lists every
mismatch. A tied tensor must be present under one of its names.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from daemons.worker.task.user_task import calling
from dlctl.errors import DlctlError
from dlctl.runs import tensorfile
from dlctl.stores import addresses, fetching
from dlctl.util import regular

log = logging.getLogger("dlctl")

SUFFIX = fetching.WEIGHTS
FOLDER = "weights"
"""In the run's directory on each host."""
SHOWN_MAX = 10
"""Names of each kind in an error."""


def place(named: str, run: Path | None) -> Path:
    """Where the weights are on this host: what is at an address is downloaded once, for all
    workers of the run. run: the run's directory here; None: of no run. Raises DlctlError.
    """
    if not addresses.is_like(named):
        return Path(named)
    if run is not None:
        return fetching.fetched_into(named, run / FOLDER, SUFFIX)
    folder = tempfile.mkdtemp(prefix="dlctl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fetching.fetched_into(named, Path(folder), SUFFIX)


def load(model: nn.Module, place: Path, *, strict: bool, warns: bool = True) -> None:
    """Load the values of a file, or of all files in a directory, into a model.

    strict: raise DlctlError, which lists all names that are missing, unexpected or of another
    shape; otherwise log a warning, if this process `warns`. Raises DlctlError for an unreadable
    file.
    """
    shapes = {path: _shapes(path) for path in _files(place)}
    _check_once(shapes)
    with calling("model.state_dict()"):
        state = model.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    given = {name: shape for of_file in shapes.values() for name, shape in of_file.items()}
    unfit, faults = _compare(tensors, given)
    if faults:
        what, where = f"the weights do not fit the model: {faults}", str(place)
        if strict:
            hint = "strict = false in [job] loads those that fit"
            raise DlctlError(what, where=where, hint=hint)
        if not any(of_file.keys() - unfit for of_file in shapes.values()):
            raise DlctlError(what, where=where, hint="none fits: use the names of a state_dict")
        if warns:
            log.warning("%s (%s)", what, where)
    for path, of_file in shapes.items():
        with _opened(path) as file:
            values = {name: file.get_tensor(name) for name in sorted(of_file.keys() - unfit)}
        with calling("model.load_state_dict()"):
            model.load_state_dict(values, strict=False)


def _files(place: Path) -> list[Path]:
    if not place.exists():
        raise DlctlError(
            "the weights are not on this host",
            where=str(place),
            hint="job.weights must be at the same full path there; it is not copied with the task",
        )
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not files:
        raise DlctlError(f"there are no {SUFFIX} files", where=str(place))
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises DlctlError."""
    try:
        with regular.opened(path) as source, safe_open(regular.name_of(source), "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        words = f"cannot read the weights: {tensorfile.why(error, path)}"
        raise DlctlError(words, where=str(path)) from error


def _shapes(path: Path) -> dict[str, list[int]]:
    with _opened(path) as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _check_once(shapes: dict[Path, dict[str, list[int]]]) -> None:
    owner: dict[str, Path] = {}
    for path, names in shapes.items():
        for name in names:
            if (other := owner.setdefault(name, path)) is not path:
                words = f'"{name:.200}" is in {other.name} and in {path.name}'
                raise DlctlError(f"the weights are ambiguous: {words}", where=str(path.parent))


def _compare(tensors: dict[str, Tensor], shapes: dict[str, list[int]]) -> tuple[set[str], str]:
    """The names in the files that do not fit, and all faults in words; "": there are none."""
    present = {id(tensors[name]) for name in shapes if name in tensors}
    missing: dict[int, str] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in present:
            missing.setdefault(id(tensor), name)
    unexpected = [name for name in shapes if name not in tensors]
    wrong = {
        name: f"{name} {shapes[name]}, and not {[*tensor.shape]}"
        for name, tensor in tensors.items()
        if name in shapes and not is_lazy(tensor) and [*tensor.shape] != shapes[name]
    }
    kinds = {
        "missing": [*missing.values()],
        "not in the model": unexpected,
        "of another shape": [*wrong.values()],
    }
    words = (f"{kind}: {_shown(names)}" for kind, names in kinds.items() if names)
    return {*unexpected, *wrong}, "; ".join(words)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(name[:200] for name in names[:SHOWN_MAX]) + more
