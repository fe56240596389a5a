"""`[log] wandb` and `mlflow`: wrong values are refused with their line, and no secret is shown."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.jobfile import JobFileError, JobFileProblem
from dlctl.util import extras

SECRET = "s3cr3t"
LINE = 5


@pytest.fixture
def has_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_there", lambda _: True)


def job(folder: Path, log: str) -> Path:
    (folder / "train.py").write_text("task = None\n")
    path = folder / "job.toml"
    path.write_text(f'[job]\nname = "digits"\ntask = "train.py:task"\n[log]\n{log}\n')
    return path


def refused(folder: Path, log: str) -> tuple[JobFileProblem, str]:
    with pytest.raises(JobFileError) as caught:
        jobfile.load(job(folder, log))
    (problem,) = caught.value.problems
    assert problem.line == LINE
    return problem, str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("wandb", "online"), ("mlflow", "http://host:5000")])
def test_without_its_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setitem(sys.modules, key, None)
    problem, _ = refused(tmp_path, f'{key} = "{value}"')
    assert problem.key == f"log.{key}"
    assert f"pip install 'dlctl[{key}]'" in problem.suggestion


def test_switched_off_no_package_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, key, None)
    read = jobfile.load(job(tmp_path, 'wandb = "off"\nmlflow = ""'))
    assert (read.log.wandb, read.log.mlflow) == ("off", "")


@pytest.mark.usefixtures("has_packages")
@pytest.mark.parametrize("value", ['"maybe"', "true", '""', "1"])
def test_wandb_has_three_values(tmp_path: Path, value: str) -> None:
    problem, _ = refused(tmp_path, f"wandb = {value}")
    assert problem.key == "log.wandb"


@pytest.mark.usefixtures("has_packages")
@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("mlflow:5000", '"http://mlflow:5000"'), ("localhost", '"http://localhost"'),
        ("10.0.0.1:80/x", '"http://10.0.0.1:80/x"'), ("mlruns", '"file:mlruns"'),
        ("/home/me/mlruns", '"file:mlruns"'), ("http://", ""), ("a b://x", ""), ("://x", ""),
        ("env:", '"env:MLFLOW_TRACKING_URI"'), ("env:A-B", '"env:MLFLOW_TRACKING_URI"'),
        ("env:DLCTL_TEST_UNSET", ""),
    ],
)  # fmt: skip
def test_an_address_needs_a_scheme(tmp_path: Path, address: str, meant: str) -> None:
    problem, _ = refused(tmp_path, f'mlflow = "{address}"')
    assert problem.key == "log.mlflow"
    assert meant in problem.suggestion


@pytest.mark.usefixtures("has_packages")
@pytest.mark.parametrize(
    ("address", "meant"),
    [
        (f"http://me:{SECRET}@host:5000", "MLFLOW_TRACKING_PASSWORD"),
        (f"https://{SECRET}@host", "MLFLOW_TRACKING_PASSWORD"),
        (f"postgresql://me:{SECRET}@db/x", '"env:MLFLOW_TRACKING_URI"'),
        (f"mysql://db/x?password={SECRET}", '"env:MLFLOW_TRACKING_URI"'),
    ],
)
def test_one_with_a_password_is_refused_and_not_shown(
    tmp_path: Path, address: str, meant: str
) -> None:
    problem, text = refused(tmp_path, f'mlflow = "{address}"')
    assert meant in problem.suggestion
    assert "***" in text
    assert SECRET not in text
    assert SECRET not in str({**problem.to_dict(), **dataclasses.asdict(problem)})


@pytest.mark.usefixtures("has_packages")
def test_a_variable_may_have_a_password_but_needs_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", f"postgresql://me:{SECRET}@db/x")
    assert jobfile.load(job(tmp_path, 'mlflow = "env:STORE"')).log.mlflow == "env:STORE"
    for value in (f"me:{SECRET}@db", "env:STORE"):
        monkeypatch.setenv("STORE", value)
        problem, text = refused(tmp_path, 'mlflow = "env:STORE"')
        assert "STORE" in problem.message
        assert SECRET not in text


@pytest.mark.usefixtures("has_packages")
def test_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    for written, expected in {
        "sqlite:///x/m.db": f"sqlite:///{tmp_path}/x/m.db",
        "sqlite:////x/m.db": "sqlite:////x/m.db",
        "file:mlruns": f"file://{tmp_path}/mlruns",
        "file:///x/mlruns": "file:///x/mlruns",
        "http://mlflow:5000/x": "http://mlflow:5000/x",
        "databricks://profile": "databricks://profile",
    }.items():
        assert jobfile.load(job(tmp_path, f'mlflow = "{written}"')).log.mlflow == expected
