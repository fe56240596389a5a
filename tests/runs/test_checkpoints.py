"""Checkpoints survive what happens to files: bit flips, cuts, swaps, full disks."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from manifests import frozen_part, whole
from safetensors.numpy import load_file

from dlctl.errors import DlctlError
from dlctl.model.flat import slice_bounds
from dlctl.records import manifest
from dlctl.records.best import Best
from dlctl.runs import checkpoints, lineage

SIZE = 103
STREAM = {
    "stream_shards": 2,
    "stream_names": ["b", "a"],
    "portion_samples": 8,
    "stream": [[[0, 105, 14]], [[1, [[0, 0, -1, []], [0, 2, 50, [3]]]]]],
}
"""What a checkpoint says of a dataset that is a stream."""
W = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)
SUM = np.abs(W) + 1


def save(run: Path, *, step: int = 12, number: int = 1, shards: int = 2) -> Path:
    """A whole checkpoint of a model of 103 elements, as the daemons write one."""
    directory = checkpoints.create(run, step, number)
    parts = []
    for index in range(shards):
        lo, hi = slice_bounds(SIZE, shards, index)
        arrays = {"w": W[lo:hi], "slot.sum": SUM[lo:hi]}
        if index == 0:
            arrays["averaged"] = np.linspace(0, 1, 4)
        state = {"version": 40 + index, "counters": {"updates": 40}}
        parts.append({"lo": lo, "hi": hi, **part(directory, f"shard-{index}", arrays, state)})
    residual = {"residual": np.arange(SIZE, dtype=np.float64)}
    workers = [part(directory, "worker-0", residual, {"clock": 3})]
    frozen = frozen_part(directory)
    made = whole(step=step, number=number, shards=parts, workers=workers, frozen=frozen)
    checkpoints.write_manifest(directory, made)
    return directory


def part(directory: Path, name: str, arrays: dict, state: dict) -> dict:
    file = f"{name}.safetensors"
    sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
    return {"name": name, "file": file, "sha256": sha256, "nbytes": nbytes, "state": state}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# ---------------------------------------------------------------- writing


def test_a_run_directory_that_was_moved_is_not_made_anew_for_a_checkpoint(tmp_path):
    """Nobody would look for it there. So that one fails, is said to have failed, and the servers
    keep what they have."""
    with pytest.raises(DlctlError, match=os.strerror(errno.ENOENT)) as raised:
        checkpoints.create(tmp_path / "moved", 12, 1)
    assert raised.value.where == str(tmp_path / "moved" / "ckpt" / "000000000012-1")
    assert not (tmp_path / "moved").exists()


def test_what_is_written_is_what_the_safetensors_library_reads(tmp_path):
    arrays = {
        "w": W,
        "averaged": np.linspace(0, 1, 7),
        "half": np.arange(5, dtype=np.float16),
        "matrix": np.arange(12, dtype=np.int64).reshape(3, 4).T,
        "bytes": np.arange(3, dtype=np.uint8),
        "nothing": np.zeros(0, np.float32),
    }
    sha256, nbytes = checkpoints.write_arrays(tmp_path / "a.safetensors", arrays)
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    assert nbytes == (tmp_path / "a.safetensors").stat().st_size
    assert sha256 == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_file_system_that_takes_nothing_any_more_is_an_error_with_a_name(tmp_path, monkeypatch):
    """It does not even let go what is not there."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DlctlError, match=os.strerror(errno.EROFS)):
        checkpoints.write_arrays(tmp_path / "shard-0.safetensors", {"w": W})


def test_a_file_that_cannot_be_written_leaves_nothing_and_names_the_path(tmp_path):
    path = tmp_path / "shard-0.safetensors"
    path.mkdir()
    with pytest.raises(DlctlError) as caught:
        checkpoints.write_arrays(path, {"w": W})
    assert caught.value.where == str(path)
    assert os.listdir(tmp_path) == ["shard-0.safetensors"]
    with pytest.raises(DlctlError, match="complex64"):
        checkpoints.write_arrays(tmp_path / "x", {"w": W.astype(np.complex64)})


