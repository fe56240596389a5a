"""What the user's code does wrong is said in one line, with the place in the user's file."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from stepping import gradient_of
from torch import nn
from torch.utils.data import Dataset

from daemons.worker.replica import TorchReplica
from daemons.worker.task.failures import failure_of
from daemons.worker.task.user_task import (
    DETAIL_CHARS_MAX,
    MESSAGE_CHARS_MAX,
    Task,
    TaskError,
    calling,
    load_task,
)
from dlctl.errors import JobFailed

GOOD = """
    import torch
    from torch import nn

    class Digits:
        def model(self):
            return nn.Linear(2, 1)

        def dataset(self):
            return [torch.ones(2)]

        def loss(self, model, batch):
            return model(batch).mean()

        def evaluate(self, model):
            return {"accuracy": 1}

    task = Digits()
    """


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.path and sys.modules as they were, after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("train", "dlctl_task_train", "helper", "json"):
        module = sys.modules.get(name)
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        if name != "json":  # Also what tests of other files have left.
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return tmp_path

    return write_file


def line_of(path: Path, text: str) -> str:
    """file:line of the first line with this text."""
    lines = path.read_text().splitlines()
    return f"{path}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def failing(spec: str, directory: Path) -> TaskError:
    with pytest.raises(TaskError) as caught:
        load_task(spec, directory)
    return caught.value


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize("spec", ["train.py:task", "train.py:Digits"])
def test_an_instance_and_a_class_are_tasks(write, spec):
    task = load_task(spec, write(GOOD))
    assert isinstance(task.model(), nn.Linear)
    assert task.evaluate(task.model()) == {"accuracy": 1.0}
    assert task.has("evaluate")
    assert task.collate is None


def test_a_file_of_functions_is_a_task_and_so_is_a_module_in_it(write):
    directory = write(
        """
        from torch import nn
        def model(): return nn.Linear(1, 1)
        def dataset(): return [1]
        def loss(model, batch): return model(batch).mean()
        def collate(samples): return len(samples)
        """,
        "helper.py",
    )
    task = load_task("helper.py", directory)
    assert not task.has("evaluate")
    assert task.collate is not None
    assert task.collate([1, 2]) == 2
    write("import helper")
    assert isinstance(load_task("train.py:helper", directory).model(), nn.Linear)


def test_a_task_imports_files_beside_it(write):
    directory = write("WIDTH = 3", "deep/helper.py")
    write("import helper\n" + dedent(GOOD).replace("nn.Linear(2, 1)", "nn.Linear(helper.WIDTH, 1)"),
          "deep/train.py")  # fmt: skip
    assert load_task("deep/train.py:task", directory).model().in_features == 3


def test_a_file_whose_name_is_taken_loads_all_the_same(write):
    import json

    directory = write(GOOD, "json.py")
    assert isinstance(load_task("json.py:task", directory).model(), nn.Linear)
    assert sys.modules["json"] is json


@pytest.mark.parametrize("spec", ["nothing.py:task", "train.txt:task", ":task", "."])
def test_a_missing_file_is_named(write, spec):
    directory = write("", "train.txt")
    error = failing(spec, directory)
    assert not error.call
    assert str(directory) in (error.where or "")
    assert "train.py:task" in (error.hint or "")


def test_a_syntax_error_has_its_line(write):
    directory = write("x = 1\ndef model(:\n    pass\n")
    error = failing("train.py:task", directory)
    assert error.call == "importing train.py"
    assert error.where == f"{directory / 'train.py'}:2"
    assert error.detail.startswith(f'  File "{directory / "train.py"}", line 2')
    assert "def model(:" in error.detail


def test_a_syntax_error_in_a_file_that_is_imported_shows_who_imports_it(write):
    directory = write("import broken\n")
    (directory / "broken.py").write_text("x = (\n")
    error = failing("train.py:task", directory)
    assert error.where == f"{directory / 'broken.py'}:1"
    assert "import broken" in error.detail
    assert "importlib" not in error.detail
    assert "daemons/worker" not in error.detail


def test_an_import_that_fails_inside_names_the_user_s_line_and_what_to_install(write):
    directory = write("import torch\nimport no_such_package.part\n")
    error = failing("train.py:task", directory)
    assert (error.call, type(error.__cause__)) == ("importing train.py", ModuleNotFoundError)
    assert error.where == f"{directory / 'train.py'}:2"
    assert [text in error.hint for text in ('"no_such_package"', sys.executable)] == [True, True]
    assert "importlib" not in error.detail
    assert "train" not in sys.modules


def test_a_file_that_exits_is_an_error_too(write):
    error = failing("train.py:task", write("import sys\nsys.exit('set DATA first')"))
    assert type(error.__cause__) is SystemExit


def test_a_name_that_is_not_there_gets_a_suggestion(write):
    directory = write(GOOD)
    assert '"task"' in failing("train.py:tsak", directory).hint
    error = failing("train.py:zzz", directory)
    assert '"zzz"' in error.message
    assert error.hint.endswith("Digits, task")
    assert '"Digits"' in failing("train.py:DigtIs", directory).hint
    many = failing("train.py:zzz", write("\n".join(f"a{n} = {n}" for n in range(800))))
    assert (many.hint or "").endswith(", a18, a19")
    assert failing("train.py:zzz", write("import os")).hint


def test_what_the_task_lacks_is_listed_at_once(write):
    directory = write("class T:\n    def model(self): ...\n    loss = None\ntask = T()")
    error = failing("train.py:task", directory)
    assert re.findall(r"\w+\(\)", error.message) == ["dataset()", "loss()"]
    assert error.where == f"{directory / 'train.py'}:1"
    assert "loss(model, batch)" in error.hint


def test_a_class_that_cannot_be_made_is_an_error_of_the_task(write):
    directory = write("class T:\n    def __init__(self):\n        raise OSError('no disk')")
    error = failing("train.py:T", directory)
    assert (error.call, type(error.__cause__)) == ("T()", OSError)
    assert error.where == f"{directory / 'train.py'}:3"


# ---------------------------------------------------------------- calls


def test_an_error_deep_in_torch_is_shown_at_the_user_s_line(write):
    directory = write(GOOD)
    task = load_task("train.py:task", directory)
    with pytest.raises(TaskError) as caught:
        task.loss(task.model(), torch.ones(5, 3))
    error = caught.value
    assert error.call == "task.loss"
    assert error.where == line_of(directory / "train.py", "return model(batch).mean()")
    assert "return model(batch).mean()" in error.detail
    assert "torch/nn" not in error.detail
    assert "daemons/worker" not in error.detail
    assert isinstance(error.__cause__, RuntimeError)


def test_the_cause_of_an_error_is_in_the_detail(task_of):
    def loss(model: nn.Module, batch: Any) -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(TaskError) as caught:
        task_of(loss=loss).loss(nn.Linear(1, 1), None)
    assert caught.value.detail.index("KeyError: 'first'") < caught.value.detail.index("second")


def test_ctrl_c_and_our_own_errors_pass_through():
    with pytest.raises(KeyboardInterrupt), calling("task.loss"):
        raise KeyboardInterrupt
    inner = TaskError("task.dataset()[3] raised ValueError: odd")
    with pytest.raises(TaskError) as caught, calling("task.loss"):
        raise inner
    assert caught.value is inner


@pytest.mark.parametrize("base", [Exception, RuntimeError])
def test_an_exception_whose_text_fails_is_named_all_the_same(base):
    class MuteError(base):
        def __str__(self) -> str:
            raise self

    with pytest.raises(TaskError, match="MuteError"), calling("f"):
        raise MuteError
    assert "MuteError" in failure_of(MuteError()).error


def test_whatever_an_exception_says_can_be_sent():
    with pytest.raises(TaskError) as caught, calling("f"):
        raise ValueError("\ud800" + "x" * 100_000)
    error = caught.value
    assert len(error.message) <= MESSAGE_CHARS_MAX
    assert len(error.detail) <= DETAIL_CHARS_MAX
    assert "\\ud800xxx" in error.message
    error.detail.encode()


def test_a_task_error_survives_the_way_out_of_a_loader_process():
    error = TaskError("what", where="train.py:3", hint="do")
    error.detail = "trace"
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.where, again.hint, again.detail) == (
        "what",
        "train.py:3",
        "do",
        "trace",
    )


def test_a_failed_task_is_a_failed_job():
    assert TaskError("x").exit_code == JobFailed.exit_code == 7


# ---------------------------------------------------------------- results


class Lengthless:
    def __getitem__(self, index: int) -> int:
        return index


class WithoutSamples(Dataset):
    def __len__(self) -> int:
        return 100


class Broken(Lengthless):
    def __len__(self) -> int:
        raise OSError("the index file is gone")


@pytest.mark.parametrize(
    ("part", "result", "complaint"),
    [
        ("model", None, r"task\.model returned None, not a torch\.nn\.Module"),
        ("model", {}, r"task\.model returned a value of type dict, not a torch\.nn\.Module"),
        ("dataset", None, r"task\.dataset returned None, not a map-style dataset"),
        ("dataset", iter([1]), r"task\.dataset returned a value of type list_iterator"),
        ("dataset", Lengthless(), r"task\.dataset returned a value of type Lengthless"),
        ("dataset", WithoutSamples(), r"task\.dataset returned a value of type WithoutSamples"),
        ("dataset", Broken(), r"len\(task\.dataset\(\)\) raised OSError: the index file is gone"),
        ("dataset", [], r"task\.dataset\(\) has no samples"),
        ("loss", None, r"task\.loss returned None, not a torch\.Tensor"),
        ("loss", 0.5, r"task\.loss returned a value of type float, not a torch\.Tensor"),
        ("loss", torch.ones(4), r"task\.loss returned a float32 tensor of shape \[4\], not one"),
        ("loss", torch.tensor(3), r"task\.loss returned a int64 tensor of shape \[\], not one"),
        ("loss", (torch.tensor(1.0), None), r"task\.loss returned None, not a dict of names and"),
        ("loss", (0.5, {}), r"task\.loss returned a value of type float, not a torch\.Tensor"),
        (
            "loss",
            (torch.ones(1), {}, 2, 3),
            r"task\.loss returned a value of type tuple, not a torch",
        ),
        (
            "loss",
            (torch.ones(1), {}, {}),
            r"task\.loss\[2\] returned a value of type dict, not a weight, one number",
        ),
        (
            "loss",
            (None, {"a": "no"}),
            r'task\.loss\["a"\] returned a value of type str, not a numb',
        ),
        (
            "loss",
            (None, {"a": torch.ones(2)}),
            r'task\.loss\["a"\] returned a float32 tensor of sha',
        ),
        ("loss", (None, {"x" * 201: 1}), r"task\.loss returned a name of 201 characters"),
        ("loss", (None, {str(n): n for n in range(65)}), r"returned 65 metrics; at most 64"),
        ("loss", torch.tensor(1.0), r"task\.loss returned a tensor without a gradient"),
        ("evaluate", None, r"task\.evaluate returned None, not a dict of names and numbers"),
        ("evaluate", {1: 0.5}, r"task\.evaluate returned a value of type dict, not a dict of"),
        ("evaluate", {"a": "high"}, r'task\.evaluate\["a"\] returned a value of type str, not a'),
        ("evaluate", {"a": 10**400}, r'task\.evaluate\["a"\] returned a value of type int, not a'),
        ("evaluate", {"a": torch.ones(2)}, r'task\.evaluate\["a"\] returned a float32 tensor'),
    ],
)
def test_a_wrong_result_is_described_with_the_function_s_place(task_of, part, result, complaint):
    def user_function(*arguments: Any) -> Any:
        return result

    task = task_of(**{part: user_function})
    arguments = {"loss": (None, None), "evaluate": (None,)}.get(part, ())
    with pytest.raises(TaskError, match=complaint) as caught:
        getattr(task, part)(*arguments)
    assert (caught.value.where or "").startswith(f"{Path(__file__)}:")


def test_numbers_of_all_kinds_are_metrics(task_of):
    metrics = {
        "int": 3,
        "bool": True,
        "numpy": np.float32(0.5),
        "array": np.array([2]),
        "tensor": torch.tensor(0.25),
        "nan": float("nan"),
    }
    task = task_of(evaluate=lambda model: metrics)
    found = task.evaluate(nn.Linear(1, 1))
    assert np.isnan(found.pop("nan"))
    assert found == {"int": 3.0, "bool": 1.0, "numpy": 0.5, "array": 2.0, "tensor": 0.25}
    assert all(type(value) is float for value in found.values())


def test_a_loss_is_told_of_step_and_epoch_as_far_as_it_asks(task_of):
    calls: list[tuple[object, ...]] = []

    def both(model: nn.Module, batch: torch.Tensor, *, step: int, epoch: int) -> torch.Tensor:
        calls.append((step, epoch))
        return model(batch).mean()

    def one(model: nn.Module, batch: torch.Tensor, epoch: int = -1) -> torch.Tensor:
        calls.append((epoch,))
        return model(batch).mean()

    def neither(step: nn.Module, batch: torch.Tensor, **others: int) -> torch.Tensor:
        calls.append((others,))
        return step(batch).mean()

    for loss in (both, one, neither):
        task_of(loss=loss).loss(nn.Linear(6, 1), torch.ones(2, 6), 7, 2)
    assert calls == [(7, 2), (2,), ({},)]


def test_what_finish_returns_is_text_or_nothing(task_of):
    model = nn.Linear(1, 1)
    assert task_of(finish=lambda model, metrics: f"{metrics}").finish(model, {"a": 1}) == "{'a': 1}"
    assert task_of(finish=lambda model, metrics: None).finish(model, {}) == ""
    with pytest.raises(TaskError, match=r"task\.finish.* float"):
        task_of(finish=lambda model, metrics: 0.5).finish(model, {})
    assert not task_of().has("finish")


def test_a_backward_pass_that_fails_is_an_error_of_the_task(task_of):
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model(batch).exp()
        total = hidden.sum()
        hidden += 1  # exp needs its result for the gradient
        return total

    replica = TorchReplica(task_of(loss=loss), device="cpu", seed=0)
    with pytest.raises(TaskError) as caught:
        gradient_of(replica, torch.ones(2, 6))
    assert caught.value.where == f"{__file__}:{loss.__code__.co_firstlineno}", "and not torch's"


def test_a_task_that_is_no_object_with_the_three_functions_is_refused():
    with pytest.raises(TaskError, match=r"model\(\).*dataset\(\).*loss\(\)"):
        Task(object())  # type: ignore[arg-type]
