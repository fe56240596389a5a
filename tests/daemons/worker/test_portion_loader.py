"""A portion has the same batches wherever, whenever and however often they are asked for."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from stepping import batch_of
from torch.utils.data import Dataset, TensorDataset

from daemons.worker.data import portion_loader as module
from daemons.worker.data.portion_loader import PortionLoader, Waits
from daemons.worker.task.failures import ProcessLost
from daemons.worker.task.user_task import TaskError

# torch starts its loaders with fork where Python does; newer Pythons remark that threads are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(params=[0, 1], ids=["in_process", "one_process"])
def loader(request: pytest.FixtureRequest):
    """Makes loaders, and checks that their processes end with them."""
    made: list[PortionLoader] = []
    before = set(multiprocessing.active_children())

    def make(dataset: Any = range(20), **options: Any) -> PortionLoader:
        given = {"batch_size": 4, "seed": 5, "shuffle": True, "processes": request.param, **options}
        made.append(PortionLoader(dataset, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not set(multiprocessing.active_children()) - before


def order_of(epoch: int, size: int = 20, seed: int = 5) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(size).tolist()


def test_the_batches_of_a_portion_are_its_range_of_the_shuffled_order(loader):
    data = loader()
    batches = [batch_of(data, 2, 6, 16, number).tolist() for number in range(3)]
    assert [len(batch) for batch in batches] == [3, 3, 4]
    assert list(chain(*batches)) == order_of(2)[6:16]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
def test_rows_that_are_taken_out_at_once_are_what_collating_them_gives(loader, dtype):
    """A dataset of tensors alone, and one that says the same one by one."""

    class OneByOne(TensorDataset):
        pass

    images = torch.arange(120).reshape(20, 3, 2).to(dtype)
    points = images, images.permute(0, 2, 1), torch.arange(20)
    at_once = batch_of(loader(TensorDataset(*points)), 0, 3, 14, 1)
    collated = batch_of(loader(OneByOne(*points)), 0, 3, 14, 1)
    assert type(at_once) is type(collated)
    for ours, theirs in zip(at_once, collated, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()
    at_once[0][:] = 0
    assert points[0].any(), "a batch is a copy"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
def test_rows_of_tensors_on_a_gpu_are_taken_there(loader):
    dataset = TensorDataset(torch.arange(20).cuda())
    (batch,) = batch_of(loader(dataset, processes=0), 0, 3, 14, 1)  # CUDA cannot follow a fork.
    assert batch.is_cuda


def test_the_portions_of_an_epoch_are_all_of_its_samples_once(loader):
    data = loader()
    seen = [batch_of(data, 0, lo, lo + 4, 0).tolist() for lo in range(0, 20, 4)]
    assert sorted(chain(*seen)) == list(range(20))
    assert list(chain(*seen)) != list(range(20))


def test_without_shuffling_samples_come_in_their_own_order(loader):
    data = loader(shuffle=False)
    assert batch_of(data, 7, 0, 20, 0).tolist() == [0, 1, 2, 3]


def test_any_order_gives_the_same_batches(loader):
    data = loader()
    expected = [order_of(1)[8:20][i : i + 4] for i in (0, 4, 8)]
    for number in (2, 0, 1, 1, 0, 2):
        assert batch_of(data, 1, 8, 20, number).tolist() == expected[number]


def test_portions_of_two_epochs_may_take_turns(loader):
    data = loader()
    for _ in range(2):
        for epoch in (0, 1, 2):
            assert batch_of(data, epoch, 0, 20, 1).tolist() == order_of(epoch)[4:8]


def test_the_task_may_have_made_another_device_the_default_one(loader):
    tensors = TensorDataset(torch.arange(20.0))
    torch.set_default_device("meta")
    try:
        (batch,) = batch_of(loader(tensors), 0, 0, 8, 1)
    finally:
        torch.set_default_device(None)
    assert batch.tolist() == order_of(0)[4:8]


def test_a_portion_may_be_cut_into_larger_or_smaller_batches(loader):
    data = loader(accumulate=2)
    assert data.batch_size == 4
    for size in (2, 8, 4):
        data.resize(size)
        steps = [data.step(0, 0, 16, number).batches for number in range(8 // size)]
        cut = [batch.tolist() for step in steps for batch, _ in step]
        assert cut == [order_of(0)[i : i + size] for i in range(0, 16, size)]


def test_leaving_a_portion_in_its_middle_does_no_harm(loader):
    data = loader(range(1000))
    batch_of(data, 0, 0, 1000, 0)
    assert batch_of(data, 0, 500, 504, 0).tolist() == order_of(0, 1000)[500:504]


class Augmented:
    """A sample is its index, and a number of each source that an augmentation may draw from."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(torch.rand(())), random.random(), np.random.random()]