def test_a_full_disk_keeps_the_old_file_and_leaves_no_rubbish(tmp_path):
    checkpoints.write_arrays(tmp_path / "w", {"w": W})
    before = (tmp_path / "w").read_bytes()
    code = """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from dlctl.runs import checkpoints
        from dlctl.errors import DlctlError
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        try:
            checkpoints.write_arrays(Path(sys.argv[1]), {"w": np.ones(2**20, np.float32)})
        except DlctlError as error:
            print(error.message, error.where)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "w")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert os.strerror(errno.EFBIG) in done.stdout, done.stderr
    assert str(tmp_path / "w") in done.stdout
    assert (tmp_path / "w").read_bytes() == before
    assert os.listdir(tmp_path) == ["w"]


def test_a_manifest_that_could_not_be_read_back_is_not_written(tmp_path):
    directory = save(tmp_path)
    good = checkpoints.read_manifest(directory)
    with pytest.raises(DlctlError, match="step"):
        checkpoints.write_manifest(directory, {**good, "step": "12"})
    assert checkpoints.read_manifest(directory) == good


# ---------------------------------------------------------------- reading and cutting anew


@pytest.mark.parametrize("saved_by", [1, 2, 5])
@pytest.mark.parametrize("resumed_by", [1, 3, 7])
def test_a_run_may_go_on_with_another_number_of_servers(tmp_path, saved_by, resumed_by):
    directory = save(tmp_path, shards=saved_by)
    found = checkpoints.read_manifest(directory)
    for index in range(resumed_by):
        lo, hi = slice_bounds(SIZE, resumed_by, index)
        for tensor, vector in (("w", W), ("slot.sum", SUM)):
            piece = checkpoints.read_slice(directory, found, tensor, lo, hi)
            assert piece.dtype == np.float32
            np.testing.assert_array_equal(piece, vector[lo:hi])
    np.testing.assert_array_equal(checkpoints.read_averaged(directory, found), np.linspace(0, 1, 4))


def test_more_servers_than_elements_leave_some_of_them_empty(tmp_path):
    directory = save(tmp_path, shards=SIZE + 5)
    assert checkpoints.verify(directory) == []
    found = checkpoints.read_manifest(directory)
    np.testing.assert_array_equal(checkpoints.read_slice(directory, found, "w", 0, SIZE), W)
    assert checkpoints.read_slice(directory, found, "w", 7, 7).size == 0


def test_a_worker_finds_its_residual_and_a_new_one_finds_nothing(tmp_path):
    directory = save(tmp_path)
    found = checkpoints.read_manifest(directory)
    assert checkpoints.read_worker(directory, found, "worker-0")["residual"].dtype == np.float64
    assert checkpoints.read_worker(directory, found, "worker-1") == {}


def test_what_a_worker_takes_part_by_part_stays_in_the_file(tmp_path):
    directory = save(tmp_path)
    found = checkpoints.read_manifest(directory)
    mapped = checkpoints.read_worker(directory, found, "worker-0")
    assert not mapped["residual"].flags.writeable
    checkpoints.remove(directory)
    np.testing.assert_array_equal(mapped["residual"], np.arange(SIZE, dtype=np.float64))


def test_reading_what_is_not_there_says_which_file_lacks_it(tmp_path):
    directory = save(tmp_path)
    found = checkpoints.read_manifest(directory)
    with pytest.raises(DlctlError, match=r'"slot\.m"') as caught:
        checkpoints.read_slice(directory, found, "slot.m", 0, SIZE)
    assert caught.value.where == str(directory / "shard-0.safetensors")
    with pytest.raises(DlctlError):
        checkpoints.read_slice(directory, found, "w", 0, SIZE + 1)
    (directory / "shard-1.safetensors").unlink()
    with pytest.raises(DlctlError):
        checkpoints.read_slice(directory, found, "w", 0, SIZE)


# ---------------------------------------------------------------- damage


def test_a_good_checkpoint_has_no_problems(tmp_path):
    assert checkpoints.verify(save(tmp_path)) == []


@pytest.mark.parametrize("file", ["shard-0", "shard-1", "worker-0"])
@pytest.mark.parametrize("where", [0, 9, 60, -1])
def test_one_flipped_bit_anywhere_is_found(tmp_path, file, where):
    path = save(tmp_path) / f"{file}.safetensors"
    flip(path, where)
    assert checkpoints.verify(path.parent) == [
        f"{path}: its SHA-256 is not the one that it should have"
    ]


@pytest.mark.parametrize("left_bytes", [0, 1, 7, 8, 40, 200, -1])
def test_a_file_that_was_cut_is_found_and_refused(tmp_path, left_bytes):
    path = save(tmp_path) / "shard-0.safetensors"
    path.write_bytes(path.read_bytes()[:left_bytes])
    assert "cut off" in checkpoints.verify(path.parent)[0]
    found = checkpoints.read_manifest(path.parent)
    with pytest.raises(DlctlError):
        checkpoints.read_slice(path.parent, found, "w", 0, SIZE)


def test_a_manifest_cut_at_any_length_is_refused(tmp_path):
    path = save(tmp_path) / manifest.MANIFEST
    data = path.read_bytes()
    for length in range(0, len(data) - 1, 7):
        path.write_bytes(data[:length])
        with pytest.raises(DlctlError, match="manifest"):
            checkpoints.read_manifest(path.parent)


def test_two_swapped_files_are_found_although_both_are_whole(tmp_path):
    directory = save(tmp_path)
    one, other = directory / "shard-0.safetensors", directory / "shard-1.safetensors"
    one.rename(directory / "x")
    other.rename(one)
    (directory / "x").rename(other)
    assert len(checkpoints.verify(directory)) == 2


def test_missing_files_links_and_longer_files_are_found(tmp_path):
    directory = save(tmp_path)
    (directory / "shard-0.safetensors").unlink()
    (directory / "shard-1.safetensors").rename(tmp_path / "elsewhere")
    (directory / "shard-1.safetensors").symlink_to(tmp_path / "elsewhere")
    with (directory / "worker-0.safetensors").open("ab") as file:
        file.write(b"more")
    problems = [p.partition(": ")[2] for p in checkpoints.verify(directory)]
    assert problems[:2] == ["missing", "it is a symbolic link, not a regular file"]
    assert problems[2].startswith("too long")


def test_shards_that_leave_a_gap_are_refused(tmp_path):
    directory = save(tmp_path)
    found = checkpoints.read_manifest(directory)
    second = found["shards"][1]
    with pytest.raises(DlctlError, match=r"shards\[0\]"):
        checkpoints.write_manifest(directory, {**found, "shards": [second]})
    with pytest.raises(DlctlError, match=r"51.*103"):
        checkpoints.write_manifest(directory, {**found, "shards": found["shards"][:1]})


def test_a_shard_of_another_length_than_its_range_is_found(tmp_path):
    directory = save(tmp_path)
    found = checkpoints.read_manifest(directory)
    found["shards"][1] |= part(directory, "shard-1", {"w": W[:5]}, {})
    checkpoints.write_manifest(directory, found)
    assert "[5], not [52]" in checkpoints.verify(directory)[0]


FOREIGN = [
    ("schema", "other/1"),
    ("schema", None),
    ("step", -1),
    ("step", True),
    ("step", 1.5),
    ("number", "1"),
    ("layout", [["weight", "trained", [SIZE], "float32"]]),
    ("layout", [["weight", "evil", [SIZE], "float32", []]]),
    ("layout", [["weight", "trained", [-1, -103], "float32", []]]),
    ("size", SIZE + 1),
    ("shards", []),
    ("workers", None),
    ("data", {}),
    ("data", {"portions": [[0]]}),
    ("data", {"portions": [[0, -1]]}),
    ("evaluation", []),
]


def test_any_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    path = save(tmp_path) / manifest.MANIFEST
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        try:
            known = manifest.parse(bytes(damaged), "")
        except DlctlError:
            continue
        assert known == manifest.parse(data, ""), f"bit {place % 8} of byte {place}"


@pytest.mark.parametrize(("key", "value"), FOREIGN)
def test_a_manifest_with_a_wrong_field_is_refused(tmp_path, key, value):
    directory = save(tmp_path)
    found = checkpoints.read_manifest(directory)
    (directory / manifest.MANIFEST).write_text(json.dumps({**found, key: value}))
    with pytest.raises(DlctlError, match="manifest") as caught:
        checkpoints.read_manifest(directory)
    assert caught.value.where == str(directory / manifest.MANIFEST)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream": 3},
        {"stream": [[[0, 5]], []]},
        {"stream": [[], [[0, [[0, 0, -1, []]]]]]},
        {"stream": [[], [[0, [[0, 0, -2, []], [0, 2, 5, [7]]]]]]},
        {"stream": [[], [[0, [[0, 0, -1], [0, 2, 5, [7]]]]]]},
        {"stream": [[], [0]]},
        {"stream": [[], []]},
        {"portion_samples": "8"},
        {"stream_names": ["a"]},
        {"stream_names": ["a", "b\nc"]},
        {"stream_names": ["a", 1]},
    ],
)
def test_what_is_done_of_a_stream_is_checked(tmp_path, wrong):
    found = checkpoints.read_manifest(save(tmp_path))
    manifest.check({**found, "data": STREAM})
    with pytest.raises(ValueError, match=r"data\.(stream|portion_samples)"):
        manifest.check({**found, "data": STREAM | wrong})


@pytest.mark.parametrize("files", ["", "ab", 64 * "A", 3, None])
def test_the_digest_of_the_files_of_a_dataset_is_checked(tmp_path, files):
    found = checkpoints.read_manifest(save(tmp_path))
    data = found["data"] | {"dataset_files": 64 * "a"}
    manifest.check({**found, "data": data})
    with pytest.raises(ValueError, match=r"data\.dataset_files"):
        manifest.check({**found, "data": data | {"dataset_files": files}})


@pytest.mark.parametrize(
    "name", ["../shard-0", "/etc/passwd", "..", "a/b", "manifest.json", "a\0b"]
)
def test_a_file_name_that_leads_out_of_the_directory_is_refused(tmp_path, name):
    found = checkpoints.read_manifest(save(tmp_path))
    for kind in ("shards", "workers"):
        hostile = copy.deepcopy(found)
        hostile[kind][0]["file"] = name
        with pytest.raises(ValueError, match="file"):
            manifest.check(hostile)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema": NaN}'])
def test_what_is_no_manifest_at_all_is_refused(tmp_path, data):
    directory = checkpoints.create(tmp_path, 1, 1)
    (directory / manifest.MANIFEST).write_bytes(data)
    with pytest.raises(DlctlError, match="manifest"):
        checkpoints.read_manifest(directory)
    assert len(checkpoints.verify(directory)) == 1


# ---------------------------------------------------------------- which ones there are


def test_a_checkpoint_without_a_manifest_does_not_count(tmp_path):
    assert checkpoints.complete(tmp_path) == {}
    first = save(tmp_path, step=10, number=1)
    checkpoints.create(tmp_path, 20, 2)
    assert [*checkpoints.complete(tmp_path)] == [first]
    assert lineage.newest_good(tmp_path)[0] == first


def test_newer_means_written_later_not_more_steps(tmp_path):
    """A run that went back to step 10 writes step 15 after it had once written step 20."""
    save(tmp_path, step=10, number=1)
    save(tmp_path, step=20, number=2)
    last = save(tmp_path, step=15, number=10)
    assert lineage.newest_good(tmp_path)[0] == last


def test_a_bad_checkpoint_is_skipped_and_said_so(tmp_path):
    good = save(tmp_path, step=10, number=1)
    bad = save(tmp_path, step=20, number=2)
    flip(bad / "shard-1.safetensors", -5)
    worse = save(tmp_path, step=30, number=3)
    (worse / manifest.MANIFEST).write_text("{}")
    problems: list[str] = []
    directory, found = lineage.newest_good(tmp_path, problems.append)
    assert (directory, found["step"]) == (good, 10)
    assert [p.split(":")[0] for p in problems] == [
        str(worse / manifest.MANIFEST),
        str(bad / "shard-1.safetensors"),
    ]


def prune(run: Path, on_problem=lambda problem: None, **kept) -> list[Path]:
    old = lineage.superfluous(run, [], **kept)
    return [directory for directory in old if checkpoints.remove(directory, on_problem)]


def test_pruning_keeps_the_newest_and_never_removes_the_newest_good_one(tmp_path):
    saved = [save(tmp_path, step=n * 10, number=n) for n in range(1, 7)]
    left_behind = checkpoints.create(tmp_path, 15, 1)
    being_written = checkpoints.create(tmp_path, 70, 7)
    flip(saved[5] / "shard-0.safetensors", -1)
    flip(saved[4] / "shard-0.safetensors", -1)
    good, _ = lineage.newest_good(tmp_path)
    removed = prune(tmp_path, keep=2, good=good)
    assert sorted(removed) == sorted([left_behind, *saved[:3]])
    assert sorted((tmp_path / "ckpt").iterdir()) == sorted([*saved[3:], being_written])
    assert prune(tmp_path, keep=1, good=saved[3]) == []


def evaluated(run: Path, number: int, **metrics: float) -> Path:
    directory = save(run, step=number * 10, number=number)
    found = checkpoints.read_manifest(directory) | {"evaluation": metrics or None}
    checkpoints.write_manifest(directory, found)
    return directory


@pytest.mark.parametrize(("best", "stays"), [("loss min", 2), ("loss max", 1), ("acc max", None)])
def test_pruning_keeps_the_first_one_with_the_best_evaluation(tmp_path, best, stays):
    evaluated(tmp_path, 0)
    losses = [2.0, 1.0, 1.0, 1.5]
    saved = [evaluated(tmp_path, n, loss=loss) for n, loss in enumerate(losses, 1)]
    prune(tmp_path, keep=1, good=saved[-1], best=Best.parse(best))
    left = [checkpoints.number(path)[0] for path in checkpoints.complete(tmp_path)]
    assert left == ([stays, 4] if stays else [4])


def test_of_what_was_saved_at_a_failure_nobody_knows_how_good_it_is():
    best = Best.parse("loss min")
    found = [{"evaluation": {"loss": 2.0}}, {"evaluation": {"loss": 1.0}, "failure": "out of luck"}]
    assert best.of(enumerate(found)) == 0


@pytest.mark.parametrize(
    "odd", [{}, None, {"loss": "1"}, {"loss": float("nan")}, {"loss": -(10**400)}]
)
def test_what_is_no_number_is_not_the_best(odd):
    found = [{"evaluation": odd}, {"evaluation": {"loss": 2.0}}]
    assert Best.parse("loss min").of(enumerate(found)) == 1


def test_pruning_touches_nothing_that_is_not_a_checkpoint(tmp_path):
    save(tmp_path, step=10, number=1)
    newest = save(tmp_path, step=20, number=2)
    (tmp_path / "ckpt" / "notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ckpt" / "000000000005-0").symlink_to(tmp_path / "elsewhere")
    prune(tmp_path, keep=1, good=newest)
    left = {entry.name for entry in (tmp_path / "ckpt").iterdir()}
    assert left == {newest.name, "notes", "000000000005-0"}
    assert (tmp_path / "elsewhere").exists()


def test_a_checkpoint_with_a_flipped_bit_is_not_good(tmp_path):
    bad = save(tmp_path)
    flip(bad / "shard-0.safetensors", -1)
    assert lineage.newest_good(tmp_path) is None


def test_a_directory_that_cannot_be_removed_is_skipped_and_said_so(tmp_path):
    stuck = checkpoints.create(tmp_path, 5, 0)
    (stuck / manifest.MANIFEST).mkdir()  # not even root can unlink a directory
    old = save(tmp_path, step=10, number=1)
    newest = save(tmp_path, step=20, number=2)
    problems: list[str] = []
    removed = prune(tmp_path, problems.append, keep=1, good=newest)
    assert removed == [old]
    assert [problem.split(":")[0] for problem in problems] == [str(stuck)]


def test_a_checkpoint_is_never_written_into_the_directory_of_another(tmp_path):
    save(tmp_path, step=10, number=1)
    with pytest.raises(DlctlError, match=os.strerror(errno.EEXIST)):
        checkpoints.create(tmp_path, 10, 1)


def test_what_failed_attempts_left_goes_and_newer_or_complete_ones_stay(tmp_path):
    good = save(tmp_path, step=10, number=1)
    failed = checkpoints.create(tmp_path, 20, 2)
    being_written = checkpoints.create(tmp_path, 30, 3)
    assert checkpoints.remove_incomplete(tmp_path, before=3) == [failed]
    assert sorted((tmp_path / "ckpt").iterdir()) == [good, being_written]
    assert checkpoints.highest_number(tmp_path) == 3


# ---------------------------------------------------------------- tables beside the parameters

CELLS = 17
SEEN = np.arange(CELLS, dtype=np.float32)


def with_tables(run: Path, shards: int, **changes) -> Path:
    """As `save`, of a method with a second table. changes: of the first shard's row of it."""
    directory, parts = checkpoints.create(run, 12, 1), []
    for index in range(shards):
        lo, hi = slice_bounds(SIZE, shards, index)
        first, last = slice_bounds(CELLS, shards, index)
        arrays = {"w": W[lo:hi], "table.seen": SEEN[first:last]}
        if index == 0:
            arrays["averaged"] = np.linspace(0, 1, 4)
        cut = {"lo": first, "hi": last, "dtype": "float32", "version": index} | (
            {} if index else changes
        )
        state = {"version": 40, "tables": {"seen": cut}}
        parts.append({"lo": lo, "hi": hi, **part(directory, f"shard-{index}", arrays, state)})
    made = whole(shards=parts, workers=[], frozen=frozen_part(directory))
    checkpoints.write_manifest(directory, made)
    return directory


