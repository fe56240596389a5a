"""file://: objects as files in a directory, as of a network file system."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlctl.stores import layout
from dlctl.stores.addresses import Address
from dlctl.stores.objects import PIECE_BYTES, Cause, NoObject, Progress, StoreError
from dlctl.util import regular
from dlctl.util.fsync import replacing, sync_directory

TEMPORARY = ".tmp"
CAUSES: dict[type[OSError], Cause] = {PermissionError: "denied", TimeoutError: "unreachable"}


def opened(address: Address) -> Folder:
    return Folder(Path(address.key), str(address))


class Folder:
    def __init__(self, root: Path, address: str = "") -> None:
        self.root = root
        self.address = address or str(root)

    def sizes(self, below: str = "") -> dict[str, int]:
        top, found = self.root / below, dict[str, int]()
        with self._errors():
            self._require_root()
            for folder, _, files in os.walk(top, onerror=_raised):
                for name in files:
                    path = Path(folder, name)
                    if not name.endswith(TEMPORARY):
                        found[path.relative_to(self.root).as_posix()] = path.lstat().st_size
        return found

    def _require_root(self) -> None:
        """A mount that is gone is no empty store: the directory above must be there."""
        if not self.root.parent.is_dir():
            what = f"there is no directory {self.root.parent}"
            raise StoreError(what, "missing", where=self.address, hint="make it, or mount it")

    def size(self, name: str) -> int | None:
        with self._errors():
            self._require_root()
            path = self.root / name
            return path.stat().st_size if path.is_file() else None

    def read(self, name: str) -> bytes:
        return b"".join(self.pieces(name))

    def pieces(self, name: str) -> Iterator[bytes]:
        with self._errors(name), regular.opened(self.root / name) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def put(self, name: str, path: Path, progress: Progress) -> None:
        with regular.opened(path) as source, self._errors(), replacing(self._ready(name)) as file:
            while piece := source.read(PIECE_BYTES):
                file.write(piece)
                progress(len(piece))

    def create(self, name: str, data: bytes) -> bool:
        """A link fails if its name exists, also on a network file system."""
        with self._errors():
            path = self._ready(name)
            ours = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
            with replacing(ours) as file:
                file.write(data)
            try:
                path.hardlink_to(ours)
            except FileExistsError:
                return False
            finally:
                ours.unlink()
            sync_directory(path.parent)
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._errors(), replacing(self._ready(name)) as file:
            file.write(data)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.root / name
            with self._errors():
                path.unlink(missing_ok=True)
            while (path := path.parent) not in (self.root, self.root.parent):
                with suppress(OSError):  # It is not empty.
                    path.rmdir()

    def sweep(self) -> None:
        with self._errors():
            left = [*self.root.glob(f".{layout.OWNER}.*{TEMPORARY}")]
            for folder in self.root.iterdir() if self.root.is_dir() else ():
                if layout.NAME.fullmatch(folder.name) and not folder.is_symlink():
                    left += folder.glob(f".*{TEMPORARY}")
            for path in left:
                path.unlink(missing_ok=True)

    def _ready(self, name: str) -> Path:
        """The path of an object whose folder exists."""
        self._require_root()
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if not name:
                raise self._error(error) from error
            raise NoObject("there is no such object", where=f"{self.address}/{name}") from error
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> StoreError:
        kinds = (cause for kind, cause in CAUSES.items() if isinstance(error, kind))
        return StoreError(str(error.strerror or error), next(kinds, "other"), where=self.address)


def _raised(error: OSError) -> None:
    """os.walk is silent about folders that cannot be read. An empty store has none."""
    if not isinstance(error, FileNotFoundError):
        raise error
