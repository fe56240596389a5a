"""The names of shards: the same wherever the data lies, and in whatever order it is listed."""

from __future__ import annotations

import pytest

from dlctl.util import listing


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/mnt/a/x/2.txt", "/mnt/a/x/1.txt"], ["2.txt", "1.txt"]),
        (["/data/x/2.txt", "/data/x/1.txt"], ["2.txt", "1.txt"]),
        (["s3://b/train/0", "s3://b/val/0"], ["train/0", "val/0"]),
        (["train", "train-2"], ["train", "train-2"]),
        (["/d/a", "/d/a/b"], ["a", "a/b"]),
        (["/d/only.txt"], ["only.txt"]),
        (["/d/folder/"], ["folder/"]),
        (["/d/a/", "/d/a/"], ["a/", "a/"]),
        (["2", "10"], ["2", "10"]),
        (["a\nb", "\udcff"], ["a\\nb", "\\udcff"]),
        ([""], [""]),
        ([], []),
    ],
)
def test_a_name_is_the_path_without_the_directory_that_all_share(paths, names):
    assert [*listing.names(paths)] == names
    assert listing.of_text(listing.ROW.join(names)) == (names if any(names) else [])


def test_a_part_has_one_number_whatever_the_order():
    names = ["b", "a", "d", "a", "c"]
    assert listing.numbers(names) == [2, 0, 4, 1, 3]
    assert listing.numbers(names[::-1]) == [3, 0, 4, 1, 2]