@pytest.mark.parametrize("before", [1, 2, 3, 20])
@pytest.mark.parametrize("after", [1, 2, 5, 20])
def test_a_table_is_cut_anew_however_it_was_cut(tmp_path, before, after):
    directory = with_tables(tmp_path, before)
    assert checkpoints.verify(directory) == []
    found = checkpoints.read_manifest(directory)
    cuts = [slice_bounds(CELLS, after, index) for index in range(after)]
    parts = [checkpoints.read_table(directory, found, "seen", CELLS, *cut) for cut in cuts]
    assert np.concatenate(parts).tolist() == SEEN.tolist()


@pytest.mark.parametrize(("name", "size"), [("other", CELLS), ("seen", 16), ("seen", 18)])
def test_a_table_of_another_name_or_size_is_not_read(tmp_path, name, size):
    directory = with_tables(tmp_path, 2)
    found = checkpoints.read_manifest(directory)
    with pytest.raises(DlctlError, match=f'"{name}" of {size} '):
        checkpoints.read_table(directory, found, name, size, 0, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lo": 1}, "does not begin where the previous one ends"),
        ({"hi": 9}, "does not begin where the previous one ends"),
        ({"hi": "8"}, "tables.seen.hi is '8'"),
        ({"lo": -1}, "tables.seen.lo is -1"),
        ({"hi": 2**70}, "tables.seen.hi is 11805"),
    ],
)
def test_a_manifest_whose_tables_do_not_fit_together_is_refused(tmp_path, changes, said):
    with pytest.raises(DlctlError, match=said):
        with_tables(tmp_path, 2, **changes)


def test_a_checkpoint_whose_files_do_not_have_all_of_a_table_is_not_good(tmp_path):
    directory = with_tables(tmp_path, 2)
    found = checkpoints.read_manifest(directory)
    for shard in found["shards"]:
        for end in ("lo", "hi"):
            shard["state"]["tables"]["seen"][end] *= 2
    (directory / manifest.MANIFEST).write_bytes(manifest.serialise(found, ""))
    (problem,) = checkpoints.verify(directory)
    assert "table.seen" in problem
