"""How a model is cut into stages and units, how stages go through their micro-batches, and what
goes from one process to another.
"""

from __future__ import annotations

from collections import UserDict, deque
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from daemons.worker import nested_tensors
from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.ranks.model_slices import without_values
from daemons.worker.ranks.model_stages import cut, units
from daemons.worker.ranks.pipeline import schedule, stage_pieces
from daemons.worker.task.model_tensors import layout_of
from daemons.worker.task.user_task import Task, TaskError


class Model:
    def __init__(self, stages: object = None) -> None:
        if stages is not None:
            self.stages = lambda model: stages

    def model(self) -> nn.Module: ...  # type: ignore[empty-body]
    def dataset(self) -> None: ...
    def loss(self, model, batch) -> None: ...


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


def test_stages_are_as_even_as_can_be() -> None:
    found = cut(Task(Model()), layers(10, 1, 10, 40, 10, 10), 3)  # 10, 10, 400, 400, 100 weights
    assert found.stages == (("0", "1", "2"), ("3",), ("4",))
    assert found.stage_bytes == (4 * 420, 4 * 400, 4 * 100)


def test_what_is_outside_of_the_sequence_counts_with_the_first_stage() -> None:
    model = nn.Module()
    model.words = nn.Embedding(30, 10)
    model.blocks = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(5))
    found = cut(Task(Model()), model, 2)
    assert found.stages == (("blocks.0",), tuple(f"blocks.{n}" for n in range(1, 5)))
    assert found.stage_bytes == (1600, 1600)


def test_as_many_stages_as_modules() -> None:
    found = cut(Task(Model()), layers(1, 1, 1, 1, 90), 4)
    assert found.stages == (("0",), ("1",), ("2",), ("3",))


def test_a_stage_has_all_that_it_computes_with_on_its_device() -> None:
    whole, device = layers(4, 4, 4), torch.device("meta")
    whole[1].register_buffer("seen", torch.zeros(()))
    layout, model = layout_of(whole), without_values(whole, device)
    vector = torch.zeros(layout.size())
    stage_pieces(model, layout, vector, cut(Task(Model()), model, 2), device, 1)
    tensors = [*model[0].parameters(), *model[1].parameters(), *model[1].buffers()]
    assert {tensor.device for tensor in tensors} == {device}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (None, "no sequence of modules that could be cut into 3 stages"),
        ([["0"], ["1"], ["layer"]], 'names "layer": the model has no such module'),
        ([["0"], ["1"]], "returned 2 stages of 1, 1 modules; replica.pipeline is 3"),
        ([["0"], ["1"], []], "returned 3 stages of 1, 1, 0 modules"),
        (["0", "1", "0"], "not a list of names of modules for each stage"),
    ],
)
def test_what_cannot_be_cut(stages: object, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        cut(Task(Model(stages)), layers(2, 2, 2), 3)


def test_units_share_nothing_with_what_is_outside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert [*units(model)] == [model[0], model[1][0]]
    model.head = nn.Linear(2, 2)
    model.head.weight = model[0].weight
    assert model[0] not in [*units(model)]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (2, 4), (4, 2), (4, 8)])
def test_no_stage_waits_for_one_that_waits_for_it(kind: str, stages: int, batches: int) -> None:
    waiting = [deque(schedule(kind, n, stages, batches)) for n in range(stages)]
    done = [{"forward": 0, "backward": 0} for _ in range(stages)]
    most = [0] * stages
    while any(waiting):
        before = [len(each) for each in waiting]
        for n, each in enumerate(waiting):
            if not each:
                continue
            what = each[0]
            other = n - 1 if what == "forward" else n + 1
            if 0 <= other < stages and done[other][what] <= done[n][what]:
                continue
            done[n][each.popleft()] += 1
            most[n] = max(most[n], done[n]["forward"] - done[n]["backward"])
        assert before != [len(each) for each in waiting], "all of them wait"
    assert all(each == {"forward": batches, "backward": batches} for each in done)
    if kind == "1f1b":
        assert all(kept <= stages - n for n, kept in enumerate(most))


def test_a_batch_arrives_as_it_was_sent() -> None:
    batch = {
        "x": torch.arange(6).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16),
        "rest": (np.array([True, False]), [1, 2.5, None, "text"], torch.zeros(0, 2)), 3: True,
    }  # fmt: skip
    form, arrays = nested_tensors.packed(batch)
    found = nested_tensors.unpacked(form, [array.copy() for array in arrays])
    assert [*found] == ["x", "half", "rest", 3]
    assert torch.equal(found["x"], batch["x"])
    assert found["half"].dtype is torch.bfloat16
    assert found["rest"][0].tolist() == [True, False]
    assert found["rest"][1] == [1, 2.5, None, "text"]
    assert found["rest"][2].shape == (0, 2)
    for odd in (object(), UserDict(x=1)):
        with pytest.raises(TaskError, match=type(odd).__name__):
            nested_tensors.packed([odd])


def test_batches_are_cut_into_pieces_and_steps_stay_as_they_are() -> None:
    data = TensorDataset(torch.arange(20))
    loader = PortionLoader(
        data, batch_size=5, seed=0, shuffle=False, processes=0, pieces=3, accumulate=2
    )
    steps = [loader.step(0, 0, 17, number).batches for number in range(2)]
    assert [[x.tolist() for (x,), _ in step] for step in steps] == [
        [[0], [1], [2, 3], [4], [5], [6, 7]], [[8], [9, 10], [11], [12, 13], [14], [15, 16]]
    ]  # fmt: skip
    assert [part for _, part in steps[0]] == [n / 8 for n in (1, 1, 2, 1, 1, 2)]
