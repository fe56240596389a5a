"""By what the data of two workers is compared: names, never samples."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from daemons.worker.data.data_names import digest_of_files, name_of
from daemons.worker.data.portion_loader import PortionLoader

FILES = [f"/data/{name}.jpg" for name in "abcd"]


class Folder:
    """As torchvision's: each sample is read, and perhaps changed at random, when it is wanted."""

    def __init__(self, **lists: Any) -> None:
        self.__dict__ |= lists

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        ("/data/a", "/data/a"), (PurePosixPath("/data/a"), "/data/a"), (b"/d/\xff", "/d/\udcff"),
        (7, "7"), (np.int64(7), "7"), (np.str_("a"), "a"), (0.5, "0.5"), (None, "None"),
        (("/data/a", 0, 100), "/data/a/0/100"), (["a", ("b", 1)], "a/b/1"),
    ],
)  # fmt: skip
def test_a_shard_s_name_depends_on_no_process(shard: Any, name: str) -> None:
    assert name_of(shard) == name


@pytest.mark.parametrize("shard", [object(), {"file": "a"}, {"a"}, ("a", object())])
def test_what_no_other_process_would_call_the_same_has_no_name(shard: Any) -> None:
    with pytest.raises(TypeError):
        name_of(shard)


def test_the_same_files_in_the_same_order_are_one_dataset_wherever_they_are() -> None:
    pairs = [(path, index) for index, path in enumerate(FILES)]
    elsewhere = [path.replace("/data", "/mnt/disk2/data") for path in FILES]
    same = [
        Folder(samples=pairs, imgs=pairs), Folder(imgs=tuple(pairs)), Folder(files=FILES),
        Folder(paths=np.array(FILES)), Folder(paths=np.array(FILES, object)),
        Folder(files=list(map(Path, elsewhere))), Folder(samples=[[path, 0] for path in elsewhere]),
        Folder(samples=[torch.rand(2) for _ in FILES], files=FILES),
        Subset(Folder(files=[*FILES[::-1]]), [3, 2, 1, 0]),
        Subset(Subset(Folder(files=FILES), np.array([1, 0, 2, 3])), torch.tensor([1, 0, 2, 3])),
    ]  # fmt: skip
    digests = {digest_of_files(dataset) for dataset in same}
    assert len(digests) == 1
    others = [FILES[::-1], [*FILES[:3], "/data/e.jpg"]]
    assert len({*digests, *(digest_of_files(Folder(files=files)) for files in others)}) == 3
    assert "" not in digests


def test_what_lists_no_files_is_not_compared() -> None:
    """Random samples, texts, values of other kinds, lists of other lengths, properties."""

    class Lazy(Folder):
        @property
        def samples(self) -> list[str]:
            raise AssertionError("it would load everything")

    for dataset in (
        Folder(), Folder(samples=[torch.rand(2) for _ in FILES]), Folder(samples=[0.1, 0, 0, 1]),
        Folder(files=FILES[:3]), Folder(files=[*FILES[:3], None]), Folder(samples=np.zeros((4, 2))),
        Folder(samples=[f"{path} " * 600 for path in FILES]), Folder(samples=["", "a", "b", "c"]),
        Folder(files=dict.fromkeys(FILES, 0)), Folder(samples=[()] * 4), Lazy(), range(4),
        Subset(type("Endless", (), {"__getitem__": lambda self, index: index})(), [1, 0]),
        TensorDataset(torch.rand(4, 2)), Subset(TensorDataset(torch.rand(4, 2)), [1, 0]),
    ):  # fmt: skip
        assert digest_of_files(dataset) == ""


def test_a_loader_has_the_digest_of_its_dataset() -> None:
    loader = PortionLoader(Folder(files=FILES), batch_size=2, seed=0, shuffle=True, processes=0)
    assert loader.files == digest_of_files(Folder(files=FILES))
    assert loader.identity == [4, "", loader.files]
