"""What a task has is used, or refused with its line; a name that looks like a part is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from daemons.worker.data.federated_clients import clients_of
from daemons.worker.data.sample_order import SampleOrder, chosen_by
from daemons.worker.ranks.model_slices import _expanded
from daemons.worker.ranks.model_stages import cut
from daemons.worker.task import task_parts
from daemons.worker.task.user_task import Task, TaskError, load_task
from dlctl.job import config

SIZE, SEED = 12, 5


def task(**more: Any) -> Task:
    whole = {"model": nn.Module, "dataset": list, "loss": lambda model, batch: None, **more}
    return Task(SimpleNamespace(**whole))


def refused(**more: Any) -> TaskError:
    with pytest.raises(TaskError) as caught:
        task(**more)
    return caught.value


def order(**more: Any) -> SampleOrder:
    draw = chosen_by(task(**more), range(SIZE), SEED)
    return SampleOrder(SIZE, seed=SEED, shuffle=True, draw=draw)


# ---------------------------------------------------------------- data in place of a function


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list, tuple])
def test_weights_that_are_no_function_draw_as_those_that_one_returns(kind: Any) -> None:
    weights = [0.0, 1.0, 3.0] + [0.0] * (SIZE - 3)
    chosen = order(sample_weights=kind(weights))
    assert set(chosen.rows(0, 0, SIZE).tolist()) <= {1, 2}
    assert chosen.digest == order(sample_weights=lambda dataset: weights).digest


def test_wrong_weights_are_said_as_what_they_are() -> None:
    with pytest.raises(TaskError, match=r"task\.sample_weights.* float32 .*\[3\]"):
        order(sample_weights=torch.ones(3))


class ByEpoch(Sampler[int]):
    """A sampler as users write it."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(SIZE).tolist())


def samplers() -> dict[str, Any]:
    """Each as a new process would have it."""
    own = torch.Generator().manual_seed(1)
    return {
        "random": RandomSampler(range(SIZE)),
        "generator": RandomSampler(range(SIZE), generator=own),
        "subset": SubsetRandomSampler([1, 5, 7], generator=own),
        "weighted": WeightedRandomSampler([1.0] * SIZE, SIZE, generator=own),
        "distributed": DistributedSampler(range(SIZE), num_replicas=1, rank=0),
        "set_epoch": ByEpoch(),
    }


@pytest.mark.parametrize("name", samplers())
def test_a_torch_sampler_is_read_in_every_epoch_and_alike_by_a_worker_that_comes_later(
    name: str,
) -> None:
    one, late = order(sampler=samplers()[name]), order(sampler=samplers()[name])
    epochs = [one.rows(epoch, 0, one.length).tolist() for epoch in range(4)]
    assert epochs[0] != epochs[1]
    assert late.rows(3, 0, late.length).tolist() == epochs[3]
    assert late.digest == one.digest
    assert sorted(epochs[0]) == [1, 5, 7] or len(epochs[0]) == SIZE


@pytest.mark.parametrize("sampler", [SequentialSampler(range(3)), [0, 1, 2], torch.arange(3)])
def test_an_order_that_never_changes_is_one_too(sampler: Any) -> None:
    chosen = order(sampler=sampler)
    assert [chosen.rows(epoch, 0, 3).tolist() for epoch in (0, 1)] == [[0, 1, 2]] * 2


