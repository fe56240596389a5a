"""Checkpoints in a store, by one set of rules, whatever the store is.

    <address>/run.json                    which run writes here (`ownership.py`)
    <address>/000000000400-2/shard-0.safetensors ...
    <address>/000000000400-2/manifest.json

The manifest is written last and only if all other files are there, and removed first: without it,
a folder is no checkpoint. It is created exclusively, so a second run cannot replace it. The files
and their names are those of a run directory's `ckpt` (`dlctl/runs/checkpoints.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dlctl import registry
from dlctl.errors import DlctlError, NotFound
from dlctl.records.manifest import MANIFEST, Manifest, has_updates, is_suspect, parse, parts
from dlctl.runs import checkpoints, lineage
from dlctl.stores import addresses, ownership
from dlctl.stores.addresses import KIND, Address
from dlctl.stores.layout import NAME
from dlctl.stores.objects import NoObject, Objects, Progress, StoreError
from dlctl.stores.ownership import MirrorOwner
from dlctl.util.hashing import no_progress
from dlctl.util.text import plural


@dataclass(frozen=True, slots=True)
class Contents:
    """What a store had when it was listed."""

    sizes: Mapping[str, Mapping[str, int]]
    """Name of a checkpoint, complete or not -> its files and their sizes."""
    manifests: Mapping[str, Manifest]
    """Those of complete ones, oldest first."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Those with a manifest that cannot be read, and why."""
    owner: MirrorOwner | None = None

    @property
    def names(self) -> list[str]:
        """Complete checkpoints, oldest first: none that lacks a manifest."""
        return list(self.manifests)

    def highest(self) -> int:
        """The highest number, complete or not; 0 if there is none."""
        return max((number(name)[0] for name in self.sizes), default=0)

    def order(self) -> list[str]:
        """The complete ones, in the order in which to try them: as in `lineage.order`."""
        branch = self.owner.branch() if self.owner is not None else []

        def rank(name: str) -> tuple[bool, bool, tuple[int, int]]:
            own = lineage.is_of_branch(number(name)[0], branch)
            return own, not is_suspect(self.manifests[name]), number(name)

        return sorted(self.names, key=rank, reverse=True)

    def whose(self) -> str:
        """The run whose checkpoints these are; "" if there is none, or of initial values only."""
        if not any(map(has_updates, self.manifests.values())):
            return ""
        if self.owner is not None:
            return self.owner.run_id
        return str(self.manifests[self.names[-1]]["run_id"])

    def missing(self, name: str) -> list[str]:
        """What is wrong with a complete one by its sizes, a sentence each."""
        return _problems(name, self.manifests[name], self.sizes[name])


def number(name: str) -> tuple[int, int]:
    """(number, step), the order of age."""
    return checkpoints.number(Path(name))