@pytest.mark.parametrize("loader", [1], indirect=True, ids=["one_process"])
def test_each_term_of_a_slot_has_an_augmentation_of_its_own(loader):
    def drawn(slot: int, term: int) -> tuple[list[int], list[list[float]]]:
        data = loader(Augmented(), collate=list)
        data.reseed(slot, term)
        samples = [batch_of(data, 2, lo, lo + 4, 0) for lo in (0, 4)]
        rows = list(zip(*chain(*samples), strict=True))
        return [int(index) for index in rows[0]], rows[1:]

    others = [drawn(0, 1), drawn(1, 1), drawn(0, 2)]
    assert all(order == order_of(2)[:8] for order, _ in others)
    for source in range(3):
        numbers = [values[source] for _, values in others]
        assert len(set(chain(*numbers))) == 3 * 8, "no two are alike"
    assert drawn(1, 1) == others[1]


def test_batches_are_made_by_the_task_s_collate_if_it_has_one(loader):
    assert batch_of(loader(collate=sum, shuffle=False), 0, 0, 8, 1) == 4 + 5 + 6 + 7


def test_a_dataset_that_reads_many_samples_at_once_is_asked_so(loader):
    class AtOnce:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            raise AssertionError

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

    assert batch_of(loader(AtOnce(), shuffle=False), 0, 4, 8, 0).tolist() == [40, 50, 60, 70]


@pytest.mark.parametrize(("rows", "tolerant"), [([], False), ([], True), ([4, 5, 6], False)])
def test_samples_that_are_not_returned_are_an_error(loader, rows, tolerant):
    class Short(Torn):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return rows

    data = loader(Short(), shuffle=False, tolerant=tolerant, place="train.py:7")
    said = rf"dataset\(\)\.__getitems__ returned {len(rows)} samples for 4 indices"
    with pytest.raises(TaskError, match=said) as caught:
        data.step(0, 4, 8, 0)
    assert caught.value.where == "train.py:7"


def test_samples_of_several_tensors_are_batched_as_torch_does(loader):
    dataset = TensorDataset(torch.arange(20.0).view(20, 1), torch.arange(20))
    x, y = batch_of(loader(dataset, shuffle=False), 0, 0, 4, 0)
    assert torch.equal(x, torch.arange(4.0).view(4, 1))
    assert torch.equal(y, torch.arange(4))


def test_loading_does_not_shift_the_dropout_of_the_replica(loader):
    data = loader()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batch_of(data, 0, 0, 8, 0)
    batch_of(data, 0, 8, 16, 0)
    assert torch.equal(torch.get_rng_state(), before)