class Forgets(Sampler[int]):
    """Its order depends on how often it was read."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SIZE).tolist())


FORGETS = Forgets()


@pytest.mark.parametrize("sampler", [FORGETS, lambda dataset, epoch: iter(FORGETS)])
def test_an_order_that_depends_on_how_often_it_was_asked_for_is_refused(sampler: Any) -> None:
    with pytest.raises(TaskError, match="epoch 0") as e:
        order(sampler=sampler)
    assert (e.value.where or "").startswith(f"{__file__}:")
    assert "set_epoch" in (e.value.hint or "")


def test_the_other_parts_that_return_data_may_be_data() -> None:
    job = config.JobFile(
        job=config.Job(name="x", task="x"), data=config.Data(clients=2, partition="task")
    )
    found = clients_of(job, task(clients=torch.tensor([0, 1, 1])), [0, 0, 0])
    assert found is not None
    assert list(found.sizes) == [1, 2]
    assert task(client_sizes=[3, 4]).client_sizes(2).tolist() == [3, 4]
    tables = {"words": (10, 2, 0.0)}
    assert task(tables=tables, rows=lambda batch: {}).tables() == tables
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert cut(task(stages=[["0"], ["1"]]), model, 2).stages == (("0",), ("1",))
    plan = _expanded(task(), model, task(tensor_plan={"*": "colwise"}).tensor_plan(model))
    assert plan.keys() == {"0", "1"}


# ---------------------------------------------------------------- neither


@pytest.mark.parametrize("part", ["model", "dataset", "loss", "evaluate", "finish", "collate"])
@pytest.mark.parametrize("given", [3, {}, torch.ones(2)])
def test_what_has_to_be_a_function_and_is_none_is_refused(part: str, given: Any) -> None:
    error = refused(**{part: given})
    assert error.message.startswith(f"task.{part} ")
    assert f"`def {part}(self" in (error.hint or "")


def test_a_module_that_is_called_as_a_function_is_one_but_for_a_model_or_loss() -> None:
    batched = nn.Identity()
    assert task(collate=batched).collate is batched
    assert task(evaluate=batched).has("evaluate")


@pytest.mark.parametrize("part", ["sampler", "sample_weights", "collate_fn"])
def test_a_number_is_no_part(part: str) -> None:
    assert f"task.{part.removesuffix('_fn')} " in refused(**{part: 3}).message


@pytest.mark.parametrize("part", ["stages", "clients", "parallelize", "rows", "change"])
def test_parts_that_not_all_jobs_have_may_be_anything_in_the_others(part: str) -> None:
    made = task(**{part: 3})
    with pytest.raises(TaskError, match=rf"task\.{part}.* int"):
        made.has(part)


@pytest.mark.parametrize("part", [*task_parts.ALWAYS, "stages"])
def test_none_stands_for_a_part_that_is_not_there(part: str) -> None:
    assert not task(**{part: None}).has(part)


MODULES = """
    from torch import nn

    class Digits:
        loss = nn.CrossEntropyLoss()

        def __init__(self):
            self.model = nn.Linear(2, 1)

        def dataset(self):
            return [1]

    task = Digits()
    """


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "train", None)  # type: ignore[arg-type]
    del sys.modules["train"]

    def write(text: str, name: str = "train.py") -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
        return tmp_path / name

    return write


def test_a_module_in_place_of_a_function_is_refused_with_its_line_and_what_to_write(
    written: Any,
) -> None:
    path = written(MODULES)
    with pytest.raises(TaskError) as caught:
        load_task("train.py:task", path.parent)
    error = caught.value
    assert error.message == (
        "task.model is a value of type Linear, a torch.nn.Module, not a function"
    )
    assert error.where == f"{path}:8"
    assert "`def model(self):" in (error.hint or "")
    written(MODULES.replace("self.model = ", "self.model = lambda: "))
    with pytest.raises(TaskError) as caught:
        load_task("train.py:task", path.parent)
    assert "CrossEntropyLoss" in caught.value.message
    assert caught.value.where == f"{path}:5"
    assert "`def loss(self," in (caught.value.hint or "")


def test_in_a_file_of_functions_it_is_the_line_of_the_name(written: Any) -> None:
    path = written("from torch import nn\n\nmodel: nn.Module = nn.Linear(1, 1)\ndataset = list\n")
    with pytest.raises(TaskError) as caught:
        load_task("train.py", path.parent)
    assert caught.value.where == f"{path}:3"
    assert "`def model():" in (caught.value.hint or "")


# ---------------------------------------------------------------- names


def test_torch_s_name_for_collate_is_one_too() -> None:
    assert task(collate_fn=len).collate is len
    assert task(collate_fn=len).has("collate")
    assert task(collate=len, collate_fn=len).collate is len
    assert "collate_fn" in refused(collate=len, collate_fn=sum).message


def test_one_method_may_have_both_names_of_collate() -> None:
    class Both:
        def model(self) -> None: ...
        def dataset(self) -> None: ...
        def loss(self, model: nn.Module, batch: Any) -> None: ...
        def collate(self, samples: list[Any]) -> None: ...

        collate_fn = collate

    assert Task(Both()).has("collate")


def warnings(**more: Any) -> list[str]:
    return task(**more).unused()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("eval", "evaluate"), ("evalute", "evaluate"), ("evaluate_fn", "evaluate"),
        ("validation_step", "evaluate"), ("collator", "collate"), ("sampler_fn", "sampler"),
        ("sample_weight", "sample_weights"), ("finsh", "finish"),
    ],
)  # fmt: skip
def test_a_name_that_is_close_to_a_part_is_told(name: str, part: str) -> None:
    line = f"the task has {name}, which dlctl does not use: did you mean {part}?"
    assert warnings(**{name: lambda *_: None}) == [line]
    assert warnings(**{name: lambda *_: None, part: lambda *_: None}) == [], "it has that one"


def test_data_that_is_close_to_a_part_that_may_be_data_is_told() -> None:
    assert "sample_weights?" in warnings(sample_weight=torch.ones(3))[0]
    assert warnings(eval=torch.ones(3), stage=3, finished=False) == []


@pytest.mark.parametrize(
    ("name", "key"),
    [("optimizer", "[inner] or [optimizer]"), ("lr_scheduler", "[schedule]"),
     ("batch_sampler", "workers.batch_size")],
)  # fmt: skip
def test_what_the_job_file_sets_is_told(name: str, key: str) -> None:
    (line,) = warnings(**{name: object()})
    assert line.startswith(f"the task has {name}, which dlctl does not use: {key}")


def test_what_fails_when_it_is_read_stops_no_job(written: Any) -> None:
    class Lazy:
        model = dataset = loss = finsh = lambda *_: None

        @property
        def clients(self) -> None:
            raise RuntimeError("only on the other host")

    assert Task(Lazy()).unused() == [
        "the task has finsh, which dlctl does not use: did you mean finish?"
    ]
    path = written(
        """
        def model(): ...
        def dataset(): ...
        def loss(model, batch): ...
        joined = str.join
        """
    )
    assert load_task("train.py", path.parent).unused() == []


class OfTorch(nn.Module):
    """A task may be a module: `eval` and `train` are torch's names then."""

    def model(self) -> nn.Module:
        return self

    def dataset(self) -> list[int]:
        return [1]

    def loss(self, model: nn.Module, batch: Any) -> None: ...

    def helper(self) -> None: ...

    @property
    def optimum(self) -> None:
        raise AssertionError("nobody asks")


