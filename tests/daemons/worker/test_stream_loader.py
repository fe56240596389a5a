"""A stream's loader: the same batches whoever asks, few skips, and errors with the user's line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from daemons.worker.data.stream_loader import StreamLoader
from daemons.worker.task.user_task import TaskError, is_stream


class Files:
    """Shards by name, which are opened at any sample."""

    def __init__(self, **shards: int) -> None:
        self.sizes = shards
        self.opened: list[tuple[str, int]] = []

    def shards(self) -> list[str]:
        return list(self.sizes)

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        self.opened.append((shard, offset))
        begin = 100 * self.shards().index(shard)
        return (torch.tensor(begin + i) for i in range(offset, self.sizes[shard]))


class Numbered(Files):
    def __init__(self) -> None:
        super().__init__(a=20, b=7)

    def shards(self) -> Any:
        return 2

    def open(self, shard: Any, offset: int) -> Iterator[Any]:
        return (torch.tensor(100 * shard + i) for i in range(offset, (20, 7)[shard]))


class Plain(IterableDataset):
    """One shard, of which nobody can read less than all."""

    def __init__(self, size: int = 20) -> None:
        self.size = size
        self.begun = 0

    def __len__(self) -> int:  # DataLoader would use it; its samples have no numbers.
        return self.size

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return map(torch.tensor, range(self.size))


class Streaming:
    """What `datasets` gives with streaming=True, as far as it is used."""

    def __init__(self, parts: list[range], skipped: int = 0) -> None:
        self.parts, self.epoch, self.skipped = parts, 0, skipped
        self.num_shards = len(parts)

    def shard(self, num_shards: int, index: int) -> Streaming:
        assert num_shards == self.num_shards
        return Streaming([self.parts[index]])

    def skip(self, n: int) -> Streaming:
        return Streaming(self.parts, skipped=self.skipped + n)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = [n for part in self.parts for n in part][self.skipped :]
        return iter({"number": n, "epoch": self.epoch} for n in numbers)


def loader(dataset: Any, processes: int = 0, batch_size: int = 4, **options: Any) -> StreamLoader:
    return StreamLoader(
        dataset, batch_size=batch_size, seed=0, shuffle=True, processes=processes,
        place="train.py:7", **options,
    )  # fmt: skip


def portion(
    stream: StreamLoader, start: int, stop: int, shard: int, epoch: int = 0, step: int = 4
) -> list[list[int]]:
    """All steps of a portion, as a worker asks for them."""
    found: list[list[int]] = []
    for number in range(-((start - stop) // step)):
        loaded = stream.step(epoch, start, stop, number, shard)
        values = [n for batch, _ in loaded.batches for n in _numbers(batch)]
        assert sum(part for _, part in loaded.batches) == pytest.approx(float(bool(values)))
        found.append(values)
        if loaded.ended_after is not None:
            assert loaded.ended_after == len(values)
            break
        assert len(values) == step
    return found


def _numbers(batch: Any) -> list[int]:
    return (batch["number"] if isinstance(batch, dict) else batch).tolist()


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    "dataset",
    [Files(a=20, b=7), Numbered(), Streaming([range(20), range(100, 107)])],
    ids=["names", "numbers", "datasets"],
)
def test_shards_are_read_in_portions_to_their_ends(dataset: Any, processes: int) -> None:
    stream = loader(dataset, processes)
    try:
        assert stream.shards == 2
        assert portion(stream, 0, 8, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert portion(stream, 0, 8, 1) == [[100, 101, 102, 103], [104, 105, 106]]
        assert portion(stream, 8, 16, 0) == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert portion(stream, 8, 16, 1) == [[]]
        assert portion(stream, 16, 24, 0) == [[16, 17, 18, 19], []]
        assert portion(stream, 64, 72, 0) == [[]]
        assert portion(stream, 8, 16, 0, epoch=1) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    finally:
        stream.close()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_shard_has_one_number_however_it_is_listed_and_wherever_it_lies(processes: int) -> None:
    sizes = {"d": 4, "a": 9, "c": 6, "b": 12}
    read = []
    for root, order in (("/mnt/x/", "dacb"), ("/data/", "abcd"), ("/data/y/", "cbda")):
        files = Files(**{root + name: sizes[name] for name in order})
        stream = loader(files, processes)
        try:
            assert stream.names == "\n".join(order)
            whole = [[*chain(*portion(stream, 0, 16, number))] for number in range(4)]
            first = [files.shards().index(root + name) for name in "abcd"]
            read.append([[n - 100 * at for n in of] for of, at in zip(whole, first, strict=True)])
        finally:
            stream.close()
    assert read[0] == read[1] == read[2] == [list(range(sizes[name])) for name in "abcd"]


def test_a_part_that_is_listed_twice_is_read_twice() -> None:
    class Twice(Files):
        def shards(self) -> list[str]:
            return ["b", "a", "b"]

        def open(self, shard: str, offset: int) -> Iterator[Any]:
            return (torch.tensor(ord(shard)) for _ in range(offset, 4))

    stream = loader(Twice())
    assert [portion(stream, 0, 4, n)[0][0] for n in range(3)] == [97, 98, 98]
    assert loader(Numbered()).names == loader(Plain()).names == ""


def test_a_shard_is_opened_once_and_again_only_for_what_lies_elsewhere() -> None:
    files = Files(a=100, b=100)
    stream = loader(files)
    for start in (16, 24, 32):
        portion(stream, start, start + 8, 0)
    portion(stream, 0, 8, 1)
    portion(stream, 40, 48, 0)
    assert files.opened == [("a", 16), ("b", 0)]
    portion(stream, 8, 16, 0)
    portion(stream, 64, 72, 0)
    assert files.opened[2:] == [("a", 8), ("a", 64)]


def test_what_can_only_be_iterated_is_skipped_and_begun_anew_for_what_comes_back() -> None:
    plain = Plain(40)
    stream = loader(plain)
    assert stream.shards == 1
    assert portion(stream, 8, 16, 0) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert portion(stream, 24, 32, 0)[0] == [24, 25, 26, 27]
    assert plain.begun == 1
    assert portion(stream, 0, 8, 0)[0] == [0, 1, 2, 3]
    assert plain.begun == 2
    assert portion(stream, 80, 88, 0) == [[]]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("start", [0, 8])
def test_the_epoch_is_told(parts: int, start: int) -> None:
    """What `shard` and `skip` of `datasets` give does not have it from what they were called on."""
    stream = loader(Streaming([range(20)] * parts))
    for epoch in (0, 3):
        (batch, _), *_ = stream.step(epoch, start, start + 8, 0, parts - 1).batches
        assert batch["epoch"].tolist() == [epoch] * 4


def test_batches_are_collected_to_steps_up_to_the_end() -> None:
    stream = loader(Plain(22), accumulate=2)
    assert portion(stream, 0, 16, 0, step=8) == [list(range(8)), list(range(8, 16))]
    batches, *_, ended_after = stream.step(0, 16, 32, 0, 0)
    assert [part for _, part in batches] == [4 / 6, 2 / 6]
    assert ended_after == 6


class Failing(Plain):
    def __iter__(self) -> Iterator[Any]:
        for number in range(20):
            if number == 9:
                raise ValueError("record 9 is cut off")
            yield torch.tensor(number)


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_of_the_stream_names_the_user_s_line(processes: int) -> None:
    stream = loader(Failing(), processes)
    try:
        with pytest.raises(TaskError, match=r"sample 8 .*ValueError") as caught:
            portion(stream, 0, 16, 0)
        assert "test_stream_loader.py:" in str(caught.value.where)
        assert portion(stream, 0, 8, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]], "it can be asked again"
    finally:
        stream.close()


def test_a_collate_that_fails_is_told_with_the_dataset_s_place() -> None:
    class Uneven(Plain):
        def __iter__(self) -> Iterator[Any]:
            return (torch.zeros(n) for n in range(8))

    with pytest.raises(TaskError) as caught:
        portion(loader(Uneven()), 0, 8, 0)
    assert caught.value.where == "train.py:7"


class NoOpen(Plain):
    def shards(self) -> list[str]:
        return ["a"]


class Objects(Files):
    def shards(self) -> Any:
        return [object()]


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (NoOpen(), r"no open\(shard, offset\)"), (Files(), "has no shards"),
        (Objects(), "has a shard without a name: shards.. returns a value of type object"),
    ],
)  # fmt: skip
def test_shards_that_are_none_are_an_error(dataset: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        loader(dataset)


def test_what_is_a_stream() -> None:
    class Iterable:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    streams = [Plain(), Files(a=3), Streaming([range(3)]), Iterable()]
    assert all(map(is_stream, streams))
    others = [[1], "abc", {1}, {1: 2}, iter([1]), (n for n in range(3)), None, 3]
    assert not any(map(is_stream, others))


def test_a_portion_that_is_no_multiple_of_the_batches_is_cut_into_even_ones() -> None:
    stream = loader(Plain(17))
    for start, sizes, ended_after in ((0, [3, 3, 4], None), (10, [3, 3, 1], 1)):
        steps = [stream.step(0, start, start + 10, number, 0) for number in range(3)]
        assert [len(batch) for step in steps for batch, _ in step.batches] == sizes
        assert steps[-1].ended_after == ended_after