class Faulty:
    """Sample 13 is broken, in the way that it is told."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 13:
            self.fail()
        return index


def decode_error() -> None:
    raise ValueError("cannot decode image")


def test_an_error_of_the_dataset_names_the_sample_and_the_user_s_line(loader):
    data = loader(Faulty(decode_error), shuffle=False)
    with pytest.raises(TaskError) as caught:
        batch_of(data, 0, 12, 16, 0)
    error = caught.value
    assert error.call == "task.dataset()[13]"
    assert (error.where or "").startswith(f"{__file__}:")
    assert "in decode_error" in error.detail
    assert "torch/utils" not in error.detail
    assert batch_of(data, 0, 4, 8, 0).tolist() == [4, 5, 6, 7], (
        "the next portion is loaded all the same"
    )


def test_samples_that_do_not_fit_together_are_an_error_of_the_task(loader):
    ragged = [torch.ones(1 + i) for i in range(20)]
    with pytest.raises(TaskError) as caught:
        batch_of(loader(ragged, place="train.py:7"), 0, 0, 4, 0)
    assert caught.value.where == "train.py:7", "no line of torch's, nor of ours"


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_this_process() -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("does", "how", "code"),
    [
        (kill_this_process, "was killed by SIGKILL; if memory ran out", 5),
        (leave_this_process, "exited with code 3", 1),
    ],
)
def test_a_loader_process_that_ends_is_no_error_of_the_task(does, how, code):
    data = PortionLoader(Faulty(does), batch_size=4, seed=0, shuffle=False, processes=1)
    with pytest.raises(ProcessLost) as caught:
        batch_of(data, 0, 12, 16, 0)
    data.close()
    error = caught.value
    assert "data loader" in error.message
    assert how in error.message
    assert error.exit_code == code
    assert not isinstance(error, TaskError)


def hang(until: int) -> None:
    os.read(until, 1)


def hang_in_c(until: int) -> None:
    ctypes.PyDLL(None).read(until, bytes(1), 1)  # It holds the interpreter's lock.


ODD = "\u00e9\u4e2d\U0001f600 '2'.py"
"""The name of a file."""
found: dict[str, Any] = {}
exec(compile("def hang_in_odd_file(until): os.read(until, 1)", ODD, "exec"), globals(), found)
PLACES = [
    (hang, f"{__file__}:{hang.__code__.co_firstlineno + 1}"),
    (hang_in_c, f"{__file__}:{hang_in_c.__code__.co_firstlineno + 1}"),
    (found["hang_in_odd_file"], f"{ODD}:1"),
]


def asked(data: PortionLoader, is_enough: Callable[[Waits], bool], end: int) -> list[Waits]:
    """Two answers while it waits, the first of which is enough; then what hangs goes on."""
    try:
        while (waits := data.waits_for()) is None or not is_enough(waits):
            threading.Event().wait(0.01)
        again = data.waits_for()
        assert again is not None
        return [waits, again]
    finally:
        os.write(end, b"x")


@pytest.mark.parametrize("loader", [1], indirect=True, ids=["processes"])
@pytest.mark.parametrize(("does", "place"), PLACES, ids=["python", "c", "odd_file"])
def test_the_line_is_named_where_a_process_hangs_that_loads_data(loader, does, place):
    """One of two: the other waits for work. Both go on as before when they were asked."""
    until, end = os.pipe()
    data = loader(Faulty(partial(does, until)), shuffle=False, processes=2, place="train.py:7")
    assert data.waits_for() is None
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asked, data, lambda waits: waits.place == place, end)
        assert batch_of(data, 0, 8, 20, 1).tolist() == [12, 13, 14, 15]
    waits, again = answers.result()
    assert again == waits
    assert data.waits_for() is None
    assert waits.place == place
    text = r"waiting for a batch from the data loaders, pids \d+, \d+; \d+ is at "
    assert re.fullmatch(text + re.escape(place), waits.text)
    assert waits.stack.index("in __getitem__") < waits.stack.index(f"in {does.__name__}")
    assert batch_of(data, 0, 8, 20, 2).tolist() == [16, 17, 18, 19]
    for fd in (until, end):
        os.close(fd)


@pytest.mark.parametrize("loader", [1], indirect=True, ids=["process"])
def test_a_process_that_cannot_be_asked_is_waited_for_at_the_dataset(loader, monkeypatch):
    """It has no handler for the signal, which would end it."""
    monkeypatch.setattr(module, "answer", lambda path: None)
    until, end = os.pipe()
    data = loader(Faulty(partial(hang, until)), shuffle=False, place="train.py:7")
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asked, data, lambda waits: True, end)
        assert batch_of(data, 0, 12, 16, 0).tolist() == [12, 13, 14, 15]
    for place, text, stack in answers.result():
        assert (place, stack) == ("train.py:7", "")
        assert re.fullmatch(r"waiting for a batch from the data loaders, pids \d+", text)
    for fd in (until, end):
        os.close(fd)


class Torn:
    """These samples are broken."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index in self.broken:
            decode_error()
        return index


class TornAtOnce(Torn):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Torn, TornAtOnce])
def test_a_batch_goes_on_without_the_samples_that_fail_to_load(loader, kind):
    dataset = kind(1, 5, 6, 8, 9, 10, 11)
    data = loader(dataset, shuffle=False, accumulate=2, tolerant=True, place="train.py:7")
    ((one, part), (two, rest)), samples, bad, _ = data.step(0, 0, 16, 0)
    assert (one.tolist(), two.tolist()) == ([0, 2, 3], [4, 7])
    assert (part, rest, samples) == (3 / 5, 2 / 5, 5)
    assert [each.row for each in bad] == [1, 5, 6]
    where = f"({__file__}:{decode_error.__code__.co_firstlineno + 1})"
    what = "task.dataset()[1] raised ValueError: cannot decode image"
    assert bad[0].error == f"{what} {where}"
    assert "decode_error" in bad[0].detail
    ((left, part),) = data.step(0, 0, 16, 1).batches
    assert (left.tolist(), part) == ([12, 13, 14, 15], 1.0)
    batches, samples, bad, _ = data.step(0, 8, 12, 0)
    assert (batches, samples, len(bad)) == ([], 0, 4), "nothing is left"
    assert batch_of(data, 0, 12, 16, 0).tolist() == [12, 13, 14, 15]


def test_a_collate_that_fails_is_no_failure_of_a_sample(loader):
    def collate(samples: list[int]) -> list[int]:
        raise ValueError(f"{len(samples)} samples")

    data = loader(Torn(1), shuffle=False, tolerant=True, collate=collate)
    with pytest.raises(TaskError, match="3 samples"):
        batch_of(data, 0, 0, 4, 0)


class Endless(Dataset):
    """Has as many samples as it says, and none of them anywhere."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_in_its_own_order_may_be_longer_than_any_memory(loader):
    size = 10**12
    endless = loader(Endless(size), shuffle=False)
    last = [batch_of(endless, 3, size - 10, size, number).tolist() for number in range(3)]
    assert [*chain(*last)] == [*range(size - 10, size)]
    with pytest.raises(TaskError, match=f"{size}.*4294967296"):
        loader(Endless(size), shuffle=True)