def test_names_that_the_author_did_not_give_are_not_told(written: Any) -> None:
    assert Task(OfTorch()).unused() == []
    path = written(
        """
        from inspect import isfunction as eval
        from torch.optim import SGD as optimum
        import evaluate_helpers as evaluat
        def model(): ...
        def dataset(): ...
        def loss(model, batch): ...
        def colate(samples): ...
        """
    )
    written("", "evaluate_helpers.py")
    assert load_task("train.py", path.parent).unused() == [
        "the task has colate, which dlctl does not use: did you mean collate?"
    ]


def test_a_required_part_that_is_missing_names_what_may_be_meant() -> None:
    user = SimpleNamespace(
        model=nn.Module, train_dataset=list, training_step=lambda model, batch: None
    )
    with pytest.raises(TaskError, match=r"dataset\(\).*loss\(\)") as caught:
        Task(user)
    hint = "; train_dataset may be its dataset, training_step may be its loss"
    assert (caught.value.hint or "").endswith(hint)


# ---------------------------------------------------------------- imports


@pytest.mark.parametrize(
    ("project", "says"),
    [("", "sys.path.insert(0, "), ("pyproject.toml", " -m pip install -e ")],
)
def test_a_package_near_the_task_that_python_does_not_find_has_its_folder(
    written: Any, project: str, says: str
) -> None:
    root = written("", "nearlib/__init__.py").parent.parent
    if project:
        written("", project)
    path = written("import nearlib.part\n", "jobs/train.py")
    with pytest.raises(TaskError) as caught:
        load_task("train.py:task", path.parent)
    assert (caught.value.hint or "").startswith(f'"nearlib" is in {root},')
    assert says in (caught.value.hint or "")


def test_a_relative_import_in_the_task_s_file_says_what_to_write(written: Any) -> None:
    path = written("from . import helper\n")
    with pytest.raises(TaskError) as caught:
        load_task("train.py:task", path.parent)
    assert 'write "import x"' in (caught.value.hint or "")
