"""What a store of checkpoints must do, whatever it is: a folder, file systems of fsspec, and in
`make storage` two S3 servers.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_servers
from stored_checkpoints import Recording, checkpoint, failing

from dlctl.errors import DlctlError, NotFound
from dlctl.records.manifest import FAILURE, MANIFEST
from dlctl.runs import checkpoints, lineage
from dlctl.stores import addresses, checkpoint_store, ownership, s3
from dlctl.stores.checkpoint_store import CheckpointStore
from dlctl.stores.folder import Folder
from dlctl.stores.fsspec_objects import FsspecObjects
from dlctl.stores.objects import NoObject, Objects, StoreError
from dlctl.util.text import NO_WORKER, NOT_FINITE

SERVERS = s3_servers.SERVERS if "DLCTL_STORAGE" in os.environ else ()
KINDS = ["folder", "fsspec-memory", "fsspec-file", *SERVERS]


@pytest.fixture(scope="module")
def endpoint(kind: str) -> Iterator[str]:
    if kind not in s3_servers.SERVERS:
        yield ""
        return
    with s3_servers.server(kind) as found:
        if kind == "moto":
            s3_servers.make_bucket(found)
        yield found


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def objects(kind: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    place = tmp_path / "store"
    if kind == "folder":
        return Folder(place)
    if kind in s3_servers.SERVERS:
        where = {"AWS_ENDPOINT_URL": endpoint, "STORAGE_EMULATOR_HOST": endpoint}
        for key, value in {**s3_servers.ENV, **s3_servers.GS_ENV, **where}.items():
            monkeypatch.setenv(key, value)
        scheme = "gs" if kind == "gs" else "s3"
        text = f"{scheme}://{s3_servers.BUCKET}/{secrets.token_hex(4)}/clouds"
        return checkpoint_store.objects_at(addresses.parse(text))
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    is_memory = kind == "fsspec-memory"
    root = f"/{secrets.token_hex(4)}" if is_memory else str(place)
    filesystem = MemoryFileSystem() if is_memory else LocalFileSystem()
    return FsspecObjects(f"{kind}://x", root, filesystem, lambda error: None)


@pytest.fixture
def store(objects: Objects) -> CheckpointStore:
    return CheckpointStore(Recording(objects))


def recording(store: CheckpointStore) -> Recording:
    assert isinstance(store.objects, Recording)
    return store.objects


def put(store: CheckpointStore, directory: Path) -> bool:
    return store.upload(directory, checkpoints.read_manifest(directory))


# ---------------------------------------------------------------- objects


def test_objects_are_listed_read_and_removed_by_their_names(
    objects: Objects, tmp_path: Path
) -> None:
    file, sent = tmp_path / "file", list[int]()
    content = os.urandom(3 << 20)
    file.write_bytes(content)
    assert objects.sizes() == {}
    objects.put("a/file", file, sent.append)
    objects.replace("b c.json", b"1")
    objects.replace("b c.json", b"22")
    assert objects.sizes() == {"a/file": len(content), "b c.json": 2}
    assert objects.sizes("a") == {"a/file": len(content)}
    assert (objects.size("a/file"), objects.size("a"), objects.size("x")) == (
        len(content),
        None,
        None,
    )
    assert b"".join(objects.pieces("a/file")) == content
    assert objects.read("b c.json") == b"22"
    objects.remove(["a/file", "no/such"])
    objects.sweep()
    assert objects.sizes() == {"b c.json": 2}


def test_a_folder_is_swept_of_what_its_own_uploads_have_left(tmp_path: Path) -> None:
    """Other runs, and other programs, write below an address as well."""
    own = {"000000000400-2/.shard-0.safetensors.1f2e3d4c.tmp", ".run.json.1f2e3d4c.tmp"}
    others = {
        "beside/000000000400-2/.shard-0.safetensors.1f2e3d4c.tmp",  # A mirror below this one.
        "beside/.run.json.1f2e3d4c.tmp",
        "000000000400-2/deeper/.file.1f2e3d4c.tmp",
        "photos/.thumbnails.tmp",
        ".editor.tmp",
        "000000000400-2/shard-0.safetensors",
    }
    for name in own | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    Folder(tmp_path).sweep()
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == others
    Folder(tmp_path / "none").sweep()


class Bucket:
    """What a bucket answers about uploads that have begun, two on a page."""

    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)
        self.aborted: set[str] = set()

    def call_s3(self, method: str, **words: Any) -> dict[str, Any]:
        assert words["Bucket"] == "bucket"
        if method == "abort_multipart_upload":
            assert words["UploadId"] == f"of {words['Key']}"
            self.aborted.add(words["Key"])
            return {}
        found = sorted(key for key in self.keys if key.startswith(words["Prefix"]))
        page = [key for key in found if key > words.get("KeyMarker", "")][:2]
        is_more = bool(page) and page[-1] != found[-1]
        more = {"NextKeyMarker": page[-1], "NextUploadIdMarker": "1"} if is_more else {}
        uploads = [{"Key": key, "UploadId": f"of {key}"} for key in page]
        return {"Uploads": uploads, "IsTruncated": is_more, **more}


@pytest.mark.parametrize("prefix", ["", "clouds", "clouds/a"])
def test_only_uploads_that_are_a_stores_own_are_aborted(prefix: str) -> None:
    """A whole bucket can be an address, and so can a folder of another one."""
    places = ("", "clouds/", "clouds/a/", "cloudscape/")
    files = ("000000000400-2/shard-0.safetensors", "run.json")
    others = ("backup/2024.tar", "400-2/film.mp4", "000000000400-2/a/b", "000000000400-2/")
    bucket = Bucket(*(place + file for place in places for file in (*files, *others)))
    s3._abort_uploads(bucket, addresses.parse(f"s3://bucket/{prefix}".rstrip("/")))
    place = f"{prefix}/".lstrip("/")
    assert bucket.aborted == {place + file for file in files}


def test_what_is_not_there_is_no_object(objects: Objects) -> None:
    with pytest.raises(NoObject):
        objects.read("a/b")
    with pytest.raises(NoObject):
        list(objects.pieces("a/b"))


def test_an_object_is_created_once(objects: Objects) -> None:
    assert objects.create("a/m.json", b"1")
    assert not objects.create("a/m.json", b"2")
    assert objects.read("a/m.json") == b"1"


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_comes_back_as_it_was(store: CheckpointStore, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run-1", 3)
    manifest = checkpoints.read_manifest(source)
    assert put(store, source)
    assert recording(store).done[-1] == ("create", f"{source.name}/{MANIFEST}"), "it comes last"
    contents = store.look()
    assert (contents.names, contents.whose()) == ([source.name], "run-1")
    assert contents.manifests[source.name] == manifest
    assert store.problems(source.name, manifest) == []
    back = store.download(source.name, manifest, tmp_path / "back")
    assert checkpoints.verify(back) == []
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }
    assert not put(store, source), "it is there already"


def test_half_an_upload_is_no_checkpoint_and_is_gone_on_with(
    store: CheckpointStore, tmp_path: Path
) -> None:
    old, new = (checkpoint(tmp_path / "run-1", number) for number in (1, 2))
    put(store, old)
    done: set[str] = set()
    for suffix, method in (("shard-1.safetensors", "put"), (MANIFEST, "create")):
        recording(store).breaks = failing("throttled", method, suffix)
        with pytest.raises(StoreError):
            store.upload(new, checkpoints.read_manifest(new), has=done, done=done.add)
        assert store.look().names == [old.name]
        assert store.look().order() == [old.name]
    recording(store).breaks = lambda method, name: None
    assert store.upload(new, checkpoints.read_manifest(new), has=done, done=done.add)
    assert recording(store).names("put").count(f"{new.name}/shard-0.safetensors") == 1
    assert store.look().order() == [new.name, old.name]


def test_bytes_that_a_store_drops_in_silence_are_noticed(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """As in pytorch#183878: acknowledged, and not there."""
    source = checkpoint(tmp_path / "run-1", 1)
    ours = recording(store)

    def drops(method: str, name: str) -> None:
        if (method, name) == ("put", f"{source.name}/shard-1.safetensors"):
            ours._objects.remove([f"{source.name}/shard-0.safetensors"])

    ours.breaks = drops
    with pytest.raises(StoreError, match="did not store what it has acknowledged"):
        put(store, source)
    assert store.look().names == []


