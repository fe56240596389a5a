"""What the process that mirrors a run does, in whatever state it finds the store and the run."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from stored_checkpoints import Recording, checkpoint, failing

from daemons.mirror.uploader import UPLOADED, Uploader, why
from dlctl.errors import DlctlError
from dlctl.job.config import Checkpoints, Job, JobFile
from dlctl.records.manifest import MANIFEST
from dlctl.runs import checkpoints, lineage
from dlctl.runs.database import RunDb
from dlctl.stores import checkpoint_store, ownership
from dlctl.stores.checkpoint_store import CheckpointStore
from dlctl.stores.folder import Folder
from dlctl.stores.objects import StoreError


class Place:
    """A run and its mirror."""

    def __init__(self, path: Path) -> None:
        self.run = path / "run-1"
        self.run.mkdir()
        RunDb(self.run, create=True).close()
        self.objects = Recording(Folder(path / "store"))
        self.store = CheckpointStore(self.objects)
        self.claim = ownership.new_claim(self.store.address)

    def begin(self, keep: int = 2, best: str = "") -> Uploader:
        job = JobFile(
            job=Job(name="run", task="t.py:t"), checkpoints=Checkpoints(keep=keep, best=best)
        )
        uploader = Uploader(self.run, job, self.store, self.claim)
        uploader.begin()
        return uploader

    def bring(self, uploader: Uploader) -> int | None:
        row = uploader.bring(lambda sent, nbytes: None)
        return None if row is None else int(row["number"])

    @property
    def numbers(self) -> list[int]:
        return [checkpoint_store.number(name)[0] for name in self.store.look().names]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_newest_is_brought_and_superfluous_ones_go_after_it_is_complete(place: Place) -> None:
    uploader = place.begin(keep=2)
    assert place.bring(uploader) is None
    for number in (1, 2, 3):
        checkpoint(place.run, number)
        assert place.bring(uploader) == number
    assert place.numbers == [2, 3]
    completed = place.objects.done.index(("create", f"000000000030-3/{MANIFEST}"))
    removed = [i for i, (method, _) in enumerate(place.objects.done) if method == "remove"]
    assert min(removed) > completed


def test_one_that_is_behind_brings_the_newest_and_passes_over_the_others(place: Place) -> None:
    uploader = place.begin(keep=3)
    for number in range(1, 6):
        checkpoint(place.run, number)
    assert place.bring(uploader) == 5
    assert place.numbers == [5]


def test_the_checkpoint_that_the_run_has_resumed_from_stays(place: Place) -> None:
    """PL#21813."""
    uploader = place.begin(keep=1)
    source = checkpoint(place.run, 1)
    place.bring(uploader)
    with closing(RunDb(place.run)) as db:
        lineage.record(db, place.run, source, "")
        db.commit()
    uploader = place.begin(keep=1)
    for number in (2, 3, 4):
        checkpoint(place.run, number)
        place.bring(uploader)
    assert place.numbers == [1, 4]
    owner = ownership.read(place.objects)
    assert owner is not None
    assert owner.resumes == ((1, 1),)


def test_the_best_one_is_brought_and_stays(place: Place) -> None:
    uploader = place.begin(keep=1, best="accuracy max")
    for number, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6)):
        changes = {"evaluation": {"accuracy": accuracy}, "evaluation_step": 10 * number}
        checkpoint(place.run, number, **changes)
    place.bring(uploader)
    assert place.numbers == [2, 4]


@pytest.mark.parametrize("at", ["shard-0.safetensors", "shard-1.safetensors", MANIFEST])
def test_a_process_killed_in_an_upload_is_gone_on_from_and_lists_nothing(
    place: Place, at: str
) -> None:
    first = checkpoint(place.run, 1)
    place.bring(place.begin())
    second = checkpoint(place.run, 2)

    def dies(method: str, name: str) -> None:
        if name == f"{second.name}/{at}" and method in ("put", "create"):
            raise KeyboardInterrupt

    place.objects.breaks = dies
    with pytest.raises(KeyboardInterrupt):
        place.bring(place.begin())
    assert place.numbers == [1]
    place.objects.breaks = lambda method, name: None
    place.objects.done.clear()
    assert place.bring(place.begin()) == 2
    repeated = {name.rpartition("/")[2] for name in place.objects.names("put")}
    files = ["shard-0.safetensors", "shard-1.safetensors"]
    assert repeated == {*(files[files.index(at) :] if at in files else [])}
    assert first.exists()


@pytest.mark.parametrize("cause", ["throttled", "unreachable", "expired", "denied"])
def test_a_store_that_refuses_is_told_with_its_cause_and_nothing_is_removed(
    place: Place, cause: str
) -> None:
    uploader = place.begin(keep=1)
    checkpoint(place.run, 1)
    place.bring(uploader)
    checkpoint(place.run, 2)
    place.objects.breaks = failing(cause, "put", "shard-1.safetensors")  # type: ignore[arg-type]
    with pytest.raises(StoreError) as caught:
        place.bring(uploader)
    assert why(caught.value)[1] == cause
    assert place.numbers == [1]
    place.objects.breaks = lambda method, name: None
    assert place.bring(uploader) == 2
    assert place.numbers == [2]


