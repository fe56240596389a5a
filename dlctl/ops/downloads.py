"""Checkpoints at addresses, brought to this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dlctl.errors import DlctlError, os_errors_as
from dlctl.records import manifest
from dlctl.runs.paths import PRIVATE
from dlctl.stores import checkpoint_store
from dlctl.stores.checkpoint_store import CheckpointStore, Contents
from dlctl.stores.objects import StoreError
from dlctl.util import notes, values


@contextmanager
def downloaded(source: str, parent: Path) -> Iterator[Path]:
    """A copy in `parent` of the checkpoint at an address, or of the newest good one there, which is
    removed when the block ends. Damaged ones are passed over with a warning. Raises DlctlError,
    also if none is good.
    """
    store, contents, names = checkpoint_store.chosen(source)
    for name, why in contents.unreadable.items():
        notes.warn(f"{store.address}/{name}: {why}")
    with os_errors_as("cannot download a checkpoint", parent):
        made = not parent.exists()
        parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".download-", dir=parent))
    try:
        yield _first_good(store, contents, names, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made:
            with suppress(OSError):  # It is not empty.
                parent.rmdir()


def _first_good(
    store: CheckpointStore, contents: Contents, names: Sequence[str], folder: Path
) -> Path:
    damage: list[str] = []
    for name in names:
        if missing := contents.missing(name):
            damage += [f"{store.address}/{problem}" for problem in missing]
            continue
        made = contents.manifests[name]
        size = values.size(sum(part["nbytes"] for part in manifest.parts(made)))
        notes.note(f"downloading {store.address}/{name} ({size})")
        try:
            found = store.download(name, made, folder)
        except StoreError:
            raise
        except DlctlError as error:
            damage.append(f"{error.where}: {error.message}")
            shutil.rmtree(folder / name, ignore_errors=True)
            continue
        for problem in damage:
            notes.warn(problem)
        return found
    what = "\n  ".join([f"no checkpoint at {store.address} is good", *damage])
    raise DlctlError(what, hint=f"dlctl checkpoint verify {store.address}")