@pytest.mark.parametrize("damage", ["missing", "shorter", "other"])
def test_a_half_deleted_checkpoint_is_damaged_and_the_one_before_it_counts(
    store: CheckpointStore, tmp_path: Path, damage: str
) -> None:
    good, bad = (checkpoint(tmp_path / "run-1", number) for number in (1, 2))
    put(store, good)
    put(store, bad)
    name = f"{bad.name}/shard-0.safetensors"
    data = store.objects.read(name)
    store.objects.remove([name])
    if damage != "missing":
        store.objects.replace(name, data[:-1] if damage == "shorter" else data[:-1] + b"!")
    contents = store.look()
    assert bool(contents.missing(bad.name)) == (damage != "other")
    assert len(store.problems(bad.name, contents.manifests[bad.name])) == 1
    with pytest.raises(DlctlError):
        store.download(bad.name, contents.manifests[bad.name], tmp_path / "back")
    assert store.problems(good.name, contents.manifests[good.name]) == []
    if damage != "other":
        assert put(store, bad), "its run can write it again"
        assert store.problems(bad.name, contents.manifests[bad.name]) == []


def test_without_its_manifest_it_is_none_and_that_is_removed_first(
    store: CheckpointStore, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "run-1", 1)
    put(store, source)
    recording(store).breaks = failing("unreachable", "remove", "shard-0.safetensors")
    with pytest.raises(StoreError):
        store.remove(source.name)
    contents = store.look()
    assert (contents.names, [*contents.sizes]) == ([], [source.name])
    recording(store).breaks = lambda method, name: None
    store.remove(source.name)
    assert store.look().sizes == {}