def test_a_checkpoint_that_the_run_removes_meanwhile_is_uploaded_all_the_same(
    place: Place,
) -> None:
    source, uploader = checkpoint(place.run, 1), place.begin()

    def removes(method: str, name: str) -> None:
        if method == "put":
            shutil.rmtree(source, ignore_errors=True)

    place.objects.breaks = removes
    assert place.bring(uploader) == 1
    assert place.numbers == [1]
    assert [path.name for path in (place.run / "mirror").iterdir()] == [UPLOADED]


def test_a_file_system_without_links_uploads_the_files_themselves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        if self.parent.parent.name == "mirror":
            raise OSError(95, "Operation not supported")

    uploader = place.begin()
    checkpoint(place.run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "create", lambda self, name, data: self.replace(name, data) is None)
        patch.setattr(Path, "hardlink_to", refuse)
        assert place.bring(uploader) == 1


def test_a_checkpoint_that_is_damaged_here_is_not_uploaded(place: Place) -> None:
    source, uploader = checkpoint(place.run, 1), place.begin()
    shard = source / "shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(DlctlError, match="damaged on this machine"):
        place.bring(uploader)
    assert place.objects.names("put") == []


def test_a_run_that_has_been_replaced_writes_and_removes_nothing_more(place: Place) -> None:
    uploader = place.begin(keep=1)
    checkpoint(place.run, 1)
    place.bring(uploader)
    claim = ownership.new_claim(place.store.address, ["run-1"])
    contents = place.store.look()
    ownership.take(place.objects, contents.owner, contents.whose(), claim, "run-2")
    checkpoint(place.run, 2)
    with pytest.raises(StoreError) as caught:
        place.bring(uploader)
    assert (caught.value.cause, place.numbers) == ("foreign", [1])
    with pytest.raises(StoreError):
        place.begin()


def test_one_that_was_resumed_before_it_was_replaced_does_not_take_the_place_back(
    place: Place,
) -> None:
    """Its process begins anew after each refusal."""
    place.claim = ownership.following(place.claim, "run-1")
    uploader = place.begin()
    checkpoint(place.run, 1)
    place.bring(uploader)
    claim = ownership.new_claim(place.store.address, ["run-1"])
    contents = place.store.look()
    ownership.take(place.objects, contents.owner, contents.whose(), claim, "run-2")
    with pytest.raises(StoreError, match="of run-2"):
        place.begin()
    ownership.confirm(place.objects, claim)
    # A third that has begun from the same one, and has not seen the second come.
    third = ownership.new_claim(place.store.address, ["run-1"])
    contents = place.store.look()
    with pytest.raises(StoreError, match="of run-2"):
        ownership.retake(
            place.objects, contents.owner, contents.whose(), third, "run-3", resumes=[]
        )
    # The user starts the first one again.
    ownership.take(place.objects, contents.owner, contents.whose(), place.claim, "run-1")
    place.begin()


def test_nothing_is_removed_before_all_files_of_the_newest_are_there(place: Place) -> None:
    """A store that forgets a file after it had been complete."""
    uploader = place.begin(keep=1)
    checkpoint(place.run, 1)
    place.bring(uploader)
    second = checkpoint(place.run, 2)
    objects, forget = place.objects, f"{second.name}/shard-0.safetensors"

    def forgets(method: str, name: str) -> None:
        if method == "sizes" and name == "" and MANIFEST in "".join(objects.names("create")):
            objects._objects.remove([forget])

    objects.done.clear()
    objects.breaks = forgets
    place.bring(uploader)
    assert objects.names("remove") == []
    objects.breaks = lambda method, name: None
    assert place.bring(uploader) == 2, "it is repaired"


def test_damaged_notes_only_cost_the_upload(place: Place) -> None:
    checkpoint(place.run, 1)
    uploader = place.begin()
    (place.run / "mirror" / UPLOADED).write_text("[")
    assert place.bring(uploader) == 1


def test_the_numbers_of_a_run_that_takes_over_are_higher(tmp_path: Path) -> None:
    """Whatever the mirror has of the run before, complete or not."""
    from daemons.coordinator.past import read_past

    run = tmp_path / "run-2"
    run.mkdir()
    (run / "ckpt").mkdir()
    with closing(RunDb(run, create=True)) as db:
        assert read_past(run, db, {}).checkpoints == 0
        ownership.write(run, ownership.new_claim("s3://bucket/x", ["run-1"], highest=8))
        assert read_past(run, db, {}).checkpoints == 8
        (run / ownership.CLAIM).write_text("{")
        assert read_past(run, db, {}).checkpoints == 0
    assert checkpoints.highest_number(run) == 0