class CheckpointStore:
    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    @property
    def address(self) -> str:
        return self.objects.address

    # ------------------------------------------------------------ reading

    def look(self) -> Contents:
        """List it. Raises StoreError."""
        found: dict[str, dict[str, int]] = {}
        for path, nbytes in self.objects.sizes().items():
            name, slash, file = path.partition("/")
            if slash and NAME.fullmatch(name):
                found.setdefault(name, {})[file] = nbytes
        manifests, unreadable = dict[str, Manifest](), dict[str, str]()
        for name in sorted(found, key=number):
            if MANIFEST in found[name]:
                try:
                    manifests[name] = self.manifest(name)
                except NoObject:  # It has just been removed.
                    pass
                except StoreError:
                    raise
                except DlctlError as error:
                    unreadable[name] = error.message
        return Contents(found, manifests, unreadable, ownership.read(self.objects))

    def manifest(self, name: str) -> Manifest:
        """Raises NoObject, StoreError, and DlctlError for a damaged one."""
        path = f"{name}/{MANIFEST}"
        return parse(self.objects.read(path), f"{self.address}/{path}")

    def problems(self, name: str, manifest: Manifest) -> list[str]:
        """What is wrong with a checkpoint, a sentence each; reads every byte. Raises StoreError."""
        found = _problems(name, manifest, self._sizes(name))
        if found:
            return [f"{self.address}/{problem}" for problem in found]
        for part in _files(manifest):
            path, digest = f"{name}/{part['file']}", checkpoints.Digest()
            try:
                for piece in self.objects.pieces(path):
                    digest.add(piece)
            except NoObject:
                found.append(f"{self.address}/{path}: missing")
                continue
            found += digest.problems(f"{self.address}/{path}", part)
        return found

    def download(self, name: str, manifest: Manifest, folder: Path) -> Path:
        """Copy a checkpoint into a new directory of its name in `folder`. Raises DlctlError if it
        is damaged, and StoreError.
        """
        target = folder / name
        target.mkdir(parents=True)
        for part in _files(manifest):
            path = f"{name}/{part['file']}"
            written = checkpoints.write_chunks(target / part["file"], self.objects.pieces(path))
            if written != (part["sha256"], part["nbytes"]):
                why = f"it has {written[1]} bytes instead of {part['nbytes']}"
                if written[1] == part["nbytes"]:
                    why = "its SHA-256 is not the one that it should have"
                where = f"{self.address}/{path}"
                raise DlctlError(f"this checkpoint is damaged: {why}", where=where)
        checkpoints.write_manifest(target, manifest)
        return target

    def _sizes(self, name: str) -> dict[str, int]:
        skip = len(name) + 1
        return {path[skip:]: nbytes for path, nbytes in self.objects.sizes(name).items()}

    # ------------------------------------------------------------ writing

    def upload(
        self, source: Path, manifest: Manifest, progress: Progress = lambda nbytes: None,
        has: Container[str] = (), done: Callable[[str], None] = lambda file: None,
        confirm: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Copy a checkpoint from a directory: its files, and when all are there its manifest.
        Returns False if the store has it already, complete.

        has: files that this run has put there before; done: called for each that is put now.
        confirm: called before the manifest is written; raises if this run no longer writes here.
        Raises StoreError; OSError and DlctlError if the source is gone.
        """
        name = source.name
        there = self._sizes(name)
        if MANIFEST in there and self._is_complete(name, manifest, there):
            return False
        for part in _files(manifest):
            file = part["file"]
            if file not in has or there.get(file) != part["nbytes"]:
                self.objects.put(f"{name}/{file}", source / file, progress)
                done(file)
        self._complete(name, manifest, confirm)
        return True

    def _is_complete(self, name: str, manifest: Manifest, there: Mapping[str, int]) -> bool:
        """Whether it is this checkpoint, and whole. If it is another's, StoreError; the manifest of
        a half deleted one is removed, so that it can be written again.
        """
        with suppress(NoObject):
            try:
                other = self.manifest(name)
            except StoreError:
                raise
            except DlctlError:
                other = None
            if other is not None and _identity(other) != _identity(manifest):
                what = f"it has another checkpoint {name}, of {other['run_id']}"
                raise StoreError(what, "foreign", where=self.address)
            if other is not None and not _problems(name, manifest, there):
                return True
            self.objects.remove([f"{name}/{MANIFEST}"])
        return False

    def _complete(self, name: str, manifest: Manifest, confirm: Callable[[], None]) -> None:
        if found := _problems(name, manifest, self._sizes(name)):
            more = f" and {plural(len(found) - 1, 'more file')}" if found[1:] else ""
            what = f"it did not store what it has acknowledged: {found[0]}{more}"
            raise StoreError(what, "other", where=self.address)
        confirm()
        path = f"{name}/{MANIFEST}"
        if not self.objects.create(path, checkpoints.manifest_bytes(manifest, path)):
            what = f"another process has completed {name} meanwhile"
            raise StoreError(what, "foreign", where=self.address)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or what is left of one; the manifest first. Raises StoreError."""
        files = sorted(self._sizes(name), key=lambda file: file != MANIFEST)
        self.objects.remove(f"{name}/{file}" for file in files)


def _files(manifest: Manifest) -> Iterator[Manifest]:
    yield from (part for part in parts(manifest) if part["file"])


def _identity(manifest: Manifest) -> tuple[object, ...]:
    return (manifest["run_id"], manifest["at"], *(p["sha256"] for p in _files(manifest)))


def _problems(name: str, manifest: Manifest, there: Mapping[str, int]) -> list[str]:
    found = []
    for part in _files(manifest):
        file, nbytes = part["file"], part["nbytes"]
        if file not in there:
            found.append(f"{name}/{file}: missing")
        elif there[file] != nbytes:
            found.append(f"{name}/{file}: it has {there[file]} bytes instead of {nbytes}")
    return found


# ---------------------------------------------------------------- by an address


def objects_at(address: Address) -> Objects:
    """Raises DlctlError if the package of the scheme is missing, and StoreError."""
    text = str(address)
    fault, hint = addresses.missing_package(text)
    if fault:
        raise DlctlError(f"{text} {fault}", hint=hint)
    found: Objects = registry.load(KIND, address.scheme)(address)
    return found


def at(address: Address) -> CheckpointStore:
    """Raises DlctlError."""
    return CheckpointStore(objects_at(address))


def named(text: str) -> tuple[CheckpointStore, str]:
    """The store of an address, and the checkpoint in it that the address names; "" if none. Raises
    UsageError and DlctlError.
    """
    address = addresses.parse(text.removesuffix(f"/{MANIFEST}"))
    above, last = address.split()
    if NAME.fullmatch(last):
        return at(above), last
    return at(address), ""


def chosen(text: str) -> tuple[CheckpointStore, Contents, Sequence[str]]:
    """The store of an address, what it has, and the checkpoints that the address stands for: the
    one that it names, or all in the order in which to try them. Raises NotFound, UsageError and
    DlctlError.
    """
    store, name = named(text)
    contents = store.look()
    if not name:
        if not (found := contents.order()):
            raise NotFound(_nothing(store, contents), hint=f"dlctl checkpoint ls {store.address}")
        return store, contents, found
    if name in contents.unreadable:
        raise DlctlError(contents.unreadable[name], where=f"{store.address}/{name}")
    if name not in contents.manifests:
        what = "is incomplete: it has no manifest" if name in contents.sizes else "does not exist"
        raise NotFound(f"{name} {what}", hint=f"dlctl checkpoint ls {store.address}")
    return store, contents, [name]


def _nothing(store: CheckpointStore, contents: Contents) -> str:
    if contents.unreadable:
        name, why = next(iter(contents.unreadable.items()))
        return f"{store.address} has no good checkpoint: {name}: {why}"
    left = f", but {plural(len(contents.sizes), 'incomplete one')}" if contents.sizes else ""
    return f"{store.address} has no complete checkpoint{left}"


def local_problems(directory: Path, progress: Callable[[], None] = no_progress) -> list[str]:
    """What is wrong with the files of a checkpoint on a disk; reads every byte."""
    try:
        manifest = checkpoints.read_manifest(directory)
    except DlctlError as error:
        return [f"{error.where}: {error.message}"]
    return [
        problem
        for part in _files(manifest)
        for problem in checkpoints.file_problems(
            directory / part["file"], part["nbytes"], part["sha256"], progress
        )
    ]
