"""Jobs that run a program with a training loop of its own, in place of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlctl import jobfile, registry
from dlctl.algorithms.shapes import why_no_loop
from dlctl.job.config import JobFile, from_dict, to_dict
from dlctl.jobfile import JobFileError, summary

HEAD = '[job]\nname = "own"\n'
SCRIPT = f'{HEAD}script = "train.py"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('nothing is run here')\n")
    (tmp_path / "pkg").mkdir()
    for name in ("__init__", "__main__", "fit"):
        (tmp_path / "pkg" / f"{name}.py").write_text("")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").write_text("")
    return tmp_path


def load(folder: Path, text: str) -> JobFile:
    file = folder / "job.toml"
    file.write_text(text)
    return jobfile.load(file)


def problems(folder: Path, text: str) -> dict[str, jobfile.JobFileProblem]:
    with pytest.raises(JobFileError) as caught:
        load(folder, text)
    return {problem.key: problem for problem in caught.value.problems}


def algorithm(name: str, more: str = "") -> str:
    return f'{SCRIPT}[algorithm]\nname = "{name}"\n{more}'


# ---------------------------------------------------------------- what is run


def test_a_resolved_job_has_the_full_path_of_its_script(folder: Path) -> None:
    job = load(folder, f'{SCRIPT}args = ["--lr", "0.1"]\n')
    assert job.has_loop
    assert job.job.file == str(folder.resolve() / "train.py")
    assert job.job.search_path == folder.resolve()
    assert job.job.args == ("--lr", "0.1")
    assert from_dict(JobFile, to_dict(job)) == job


@pytest.mark.parametrize(
    ("module", "file"),
    [("train", "train.py"), ("pkg.fit", "pkg/fit.py"), ("pkg", "pkg/__main__.py"),
     ("pkg.__main__", "pkg/__main__.py")],
)  # fmt: skip
def test_a_module_is_searched_from_the_folder_of_the_job_file(
    folder: Path, module: str, file: str
) -> None:
    job = load(folder, f'{HEAD}module = "{module}"\n')
    assert job.job.file == str(folder.resolve() / file)
    assert job.job.search_path == folder.resolve()


def test_on_another_host_the_file_and_the_folder_are_elsewhere(folder: Path) -> None:
    job = load(folder, f'{HEAD}module = "pkg.fit"\n').job.with_file("/other/task/pkg/fit.py")
    assert (job.file, job.search_path) == ("/other/task/pkg/fit.py", Path("/other/task"))
    task = load(folder, f'{HEAD}task = "train.py:task"\n').job.with_file("/other/train.py")
    assert task.task == "/other/train.py:task"


# ---------------------------------------------------------------- one of three


def test_a_job_has_one_of_task_script_and_module(folder: Path) -> None:
    found = problems(folder, f'{SCRIPT}task = "train.py:task"\nmodule = "pkg.fit"\n')
    assert {key: problem.line for key, problem in found.items()} == {
        "job.script": 3, "job.task": 4, "job.module": 5,
    }  # fmt: skip
    assert '"task" is missing' in problems(folder, HEAD)["job.task"].message


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ('script = "train.py:task"', 'did you mean task = "train.py:task"?'),
        ('script = "trian.py"', 'did you mean "train.py"?'),
        ('script = "train"', ""),
        ('script = "pkg"', ""),
        ('module = "pkg.fti"', 'did you mean "pkg.fit"?'),
        ('module = "train.py"', 'did you mean script = "train.py"?'),
        ('module = "bare"', ""),
        ('module = "a b"', ""),
        ('module = "../train"', ""),
        ('task = "train.py"', 'a program with its own training loop is script = "train.py"'),
    ],
)
def test_what_is_meant_is_suggested(folder: Path, line: str, suggestion: str) -> None:
    (problem,) = problems(folder, f"{HEAD}{line}\n").values()
    assert (problem.line, problem.suggestion) == (3, suggestion)


def test_a_task_has_no_arguments(folder: Path) -> None:
    found = problems(folder, f'{HEAD}task = "train.py:task"\nargs = ["x"]\n')
    assert found["job.args"].line == 4
    assert problems(folder, f"{SCRIPT}args = [1]\n")["job.args.0"].line == 4


# ---------------------------------------------------------------- methods


@pytest.mark.parametrize("name", registry.BUILT_IN["algorithms"])
def test_every_method_serves_a_script_or_says_why_not(folder: Path, name: str) -> None:
    method = registry.load("algorithms", name)
    if why_no_loop(method):
        assert why_no_loop(method) in problems(folder, algorithm(name))["algorithm.name"].message
        return
    job = load(folder, algorithm(name, "[workers]\ncount = 2\n"))
    assert job.inner.name in ("script", "none")
    steps_itself = method.push_kind(method.Options()).is_displacement or not method.shape.tables
    assert (job.inner.name == "script") == steps_itself


def test_the_methods_that_need_a_task() -> None:
    refused = {
        name
        for name in registry.BUILT_IN["algorithms"]
        if why_no_loop(registry.load("algorithms", name))
    }
    assert refused == {"sandblaster", "hogwild", "rows", "split", "kfac"}


def test_a_methods_own_engine_needs_a_task(folder: Path) -> None:
    assert problems(folder, algorithm("toy-engine"))["algorithm.name"].line == 5


def test_a_script_brings_its_own_optimizer(folder: Path) -> None:
    job = load(folder, algorithm("diloco", '[schedule]\nkind = "cosine"\n'))
    assert (job.inner.name, job.inner.options) == ("script", {})
    assert "own optimizer" in summary.of(job)
    assert load(folder, algorithm("downpour", '[inner]\nname = "script"\n')).inner.name == "script"
    found = problems(folder, algorithm("diloco", '[inner]\nname = "adamw"\n'))
    assert found["inner.name"].line == 7
    found = problems(folder, f'{HEAD}task = "train.py:task"\n[inner]\nname = "script"\n')
    assert found["inner.name"].line == 5
    found = problems(folder, algorithm("diloco", '[inner]\nname = "none"\n'))
    assert found["inner.name"].suggestion == 'use "script", or remove [inner]'


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradient.accumulate", 4),
        ("gradient.precision", "bf16"),
        ("gradient.compile", True),
        ("gradient.clip_norm", 1.0),
        ("workers.loader_processes", 2),
        ("workers.batch_size", "auto"),
        ("replica.fsdp", 2),
        ("data.bad_samples_max", 1),
    ],
)
def test_what_the_script_does_itself_is_refused(folder: Path, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
    found = problems(folder, f"{SCRIPT}[{section}]\n{name} = {shown}\n")
    assert {problem.line for problem in found.values()} <= {4, 5}
    assert any(problem_key.startswith(section) for problem_key in found)


def test_a_script_may_be_several_processes_with_any_method(folder: Path) -> None:
    for name in ("downpour", "diloco", "allreduce"):
        text = f'{SCRIPT}[algorithm]\nname = "{name}"\n[workers]\nprocesses = 2\n'
        (folder / "job.toml").write_text(text)
        assert jobfile.load(folder / "job.toml").workers.processes == 2


def test_weights_and_frozen_parameters_are_the_scripts(folder: Path) -> None:
    (folder / "w.safetensors").write_bytes(b"")
    assert problems(folder, f'{SCRIPT}weights = "w.safetensors"\n')["job.weights"].line == 4
    frozen = f'{SCRIPT}[[parameters]]\nmatch = ["*"]\ntrain = false\n'
    assert problems(folder, frozen)["parameters"].line == 4


def test_what_servers_do_needs_no_task(folder: Path) -> None:
    text = algorithm("sync", '[gradient]\nclip = "global"\nclip_norm = 1.0\n')
    assert load(folder, text).gradient.clip_norm == 1.0


def test_clients_need_a_task(folder: Path) -> None:
    assert problems(folder, algorithm("fedavg", "[data]\nclients = 8\n"))["data.clients"].line == 7
