"""A checkpoint as a plain state_dict: `python -m daemons.files.export DIR ...`.

Every tensor gets its name, shape and dtype of the user's model, tied ones under all their names, so
that `model.load_state_dict(...)` accepts it:

    safetensors   safetensors.torch.load_file(FILE); tied tensors are separate copies there
    torch         torch.load(FILE), weights_only=True (the default); tied ones share memory

Every byte of the checkpoint is verified first; for FILE see `dlctl.util.outfile`.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from daemons.imports import without_collections
from daemons.process import print_error
from dlctl.errors import DlctlError
from dlctl.model import frozen
from dlctl.model.flat import AVERAGED, ROWS, TRAINED, TensorEntry
from dlctl.records.manifest import Manifest, layout
from dlctl.runs import checkpoints, tensorfile
from dlctl.shards.rows import KIND as TABLE
from dlctl.util import outfile, regular
from dlctl.util.names import AVERAGE
from dlctl.util.outfile import BROKEN_PIPE_EXIT_CODE
from dlctl.util.text import plural

if TYPE_CHECKING:
    from torch import Tensor

StateDict = dict[str, "Tensor"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error is one line of JSON on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m daemons.files.export", description="Turn a checkpoint into a state_dict."
    )
    parser.add_argument("checkpoint", type=Path, help="directory with a manifest.json")
    parser.add_argument("--to", choices=sorted(WRITERS), default="safetensors")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--average", action="store_true")
    chosen = parser.parse_args(arguments)
    try:
        export(chosen.checkpoint, chosen.output, chosen.to, of_average=chosen.average)
    except DlctlError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:
        return BROKEN_PIPE_EXIT_CODE
    return 0


def export(directory: Path, output: Path, to: str, *, of_average: bool = False) -> None:
    """Write the checkpoint in `directory` to the file `output`, replacing an existing file.

    of_average: the moving average of the parameters instead of the parameters. Raises DlctlError,
    with `output` untouched, if the checkpoint is damaged or has no average, torch is missing or the
    file cannot be written; also as `outfile.writing`.
    """
    outfile.check(output)
    problems = checkpoints.verify(directory)
    if problems:
        more = f" (and {plural(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        raise DlctlError(
            f"the checkpoint is not good: {problems[0]}{more}",
            where=str(directory),
            hint="dlctl checkpoint ls shows the others",
        )
    manifest = checkpoints.read_manifest(directory)
    if of_average and AVERAGE not in checkpoints.slots(directory, manifest):
        raise DlctlError(
            "the checkpoint has no moving average",
            where=str(directory),
            hint="it has one if the job file has [average] with ema = 0.999",
        )
    of = checkpoints.SLOT + AVERAGE if of_average else "w"
    tensors = state_dict(directory, manifest, of)
    with outfile.writing(output) as file:
        WRITERS[to](tensors, file)


def state_dict(directory: Path, manifest: Manifest, of: str = "w") -> StateDict:
    """name -> tensor, in the model's own shapes and dtypes; tied names share one tensor. Includes
    the task's tables of rows, by their names. of: the shards' vector with the parameters.

    Raises DlctlError if a file is truncated or torch is not installed.
    """
    torch = _torch()
    model = layout(manifest)
    vectors = {
        TRAINED: checkpoints.read_slice(directory, manifest, of, 0, manifest["size"]),
        AVERAGED: checkpoints.read_averaged(directory, manifest),
    }
    if rows := model.size(ROWS):
        vectors[ROWS] = checkpoints.read_table(directory, manifest, TABLE, rows, 0, rows)
    tensors: StateDict = {}
    for kind, vector in vectors.items():
        if vector.size != model.size(kind):
            raise DlctlError(
                f"the layout has {model.size(kind)} {kind} elements, the checkpoint {vector.size}",
                where=str(directory),
            )
        values = torch.from_numpy(vector)
        for entry, lo, hi in model.slices(kind):
            tensor = _cast(torch, values[lo:hi], entry, directory)
            tensors.update(dict.fromkeys((entry.name, *entry.aliases), tensor))
    for entry, tensor in _frozen(directory, manifest):
        tensors.update(dict.fromkeys((entry.name, *entry.aliases), tensor))
    names = (name for entry in model.entries for name in (entry.name, *entry.aliases))
    return {name: tensors[name] for name in names}


def _frozen(directory: Path, manifest: Manifest) -> Iterator[tuple[TensorEntry, Tensor]]:
    """The frozen tensors, bitwise unchanged."""
    path = checkpoints.frozen_file(directory, manifest)
    if path is None:
        return
    try:
        with regular.opened(path) as source, safe_open(regular.name_of(source), "pt") as file:
            for entry in frozen.entries(layout(manifest)):
                yield entry, file.get_tensor(entry.name)
    except (SafetensorError, OSError) as error:
        words = f"cannot read the frozen parameters: {tensorfile.why(error, path)}"
        raise DlctlError(words, where=str(path)) from error


def _cast(torch: Any, values: Tensor, entry: TensorEntry, directory: Path) -> Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DlctlError(
            f'"{entry.name}" is {entry.dtype}, a dtype that this torch does not have',
            where=str(directory),
            hint="pip install --upgrade torch",
        )
    if not dtype.is_floating_point:
        values = values.round()
    return values.to(dtype, copy=True).view(entry.shape)


def _torch() -> Any:
    try:
        with without_collections():
            import torch
    except ImportError as error:
        raise DlctlError(
            f"an export needs torch: {error}", hint="pip install 'dlctl[torch]'"
        ) from error
    return torch


# ---------------------------------------------------------------- formats


def _write_safetensors(tensors: StateDict, file: IO[bytes]) -> None:
    from safetensors.torch import save, save_file

    # The format refuses tensors that share memory, and a reader looks for every name.
    times = Counter(map(id, tensors.values()))
    separate = {n: t.clone() if times[id(t)] > 1 else t for n, t in tensors.items()}
    metadata = {"format": "pt"}
    try:
        if outfile.is_open_stream(file):
            file.write(save(separate, metadata))
            return
        # `save` needs memory for two more copies of the model.
        save_file(separate, file.name, metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error
    with open(file.name, "rb") as written:  # A new file that has replaced it, with mode 0600.
        os.fchmod(written.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        os.fsync(written.fileno())


def _write_torch(tensors: StateDict, file: IO[bytes]) -> None:
    content = io.BytesIO()  # On a full disk torch fails with an assertion of its own.
    _torch().save(tensors, content)
    file.write(content.getbuffer())


WRITERS: dict[str, Callable[[StateDict, IO[bytes]], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}


if __name__ == "__main__":
    sys.exit(main())