def test_a_checkpoint_of_another_run_is_not_overwritten(
    store: CheckpointStore, tmp_path: Path
) -> None:
    mine, other = checkpoint(tmp_path / "run-1", 1), checkpoint(tmp_path / "run-2", 1)
    put(store, mine)
    with pytest.raises(StoreError) as caught:
        put(store, other)
    assert (caught.value.cause, "run-1" in caught.value.message) == ("foreign", True)
    assert store.problems(mine.name, checkpoints.read_manifest(mine)) == []


def test_a_manifest_that_is_damaged_hides_no_other(store: CheckpointStore, tmp_path: Path) -> None:
    good, bad = (checkpoint(tmp_path / "run-1", number) for number in (1, 2))
    put(store, good)
    put(store, bad)
    store.objects.replace(f"{bad.name}/{MANIFEST}", b'{"schema": 7}')
    store.objects.replace("notes.txt", b"of somebody")
    contents = store.look()
    assert (contents.names, [*contents.unreadable]) == ([good.name], [bad.name])
    assert (contents.highest(), contents.order()) == (2, [good.name])


def test_checkpoints_of_an_abandoned_branch_and_of_failures_come_last(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """As on the run's own disk (`lineage.order`)."""
    ruined = {FAILURE: f"{NO_WORKER}: {NOT_FINITE}"}
    made = [checkpoint(tmp_path / "run-1", n, **(ruined if n == 5 else {})) for n in range(1, 6)]
    for source in made:
        put(store, source)
    claim = ownership.new_claim("x")
    resumes = [lineage.Resume(1, 3, {})]
    ownership.take(store.objects, None, "", claim, "run-1", resumes)
    contents = store.look()
    numbers = [checkpoint_store.number(name)[0] for name in contents.order()]
    assert numbers == [4, 1, 5, 3, 2]


# ---------------------------------------------------------------- whose it is


def test_one_run_owns_an_address_and_the_one_that_follows_takes_it_over(
    store: CheckpointStore, tmp_path: Path
) -> None:
    put(store, checkpoint(tmp_path / "run-1", 1))
    objects, first = store.objects, ownership.new_claim(store.address)
    ownership.take(objects, None, "run-1", first, "run-1")
    ownership.confirm(objects, first)
    stranger, follower = (
        ownership.new_claim(store.address, follows) for follows in ([], ["run-1"])
    )
    contents = store.look()
    with pytest.raises(StoreError) as caught:
        ownership.take(objects, contents.owner, contents.whose(), stranger, "run-2")
    assert caught.value.is_lasting
    assert store.address in str(caught.value.hint)
    ownership.take(objects, contents.owner, contents.whose(), follower, "run-2")
    owner = ownership.read(objects)
    assert owner is not None
    assert (owner.run_id, owner.before) == ("run-2", ("run-1",))
    with pytest.raises(StoreError, match="of run-2"):
        ownership.confirm(objects, first)


def test_an_address_with_nothing_to_lose_may_be_taken(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """As of a run that failed before its first step."""
    initial = [{"version": 0}]
    source = checkpoint(tmp_path / "run-1", 1, step=0, shards=len(initial))
    put(store, source)
    ownership.take(store.objects, None, "", ownership.new_claim(store.address), "run-1")
    contents = store.look()
    assert (contents.names, contents.whose()) == ([source.name], "")
    claim = ownership.new_claim(store.address)
    ownership.take(store.objects, contents.owner, contents.whose(), claim, "run-2")
    ownership.confirm(store.objects, claim)


def test_a_run_with_the_same_name_is_another_one(store: CheckpointStore, tmp_path: Path) -> None:
    put(store, checkpoint(tmp_path / "run-1", 1))
    ownership.take(store.objects, None, "", ownership.new_claim(store.address), "run-1")
    contents, claim = store.look(), ownership.new_claim(store.address)
    with pytest.raises(StoreError, match="another run-1"):
        ownership.take(store.objects, contents.owner, contents.whose(), claim, "run-1")


# ---------------------------------------------------------------- the local store


def test_the_checkpoints_of_a_run_directory_are_such_a_store(tmp_path: Path) -> None:
    """`checkpoints.py` writes what this reads, and the other way round."""
    run = tmp_path / "run-1"
    source = checkpoint(run, 1)
    own = CheckpointStore(Folder(run / checkpoints.FOLDER))
    assert own.look().names == [path.name for path in checkpoints.complete(run)]
    other = tmp_path / "run-2"
    (other / checkpoints.FOLDER).mkdir(parents=True)
    assert put(CheckpointStore(Folder(other / checkpoints.FOLDER)), source)
    (found,) = checkpoints.complete(other)
    assert checkpoints.verify(found) == []


def test_a_mount_that_is_gone_is_no_empty_store(tmp_path: Path) -> None:
    store = CheckpointStore(Folder(tmp_path / "mount" / "digits"))
    with pytest.raises(StoreError) as caught:
        store.look()
    assert caught.value.cause == "missing"


def test_an_address_stands_for_one_checkpoint_or_for_all(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = CheckpointStore(Folder(root))
    sources = [checkpoint(tmp_path / "run-1", number) for number in (1, 2)]
    text = f"file://{root}"
    with pytest.raises(NotFound):
        checkpoint_store.chosen(text)
    for source in sources:
        put(store, source)
    names = [source.name for source in sources]
    assert checkpoint_store.chosen(text)[2] == names[::-1]
    for one in (f"{text}/{names[0]}", f"{text}/{names[0]}/", f"{text}/{names[0]}/{MANIFEST}"):
        assert checkpoint_store.chosen(one)[2] == [names[0]]
    with pytest.raises(NotFound):
        checkpoint_store.chosen(f"{text}/000000000990-99")
    (root / names[1] / MANIFEST).unlink()
    with pytest.raises(NotFound, match="incomplete"):
        checkpoint_store.chosen(f"{text}/{names[1]}")
    shutil.rmtree(root)
