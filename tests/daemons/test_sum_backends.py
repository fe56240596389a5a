"""By what a group sums, and how a sum by NCCL ends. NCCL itself is not run: that needs two GPUs."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from daemons.worker import sum_backends
from daemons.worker.sum_backends import Device, GivenUp, Nccl, device_of, uses_nccl

NONE = Device()
CPU = torch.device("cpu")


def gpu(uuid: str, nccl: str = "2.27.3") -> Device:
    return Device(uuid, nccl)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([gpu("a"), gpu("b")], True),
        ([gpu("a"), gpu("b"), gpu("c"), gpu("d")], True),
        ([gpu("a"), gpu("a")], False),  # NCCL refuses two members on one GPU
        ([gpu("a"), gpu("b"), gpu("a")], False),
        ([gpu("a"), NONE], False),
        ([NONE, gpu("a"), gpu("b")], False),
        ([NONE, NONE], False),
        ([gpu("a"), gpu("b", "2.26.2")], False),
        ([gpu("a", ""), gpu("b", "")], False),
        ([gpu("a")], False),  # nothing to sum
        ([], False),
    ],
)
def test_nccl_is_used_where_each_member_has_a_gpu_of_its_own(
    devices: list[Device], expected: bool
) -> None:
    assert uses_nccl(devices) is expected
    assert uses_nccl(devices[::-1]) is expected, "all members decide alike"


class Properties:
    def __init__(self, name: str) -> None:
        self.name, self.uuid = name, "a1"


def test_what_a_member_tells_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(CPU) == NONE
    cuda, name = torch.device("cuda:0"), "NVIDIA H200"
    monkeypatch.setattr(sum_backends.dist, "is_nccl_available", lambda: False)
    assert device_of(cuda) == NONE
    monkeypatch.setattr(sum_backends.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties(name))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert device_of(cuda) == gpu("a1")
    name = "NVIDIA H200 MIG 1g.18gb"
    assert device_of(cuda) == NONE


class Group:
    """A group of NCCL of two members with equal vectors; its operation ends after some looks."""

    def __init__(self, looks: int | None, error: Exception | None = None) -> None:
        self.looks, self.error = looks, error
        self.aborts = 0

    def allreduce(self, tensors: list[Any]) -> Group:
        tensors[0] *= 2
        return self

    def is_completed(self) -> bool:
        self.looks = None if self.looks is None else self.looks - 1
        return self.looks == 0

    def exception(self) -> Exception | None:
        return self.error

    def wait(self) -> None:
        assert self.looks == 0, "it would keep the thread waiting for ever"

    def abort(self) -> None:
        self.aborts += 1
        raise RuntimeError("there is no communicator")


def test_a_sum_is_in_place_of_the_vector_on_the_host() -> None:
    vector, group = torch.arange(4.0), Group(looks=3)
    nccl = Nccl(group, CPU)
    nccl.sum(vector, 60.0, lambda: False)
    assert vector.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert group.aborts == 0
    nccl.end()
    assert group.aborts == 1


@pytest.mark.parametrize(
    ("looks", "limit_s", "ends_after", "error", "expected"),
    [
        (None, 60.0, 3, None, GivenUp),  # a member has died, and the others form a new group
        (None, 0.0, None, None, TimeoutError),
        (2, 60.0, None, RuntimeError("remote process exited"), ConnectionError),
    ],
)
def test_a_sum_that_does_not_come_about_aborts_the_communicator_once(
    looks: int | None,
    limit_s: float,
    ends_after: int | None,
    error: Exception | None,
    expected: type[Exception],
) -> None:
    vector, group, asked = torch.ones(2), Group(looks, error), count(1)
    with pytest.raises(expected):
        (nccl := Nccl(group, CPU)).sum(vector, limit_s, lambda: next(asked) == ends_after)
    assert group.aborts == 1
    nccl.end()
    assert group.aborts == 1, "a second one could wait for the first for ever"
    assert vector.tolist() == [1.0, 1.0], "no part of a sum is left in the vector"
