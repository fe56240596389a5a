"""Objects in any file system of fsspec, without its caches: another process writes, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlctl.stores.objects import PIECE_BYTES, Cause, NoObject, Progress, StoreError
from dlctl.util import regular
from dlctl.util.redact import redacted

WORDS_MAX = 300
Translate = Callable[[BaseException], StoreError | None]
"""What a scheme knows about an error, or one of its causes; None: nothing."""


class FsspecObjects:
    def __init__(
        self, address: str, root: str, filesystem: Any, translate: Translate,
        put_options: Callable[[int], Mapping[str, Any]] = lambda nbytes: {},
        sweep: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """root: the address as the file system takes it. put_options: for an upload of so many
        bytes. sweep: removes what interrupted uploads have left.
        """
        self.address = address
        self._root, self._fs, self._translate = root, filesystem, translate
        self._put_options, self._sweep = put_options, sweep

    def sizes(self, below: str = "") -> dict[str, int]:
        top = self._path(below) if below else self._root
        with self._errors():
            self._fs.invalidate_cache()
            found = self._fs.find(top, detail=True)
        skip = len(self._fs._strip_protocol(self._root)) + 1
        return {path[skip:]: int(info["size"]) for path, info in found.items() if path[skip:]}

    def size(self, name: str) -> int | None:
        with self._errors():
            self._fs.invalidate_cache()
            if not self._fs.isfile(self._path(name)):
                return None
            return int(self._fs.info(self._path(name))["size"])

    def read(self, name: str) -> bytes:
        with self._errors(name):
            found: bytes = self._fs.cat_file(self._path(name))
        return found

    def pieces(self, name: str) -> Iterator[bytes]:
        with self._errors(name), self._fs.open(self._path(name), block_size=PIECE_BYTES) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def put(self, name: str, path: Path, progress: Progress) -> None:
        with regular.opened(path) as file:
            nbytes = file.seek(0, 2)
        with self._errors():
            self._make_folder(name)
            self._fs.put_file(
                str(path), self._path(name), callback=_callback(progress),
                **self._put_options(nbytes),
            )  # fmt: skip

    def create(self, name: str, data: bytes) -> bool:
        with self._errors():
            if self._exists(name):
                return False
            self._make_folder(name)
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._errors():
            self._make_folder(name)
            self._fs.pipe_file(self._path(name), data)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with self._errors():
                try:
                    self._fs.rm_file(self._path(name))
                except FileNotFoundError:
                    self._exists(name)  # The bucket may be gone.

    def sweep(self) -> None:
        with self._errors():
            self._sweep()

    def _exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.isfile(self._path(name)))

    def _make_folder(self, name: str) -> None:
        """For file systems that have folders; an object store has none."""
        if getattr(self._fs, "local_file", False):
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except (StoreError, NoObject, GeneratorExit):
            raise
        except Exception as error:  # These libraries raise anything.
            raise self._translated(error, name) from error

    def _translated(self, error: Exception, name: str) -> StoreError | NoObject:
        cause: BaseException | None = error
        while cause is not None:
            if (found := self._translate(cause)) is not None:
                found.where = self.address
                return found
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, FileNotFoundError) and name:
            return NoObject("there is no such object", where=f"{self.address}/{name}")
        kinds: list[tuple[type[Exception], Cause]] = [
            (FileNotFoundError, "missing"), (PermissionError, "denied"),
            (TimeoutError, "unreachable"), (ConnectionError, "unreachable"),
        ]  # fmt: skip
        kind: Cause = next((cause for kind, cause in kinds if isinstance(error, kind)), "other")
        return StoreError(words(error), kind, where=self.address)


def words(error: BaseException) -> str:
    """The text of an error of a library, in a line and without credentials."""
    text = " ".join(redacted(str(error)).split()) or type(error).__name__
    return text[:WORDS_MAX]


def _callback(progress: Progress) -> Any:
    from fsspec.callbacks import Callback  # imported late: an extra brings it

    class Counting(Callback):
        """Passes on how many bytes have been sent."""

        def relative_update(self, inc: int = 1) -> None:
            progress(int(inc))

    return Counting()
